"""Which files a source means, and in which storage format they are.

Formats are told by what files begin with, not by their suffixes: ``.nc``, ``.mat``, ``.h5ad`` and ``.parq`` occur, and
a suffix may lie. A suffix counts only where the contents say nothing, so that an empty ``.h5`` is an error and not a
file to pass over.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError

Source: TypeAlias = str | Path | Sequence[str | Path]
"""A file, a folder, a glob, or a list of these."""

logger = logging.getLogger("lightning_fastio")


@dataclass(frozen=True)
class Format:
    """One storage format."""

    name: str
    """Module in this folder that reads and writes it."""
    title: str
    """Name in messages."""
    suffixes: tuple[str, ...]
    """Usual suffixes; the first one is what a writer is asked with."""
    signatures: tuple[bytes, ...]
    """What files of this format begin with."""
    has_user_block: bool = False
    """Whether the signature may stand at 512, 1024, 2048, ... instead of 0."""
    has_subfolders: bool = False
    """Whether a folder means the files in its subfolders too (Hive partitions)."""


FORMATS = (
    Format("numpy", "NumPy", (".npy", ".npz"), (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")),
    Format(
        "hdf5", "HDF5", (".h5", ".hdf5", ".he5", ".hdf", ".h5ad", ".nc4"), (b"\x89HDF\r\n\x1a\n",), has_user_block=True
    ),
    Format("parquet", "Parquet", (".parquet", ".parq", ".pq"), (b"PAR1", b"PARE"), has_subfolders=True),
)
"""The storage formats. A new one is a module in this folder and a line here."""

_OTHERS = {
    b"CDF\x01": "classic NetCDF, which is not HDF5; `nccopy -k nc4 old.nc new.nc` rewrites it as NetCDF-4, which is",
    b"CDF\x02": "classic NetCDF, which is not HDF5; `nccopy -k nc4 old.nc new.nc` rewrites it as NetCDF-4, which is",
    b"CDF\x05": "classic NetCDF, which is not HDF5; `nccopy -k nc4 old.nc new.nc` rewrites it as NetCDF-4, which is",
    b"MATLAB 5.0": "MATLAB 5; `save('new.mat', '-v7.3')` writes HDF5, which can be read",
    b"ARROW1": "Arrow IPC (Feather); write it as Parquet: pq.write_table(feather.read_table(old), new)",
    b"\x80\x02": "a pickle, which could run code and is never loaded; save the arrays with np.save",
    b"\x80\x03": "a pickle, which could run code and is never loaded; save the arrays with np.save",
    b"\x80\x04": "a pickle, which could run code and is never loaded; save the arrays with np.save",
    b"\x80\x05": "a pickle, which could run code and is never loaded; save the arrays with np.save",
    b"\x1f\x8b": "compressed with gzip; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first",
    b"\x89PNG": "a picture; `fastio convert` turns folders of pictures into arrays",
    b"\xff\xd8\xff": "a picture; `fastio convert` turns folders of pictures into arrays",
    b"SIMPLE  =": "FITS; astropy.io.fits reads it, np.save writes it as .npy",
}
"""Beginnings of files that people try, and what to do about them."""

_TEMPORARY = re.compile(r"\.(tmp|temp|part|partial|crdownload|swp|lock|bak)\d*$|~$|\.(tmp|partial)[.-]", re.IGNORECASE)
_DESCRIBING = {".json", ".jsonl", ".txt", ".md", ".yaml", ".yml", ".toml", ".log"}
_NUMBERS = re.compile(r"(\d+)")
_IS_GLOB = re.compile(r"[*?\[]")


def natural_order(path: str | Path) -> list[tuple[int, int | str]]:
    """Sort key under which ``part-2`` comes before ``part-10``, the same on every file system."""
    pieces = _NUMBERS.split(str(path))
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in pieces if piece]


def format_named(name: str) -> Format:
    """The format of that name."""
    return next(each for each in FORMATS if each.name == name)


def format_of(path: Path) -> Format:
    """The storage format of a file.

    Raises:
        FileAccessError: It is missing or may not be read.
        CorruptFileError: It is empty, or its suffix names a format that its contents do not show.
        FormatError: It is in no format that can be read.
    """
    try:
        found, head = _look(path)
    except OSError as error:
        raise _access_error(path, error) from error
    if found is not None:
        return found
    claimed = next((each for each in FORMATS if path.suffix.lower() in each.suffixes), None)
    other = next((text for start, text in _OTHERS.items() if head.startswith(start)), None)
    if not head:
        raise CorruptFileError(f"{path} is empty (0 bytes); it was never finished, write it again")
    if other is not None:
        raise FormatError(f"{path} is {other}")
    if claimed is not None:
        raise CorruptFileError(
            f"{path} is incomplete or not {claimed.title}: it begins with {head!r}, not {claimed.signatures[0]!r}; "
            "write or copy it again"
        )
    raise FormatError(
        f"{path} is in an unknown format: it begins with {head!r}; "
        f"{', '.join(each.title for each in FORMATS)} can be read, `fastio convert` makes them from other data"
    )


def format_of_source(source: Source, wanted: str | None = None) -> Format:
    """The storage format of a source; for a folder the one with the most bytes.

    Args:
        source: What to look at.
        wanted: Name of the only format that will do.

    Raises:
        ConfigError: It is in another format than the one that is wanted.
        FileAccessError: There is no such file.
        FormatError: It holds no file in a format that can be read.
    """
    for item in items_of(source):
        if not item.is_dir():
            return _the_wanted(item, [format_of(item)], wanted)
        sizes: Counter[Format] = Counter()
        for path in _files_in(item, subfolders=True):
            found = _format_in_folder(path)
            if found is not None and (found.has_subfolders or path.parent == item):
                sizes[found] += 1 + path.stat().st_size
        if sizes:
            return _the_wanted(item, [found for found, _ in sizes.most_common()], wanted)
        raise _no_data(item, "data")
    raise ConfigError("the source is an empty list; name at least one file")


def _the_wanted(item: Path, found: list[Format], wanted: str | None) -> Format:
    """The first of the formats that were found, or the one that is wanted."""
    if wanted is None:
        return found[0]
    for each in found:
        if each.name == wanted:
            return each
    there, title = " and ".join(each.title for each in found), format_named(wanted).title
    raise ConfigError(f"{item} holds {there}, not {title}: use the data module of that format, or FastIODataModule")


def items_of(source: Source) -> Iterator[Path]:
    """Files and folders of a source, globs resolved, each of them there.

    Raises:
        FileAccessError: Nothing is there.
    """
    entries = [source] if isinstance(source, str | Path) else source
    if not isinstance(entries, Iterable) or not all(isinstance(entry, str | Path) for entry in entries):
        raise ConfigError(f"{source!r} is no source: expected a file, a folder, a glob, a list of these, or a mapping")
    for entry in entries:
        path = Path(entry).expanduser()
        if path.exists():
            yield path
        elif _IS_GLOB.search(str(path)):
            matches = sorted(glob.glob(str(path), recursive=True), key=natural_order)
            if not matches:
                raise FileAccessError(f"no file matches {path}")
            yield from map(Path, matches)
        else:
            raise FileAccessError(f"{path} does not exist (looked from {os.getcwd()})")


def resolve(source: Source, format_name: str) -> list[Path]:
    """The files of a source that are in one format, in natural order; lists keep theirs.

    Hidden files, those that begin with an underscore, temporary ones and those in other formats are passed over where
    a folder was named, with one notice. A file that was named itself is never passed over.

    Args:
        source: A file, a folder, a glob, or a list of these.
        format_name: ``numpy``, ``hdf5`` or ``parquet``.

    Raises:
        FileAccessError: Nothing is there.
        FormatError: A file that was named is in another format, or a folder holds none in this one.
    """
    wanted = format_named(format_name)
    paths: list[Path] = []
    for item in items_of(source):
        if item.is_dir():
            paths += _select(item, wanted)
            continue
        found = format_of(item)
        if found is not wanted:
            raise FormatError(f"{item} is {found.title}, but {wanted.title} was expected")
        paths.append(item)
    return paths


def fingerprint_of(paths: Iterable[Path], *details: object) -> str:
    """A short text from names and sizes of files, not their folders, and from what else matters."""
    digest = blake2b(digest_size=12)
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
    digest.update(repr(details).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _select(folder: Path, wanted: Format) -> list[Path]:
    paths, others = [], []
    for path in _files_in(folder, subfolders=wanted.has_subfolders):
        if _format_in_folder(path) is wanted:
            paths.append(path)
        elif path.suffix.lower() not in _DESCRIBING:
            others.append(path.name)
    if not paths:
        raise _no_data(folder, wanted.title)
    if others:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        logger.warning("%s: passed over %s, which are not whole %s files", folder, shown, wanted.title)
    return paths


def _files_in(folder: Path, *, subfolders: bool) -> Iterator[Path]:
    """Files of a folder in natural order, without hidden ones and those that begin with an underscore."""
    entries = sorted(folder.iterdir(), key=natural_order)
    for path in entries:
        if path.name.startswith((".", "_")):
            logger.info("%s: passed over", path)
        elif not path.is_dir():
            yield path
        elif subfolders:
            yield from _files_in(path, subfolders=True)


def _format_in_folder(path: Path) -> Format | None:
    if _TEMPORARY.search(path.name):
        return None
    try:
        found, _ = _look(path)
    except OSError as error:
        raise _access_error(path, error) from error
    return found or next((each for each in FORMATS if path.suffix.lower() in each.suffixes), None)


def _look(path: Path) -> tuple[Format | None, bytes]:
    """The format whose signature a file shows, and its first bytes."""
    with path.open("rb") as file:
        head = file.read(16)
        for each in FORMATS:
            if head.startswith(each.signatures):
                return each, head
        offset, size = 512, os.fstat(file.fileno()).st_size
        while offset < size:
            file.seek(offset)
            start = file.read(8)
            for each in FORMATS:
                if each.has_user_block and start in each.signatures:
                    return each, head
            offset *= 2
    return None, head


def _access_error(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"{path} cannot be opened: {error.strerror or error}")


def _no_data(folder: Path, title: str) -> FormatError:
    folders = [path.name for path in sorted(folder.iterdir(), key=natural_order) if path.is_dir()]
    hint = f"; name one of its subfolders ({', '.join(folders[:8])})" if folders else ""
    return FormatError(f"{folder} holds no {title} file{hint}")
