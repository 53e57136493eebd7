"""Numbers with what they count, as people write and read them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def counted(number: float, one: str, many: str = "") -> str:
    """A number and its noun, such as ``1 row``, ``1,000 rows`` or ``1.5 CPUs``.

    Args:
        number: How many.
        one: The noun of one.
        many: The noun of several; ``one`` with an s by default.
    """
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {one if number == 1 else many or f'{one}s'}"


def num_bytes(text: str) -> int:
    """A size such as 500M or 1GiB; K, M and G are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a size such as 500M or 1GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
