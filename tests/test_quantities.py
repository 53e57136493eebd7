"""Numbers with what they count."""

from __future__ import annotations

import pytest

from lightning_fastio.quantities import counted, num_bytes


@pytest.mark.parametrize(
    ("number", "nouns", "text"),
    [
        (0, ("row",), "0 rows"),
        (1, ("row",), "1 row"),
        (1797, ("row",), "1,797 rows"),
        (1, ("batch", "batches"), "1 batch"),
        (2, ("batch", "batches"), "2 batches"),
        (1.0, ("CPU",), "1 CPU"),
        (1.5, ("CPU",), "1.5 CPUs"),
    ],
)
def test_counted(number: float, nouns: tuple[str, ...], text: str) -> None:
    assert counted(number, *nouns) == text


@pytest.mark.parametrize(("text", "size"), [("100", 100), ("2K", 2048), ("1.5GiB", 3 << 29), ("3 MB", 3 << 20)])
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert num_bytes(text) == size
