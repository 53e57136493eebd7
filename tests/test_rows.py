"""Row sets and splits: disjoint, complete, the same everywhere, groups whole, strata even."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fastio.errors import ConfigError
from lightning_fastio.plan.rows import AllRows, ChosenRows, RowSet, Split, balanced_weights


def everything(rows: RowSet) -> list[int]:
    return rows.at(np.arange(len(rows))).tolist()


@given(st.integers(3, 300), st.floats(0, 0.3), st.integers(0, 1), st.integers(0, 5))
def test_parts_are_disjoint_and_complete(num_rows: int, val: float, test: int, seed: int) -> None:
    split = Split(val if round(val * num_rows) else 0, test, seed)
    parts = [everything(split.rows(part, num_rows)) for part in ("val", "test", "train")]
    assert sorted(itertools.chain(*parts)) == list(range(num_rows))
    assert len(parts[1]) == test
    assert abs(len(parts[0]) - val * num_rows) <= 0.5 + 1e-9


def test_a_split_is_the_same_every_time_and_differs_by_seed() -> None:
    first, again, other = (everything(Split(0.3, seed=seed).rows("val", 100)) for seed in (0, 0, 1))
    assert first == again != other
    assert first != list(range(30)), "a split is random, not the head of the file"


def test_huge_splits_hold_no_table() -> None:
    num_rows = 10**9
    split = Split(0.1, 1000, seed=2)
    sizes = [len(split.rows(part, num_rows)) for part in ("val", "test", "train")]
    assert sizes == [10**8, 1000, num_rows - 10**8 - 1000]
    test = set(everything(split.rows("test", num_rows)))
    assert len(test) == 1000
    val = split.rows("val", num_rows).at(np.arange(10**8 - 1000, 10**8)).tolist()
    assert test.isdisjoint(val)


def test_parts_of_a_split_are_in_the_order_of_the_file_up_to_large_sizes() -> None:
    rows = Split(0.1).rows("train", 3_000_000)
    assert len(rows) == 2_700_000
    assert (np.diff(rows.at(np.arange(len(rows)))) > 0).all()
    val = everything(Split(0.1).rows("val", 3_000_000))
    assert val == sorted(val)
    assert set(val).isdisjoint(rows.at(np.arange(len(rows))).tolist())


@given(st.lists(st.integers(0, 9), min_size=20, max_size=120), st.integers(0, 3))
def test_groups_stay_whole(groups: list[int], seed: int) -> None:
    values = np.array(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"])[groups]
    if len(set(groups)) < 3:
        with pytest.raises(ConfigError, match="different values"):
            Split(0.2, 0.2, seed).rows("val", len(groups), groups=values)
        return
    parts = [everything(Split(0.2, 0.2, seed).rows(p, len(groups), groups=values)) for p in ("val", "test", "train")]
    assert sorted(itertools.chain(*parts)) == list(range(len(groups)))
    members = [set(values[part]) for part in parts]
    assert all(members)
    assert not members[0] & members[1]
    assert not members[0] & members[2]
    assert not members[1] & members[2]


def test_group_sizes_come_near_the_wish() -> None:
    groups = np.repeat(np.arange(100), 7)
    rows = Split(0.2, 0.1).rows("val", 700, groups=groups)
    assert abs(len(rows) - 140) <= 7
    assert abs(len(Split(0.2, 0.1).rows("test", 700, groups=groups)) - 70) <= 7


def test_strata_keep_their_proportion() -> None:
    labels = np.array([0] * 900 + [1] * 90 + [2] * 10)
    for part, size in (("val", 200), ("test", 100), ("train", 700)):
        rows = everything(Split(0.2, 0.1).rows(part, 1000, strata=labels))
        assert len(rows) == size
        counts = np.bincount(labels[rows], minlength=3) / size
        assert np.abs(counts - [0.9, 0.09, 0.01]).max() < 0.011


@pytest.mark.parametrize(
    ("val", "test", "message"),
    [
        (1.0, 0, "val_split=1.0"),
        (-1, 0, "val_split=-1"),
        (0, -0.5, "test_split=-0.5"),
        (0.001, 0, "no row"),
        (6, 4, "leave none of 10 rows"),
    ],
)
def test_splits_that_cannot_be(val: float, test: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Split(val, test).sizes(10)


def test_chosen_rows_take_numbers_or_a_mask() -> None:
    assert everything(ChosenRows([4, -1, 2], 10)) == [2, 4, 9]
    assert everything(ChosenRows(np.arange(10) > 7, 10)) == [8, 9]
    assert everything(ChosenRows([], 10)) == []
    assert ChosenRows([1, 2], 10).fingerprint != ChosenRows([1, 3], 10).fingerprint != AllRows(10).fingerprint


def test_blocks_of_chosen_rows() -> None:
    blocks = np.array([0, 4, 8, 12])
    assert ChosenRows([1, 2, 9], 12).blocks(blocks).tolist() == [0, 2, 3]
    assert AllRows(12).blocks(blocks).tolist() == [0, 4, 8, 12]


def test_balanced_weights_make_labels_equally_likely() -> None:
    weights = balanced_weights(np.array(["a", "a", "a", "b"]))
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
