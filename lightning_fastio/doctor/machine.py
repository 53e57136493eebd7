"""What the checks look at, and what they say."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

Severity = Literal["ok", "info", "warning", "error"]
"""``error``: a run will fail or give wrong results; ``warning``: it is slower than it need be, or at risk."""


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    check: str
    """What was looked at, such as ``/dev/shm``."""
    finding: str
    """What is there, with numbers."""
    why: str = ""
    """Why it matters; empty when all is well."""
    fix: str = ""
    """The command or argument that mends it."""
    severity: Severity = "ok"


@dataclass(frozen=True)
class Load:
    """The data loading that the machine is to carry."""

    num_workers: int = 4
    """Reader threads or processes."""
    prefetch_factor: int = 2
    """Batches that each worker reads ahead."""
    batch_bytes: int = 64 << 20
    """Bytes of one batch."""


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Machine:
    """The machine as its files describe it. Tests give another root, environment and so on."""

    root: Path = Path("/")
    """Stands for ``/``; everything under /proc and /sys is read below it."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables."""
    version: Callable[[str], str | None] = installed_version
    """Version of a distribution, or None when it is not installed."""
    disk_space: Callable[[Path], tuple[int, int]] = lambda path: shutil.disk_usage(path)[::2]
    """Total and free bytes of the file system that holds a path."""

    def text(self, path: str) -> str:
        """Content of a file without surrounding blanks; empty where it is missing or may not be read.

        Args:
            path: From the root, without a leading slash.
        """
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """A file that holds one whole number, or None."""
        try:
            return int(self.text(path))
        except ValueError:
            return None

    def folder(self, path: str) -> list[str]:
        """Sorted names in a folder; empty where it is missing."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    def soft_limit(self, name: str) -> int | None:
        """A soft limit of this process, such as ``Max open files``; None if unlimited or unknown."""
        for line in self.text("proc/self/limits").splitlines():
            if line.startswith(name):
                value = line[len(name) :].split()[0]
                return int(value) if value.isdecimal() else None
        return None


def size(num_bytes: float) -> str:
    """Bytes for a reader, such as ``64.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
