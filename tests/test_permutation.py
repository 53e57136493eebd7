"""The keyed permutation: a bijection at any size, and as uniform as NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lightning_fastio.plan.permutation import TABLE_ROWS, Permutation, seed_from


@given(st.integers(0, 3000), st.integers(-5, 2**70))
def test_is_a_bijection(size: int, key: int) -> None:
    for table_rows in (0, TABLE_ROWS):
        assert sorted(Permutation(size, key, table_rows=table_rows).take(0, size)) == list(range(size))


def test_is_a_function_of_size_and_key() -> None:
    first, again, other = (Permutation(10**9, key).take(500, 600).tolist() for key in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("size", [10**9, 10**12, 2**62])
def test_stays_inside_and_distinct_at_huge_sizes(size: int) -> None:
    rows = Permutation(size, 4).take(size - 100_000, size)
    assert rows.min() >= 0
    assert rows.max() < size
    assert len(np.unique(rows)) == 100_000


@pytest.mark.parametrize("table_rows", [0, TABLE_ROWS], ids=["computed", "numpy"])
def test_uniform_positions_and_neighbours(table_rows: int) -> None:
    """Chi-square on where rows land, on pairs of neighbours and on their distance; NumPy's passes the same."""
    size = 1_000_003
    for key in range(3):
        order = Permutation(size, key, table_rows=table_rows).take(0, size)
        position = np.arange(size)
        landed = np.histogram2d(position, order, bins=40)[0].ravel()
        pairs = np.histogram2d(order[:-1], order[1:], bins=40)[0].ravel()
        distances = np.histogram((order[1:] - order[:-1]) % size, bins=500)[0]
        residues = np.bincount((order % 97) * 97 + position % 97, minlength=97 * 97)
        # Both sides: a structure that is too even is as suspicious as one that is not.
        for counts in (pairs, distances, residues):
            assert 1e-4 < chisquare(counts).pvalue < 1 - 1e-4
        assert chisquare(landed).pvalue > 1e-4


def test_seed_from_keeps_keys_apart() -> None:
    seeds = [seed_from(*keys) for keys in [(1, 2), (2, 1), (1, 2, 0), (12,), (-1, 2), (1,)]]
    assert len(set(seeds)) == len(seeds)
