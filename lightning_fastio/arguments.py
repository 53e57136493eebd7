"""Checks of arguments that users pass: what they may be, said by name where they are not."""

from __future__ import annotations

import math
import operator
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


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")
