"""The manifest of a conversion: what was written, from what, and the checksums that prove it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning_fastio
from lightning_fastio.convert.source import Skipped, Source
from lightning_fastio.errors import CorruptFileError, FileAccessError

FOLDER_MANIFEST = "manifest.json"

_HEX = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class Shard:
    """One finished file (or NumPy folder) of the destination."""

    path: str
    """Relative to the folder of the manifest."""
    split: str
    """The split it belongs to; empty without splits."""
    num_rows: int
    """Rows in it."""
    files: dict[str, dict[str, Any]]
    """For each file: its ``bytes`` and ``crc32``."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


@dataclass(frozen=True)
class Manifest:
    """What `convert` returns and writes beside its output. Equal inputs and options give equal bytes."""

    version: str
    """Version of lightning_fastio that wrote the data."""
    format: str
    """``numpy``, ``hdf5`` or ``parquet``."""
    source: str
    """Fingerprint of the source: names, sizes and times of its files."""
    options: dict[str, Any]
    """Options that decide what is written."""
    fields: dict[str, str]
    """Field name to dtype and sample shape, such as ``uint8[224, 224, 3]``."""
    classes: list[str]
    """Class names; label ``i`` means ``classes[i]``. Empty without a class mapping."""
    skipped: list[Skipped]
    """Inputs that were left out, with the reason."""
    compression: str = ""
    """How the data is compressed, and why."""
    shards: list[Shard] = field(default_factory=list)
    """The files, in the order of their rows; none after a dry run."""
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each numeric field: count, mean, std, min, max, nulls; class counts for labels."""

    @property
    def num_rows(self) -> int:
        """Rows over all shards."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def splits(self) -> dict[str, int]:
        """Rows of each split; one entry named ``""`` without splits."""
        rows: dict[str, int] = {}
        for shard in self.shards:
            rows[shard.split] = rows.get(shard.split, 0) + shard.num_rows
        return rows

    def dump(self) -> str:
        """The manifest as JSON text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read the manifest of a converted file or folder.

        Args:
            path: The converted file or folder, or the manifest itself.

        Raises:
            FileAccessError: There is no manifest.
            CorruptFileError: It is not one of this package.
        """
        file = manifest_path(Path(path))
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            content["shards"] = [Shard(**shard) for shard in content["shards"]]
            content["skipped"] = [Skipped(**entry) for entry in content["skipped"]]
            return cls(**content)
        except FileNotFoundError:
            raise FileAccessError(f"{file}: no manifest; only data written by `fastio convert` has one") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{file}: not a manifest of lightning_fastio ({error})") from error


def describe(
    source: Source,
    format: str,
    options: Mapping[str, Any],
    *,
    fields: dict[str, str],
    skipped: list[Skipped],
    **found: Any,
) -> Manifest:
    """The manifest of a conversion out of what is known about it; ``found`` are fields of `Manifest`."""
    return Manifest(
        version=lightning_fastio.__version__,
        format=format,
        source=source.fingerprint,
        options=json.loads(json.dumps(options, default=str)),
        fields=fields,
        classes=json.loads(source.metadata.get("classes", "[]")),
        skipped=skipped,
        **found,
    )


def manifest_path(path: Path) -> Path:
    """Where the manifest of a destination lies: inside a folder, beside a file."""
    if path.is_dir():
        return path / FOLDER_MANIFEST
    return path if path.suffix == ".json" else path.with_name(f"{path.name}.{FOLDER_MANIFEST}")


def describe_files(path: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Size and CRC-32 of a file, or of each file in a folder, by path relative to ``root``."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {
        file.relative_to(root).as_posix(): {"bytes": file.stat().st_size, "crc32": crc32_of(file)} for file in files
    }


def crc32_of(file: Path) -> str:
    """CRC-32 of a file in hexadecimal, as zip and gzip have it.

    It finds damage, not forgery. With isal it runs at the speed of memory, so that every byte is worth checking.
    """
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    checksum = 0
    buffer = memoryview(bytearray(1 << 20))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            checksum = crc32(buffer[:count], checksum)
    return f"{checksum:08x}"


def fingerprint(files: Iterable[tuple[str, os.stat_result]], settings: Mapping[str, Any] | None = None) -> str:
    """A short text that changes when a file is added, removed, renamed or replaced (name, size, time)."""
    digest = hashlib.sha256()
    for name, stat in files:
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    if settings:
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def escape_name(name: str) -> str:
    r"""A file name as valid text: bytes that are not UTF-8 become ``\xNN``, a backslash becomes ``\\``."""
    return name.replace("\\", "\\\\").encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def unescape_name(text: str) -> str:
    """The inverse of `escape_name`: a name that ``open`` takes."""
    raw = text.encode("utf-8")
    pieces = raw.split(b"\\\\")
    decoded = [_HEX.sub(lambda match: bytes([int(match[1], 16)]), piece) for piece in pieces]
    return os.fsdecode(b"\\".join(decoded))
