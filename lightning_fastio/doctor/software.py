"""Versions: what is out of support, too old, or must not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date

from lightning_fastio.doctor.machine import Finding, Machine

END_OF_SUPPORT = {
    (3, 9): date(2025, 10, 31),
    (3, 10): date(2026, 10, 31),
    (3, 11): date(2027, 10, 31),
    (3, 12): date(2028, 10, 31),
    (3, 13): date(2029, 10, 31),
    (3, 14): date(2030, 10, 31),
}
"""Python's own dates (PEP 596, 619, 664, 693, 719, 745)."""

OLDEST_TORCH = (2, 4)

COMPROMISED = ("2.6.2", "2.6.3")
"""Releases of Lightning that carried foreign code."""


def check_python(today: date, version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Whether Python still gets security fixes."""
    name = f"Python {version[0]}.{version[1]}"
    end = END_OF_SUPPORT.get(version)
    if end is not None and today > end:
        yield Finding(
            "Python",
            f"{name}, out of support since {end:%B %Y}",
            "new releases of torch and NumPy no longer come for it",
            "make an environment with Python 3.12 or later",
            "warning",
        )
    else:
        yield Finding("Python", name)


def check_torch(machine: Machine) -> Iterator[Finding]:
    """Whether torch is recent enough."""
    version = machine.version("torch")
    if version is None:
        yield Finding("torch", "not installed", "nothing runs without it", "pip install torch", "error")
        return
    if _numbers(version)[:2] < OLDEST_TORCH:
        yield Finding(
            "torch",
            f"{version}",
            "the package needs 2.4 or later, and torch fixes only its newest release",
            "pip install --upgrade torch",
            "error",
        )
    else:
        yield Finding("torch", version)


def check_lightning(machine: Machine) -> Iterator[Finding]:
    """Releases that must not run."""
    for name in ("lightning", "pytorch-lightning"):
        version = machine.version(name)
        if version in COMPROMISED:
            yield Finding(
                name,
                f"{version} is a compromised release",
                "it ran foreign code when it was imported",
                f"pip install --upgrade '{name}!=2.6.2,!=2.6.3', and replace every key and token that was on this "
                "machine",
                "error",
            )
        elif version is not None:
            yield Finding(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, such as (2, 13, 0) of ``2.13.0+cpu``."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
