"""Files under a directory that stands for ``/``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_root(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files, paths without the leading slash; returns the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
