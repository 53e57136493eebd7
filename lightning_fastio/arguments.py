"""Arguments that users pass: what they may be, said by name where they are not; and sources on a command line."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

from lightning_fastio.errors import ConfigError


def check_whole(name: str, value: Any, *, least: int, otherwise: str = "") -> None:
    """Refuse what is no whole number from ``least`` on; True is none, NumPy's integers are.

    Args:
        name: Name of the argument.
        value: Its value.
        least: The smallest number that is allowed.
        otherwise: What else is allowed, in words, such as ``or 'auto'``.

    Raises:
        ConfigError: It is none.
    """
    if not _is_whole(value) or operator.index(value) < least:
        raise ConfigError(
            f"{name}={value!r}: expected a whole number of {least} or more{otherwise and f', {otherwise}'}"
        )


def check_part(name: str, value: Any) -> None:
    """Refuse what is neither a fraction from 0 to below 1 nor a whole number.

    Raises:
        ConfigError: It is neither.
    """
    is_fraction = isinstance(value, float) and math.isfinite(value) and 0 <= value < 1
    if not is_fraction and not (_is_whole(value) and value >= 0):
        raise ConfigError(f"{name}={value!r}: expected a fraction from 0 to below 1, or a number of rows")


def source_of(paths: Sequence[str]) -> str | list[str] | dict[str, str | list[str]]:
    """What paths on a command line stand for, as a data module takes it.

    Args:
        paths: Files, folders and globs; or ``field=path`` each, a field with several files more than once.

    Raises:
        ConfigError: Some name their field, and some do not.
    """
    files: dict[str, list[str]] = {}
    for text in paths:
        field, _, path = text.partition("=")
        # year=2024 is a folder where there is one of that name.
        if field and path and "/" not in field and not (Path(text).exists() or glob(text)):
            files.setdefault(field, []).append(path)
    if not files:
        return paths[0] if len(paths) == 1 else list(paths)
    if sum(map(len, files.values())) < len(paths):
        raise ConfigError(f"{' '.join(paths)}: name the field of every file, as in image=x.npy label=y.npy, or of none")
    return {field: one[0] if len(one) == 1 else one for field, one in files.items()}


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")
