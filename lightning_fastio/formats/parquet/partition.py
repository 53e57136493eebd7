"""Fields out of folder names such as ``split=train/year=2024`` (Hive partitions)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

Partition: TypeAlias = dict[str, int | str | None]
"""Field name to the value that all rows of one file have."""

_NULL = "__HIVE_DEFAULT_PARTITION__"


def partitions_of(paths: Sequence[Path], roots: Iterable[Path]) -> list[Partition]:
    """Values that the folders between a root and each file give.

    A field whose values are whole numbers in all files holds int, otherwise str.

    Args:
        paths: Files.
        roots: Folders that were given as the source; names above them are not part of the data.
    """
    roots = list(roots)
    found = [_texts(path, roots) for path in paths]
    texts: dict[str, set[str]] = {}
    for partition in found:
        for name, text in partition.items():
            texts.setdefault(name, set()).add(text)
    is_whole = {name: all(_is_int(text) for text in values - {_NULL}) for name, values in texts.items()}
    return [
        {name: None if text == _NULL else int(text) if is_whole[name] else text for name, text in partition.items()}
        for partition in found
    ]


def root_of(source: str | Path) -> Path:
    """The folder of a source: itself, the part of a glob before its first wildcard, or the folder of a file."""
    path = Path(source)
    parts = path.parts
    wild = next((number for number, part in enumerate(parts) if any(sign in part for sign in "*?[")), None)
    if path.is_dir():
        return path
    return path.parent if wild is None or path.exists() else Path(*parts[:wild])


def _texts(path: Path, roots: Sequence[Path]) -> dict[str, str]:
    root = next((root for root in roots if root in path.parents), path.parent)
    pairs = (part.partition("=") for part in path.relative_to(root).parts[:-1])
    return {unquote(name): unquote(text) for name, sign, text in pairs if name and sign}


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
