"""``fastio verify``: files, sizes, checksums and rows of converted data against its manifest."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fastio.convert.manifest import Manifest, Shard, crc32_of, manifest_path
from lightning_fastio.errors import CorruptFileError, FastIOError
from lightning_fastio.formats import open_reader
from lightning_fastio.quantities import counted


def check_converted(path: str | Path) -> Manifest:
    """Check every file of converted data; see `lightning_fastio.convert.verify`."""
    manifest = Manifest.load(path)
    root = manifest_path(Path(path)).parent
    problems = [problem for shard in manifest.shards for problem in _shard_problems(root, shard)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        found = counted(len(problems), "problem")
        raise CorruptFileError(f"{path}: {found}; convert again, or bring the files back from a copy:\n{listed}")
    return manifest


def _shard_problems(root: Path, shard: Shard) -> list[str]:
    problems = []
    for name, entry in shard.files.items():
        file = root / name
        if not file.is_file():
            problems.append(f"{name}: missing")
        elif file.stat().st_size != entry["bytes"]:
            problems.append(f"{name}: {file.stat().st_size} bytes, the manifest says {entry['bytes']}")
        elif crc32_of(file) != entry["crc32"]:
            problems.append(f"{name}: the checksum differs, its content was changed or damaged")
    if not problems:
        try:
            reader = open_reader(root / shard.path)
            num_rows = len(reader)
            reader.close()
        except FastIOError as error:
            return [f"{shard.path}: cannot be opened: {error}"]
        if num_rows != shard.num_rows:
            problems.append(f"{shard.path}: {num_rows} rows, the manifest says {shard.num_rows}")
    return problems


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``fastio verify``."""
    parser.add_argument("path", help="the converted file or folder")


def main(arguments: Namespace) -> int:
    """Check, and say so."""
    manifest = check_converted(arguments.path)
    rows, files = counted(manifest.num_rows, "row"), counted(len(manifest.shards), "file")
    print(f"{arguments.path}: {rows} in {files}, every byte as written")
    return 0
