"""Numbers with what they count, for a reader."""

from __future__ import annotations


def counted(number: float, one: str, many: str = "") -> str:
    """A number and its noun, such as ``1 row``, ``1,000 rows`` or ``1.5 CPUs``.

    Args:
        number: How many.
        one: The noun of one.
        many: The noun of several; ``one`` with an s by default.
    """
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {one if number == 1 else many or f'{one}s'}"
