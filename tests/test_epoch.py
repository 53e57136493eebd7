"""The order and its division: every row once, ranks disjoint and even, resume equal to what was left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fastio.plan.epoch import Epoch, Leg, Setting
from lightning_fastio.plan.order import BlockShuffle, GlobalShuffle, Order, Sequential, WeightedSampling, part


def make_order(kind: str, size: int, key: int, num_parts: int, window_rows: int = 20) -> Order:
    if kind == "sequential":
        return Sequential(size)
    if kind == "global":
        return GlobalShuffle(size, key)
    blocks = np.unique(np.concatenate(([0, size], np.random.default_rng(size).integers(0, size + 1, 5))))
    return BlockShuffle(blocks, key, window_rows=window_rows, num_parts=num_parts)


def read(epochs: list[Epoch], num_batches: int | None = None) -> list[list[list[int]]]:
    """The batches of each rank, from where it starts."""
    return [
        [epoch.indices(k).tolist() for k in range(epoch.start, epoch.num_batches)][:num_batches] for epoch in epochs
    ]


def flat(batches_of_ranks: list[list[list[int]]]) -> list[int]:
    return [row for rank in batches_of_ranks for batch in rank for row in batch]


ORDERS = st.sampled_from(["sequential", "global", "block"])
CUTS = st.sampled_from(["striped", "contiguous"])


@given(ORDERS, CUTS, st.integers(1, 200), st.integers(1, 17), st.integers(1, 8))
def test_each_row_once_and_even_ranks(kind: str, how: str, size: int, batch_size: int, world: int) -> None:
    order = make_order(kind, size, 3, world)
    epochs = [Epoch(order, Setting(how, world, batch_size), rank) for rank in range(world)]
    batches = read(epochs)
    assert {len(rank) for rank in batches} == {len(epochs[0])}
    assert all(1 <= len(batch) <= max(batch_size, 2) for rank in batches for batch in rank)
    rows = flat(batches)
    if size >= world:
        assert sorted(rows) == list(range(size))
    else:
        assert set(rows) == set(range(size))


@given(ORDERS, CUTS, st.integers(0, 200), st.integers(1, 17), st.integers(1, 8))
def test_drop_last_gives_full_batches_of_distinct_rows(
    kind: str, how: str, size: int, batch_size: int, world: int
) -> None:
    order = make_order(kind, size, 3, world)
    batches = read([Epoch(order, Setting(how, world, batch_size, drop_last=True), rank) for rank in range(world)])
    assert all(len(batch) == batch_size for rank in batches for batch in rank)
    rows = flat(batches)
    assert len(set(rows)) == len(rows)
    expected = size // world // batch_size if how == "contiguous" else size // (world * batch_size)
    assert {len(rank) for rank in batches} == {expected}


@given(ORDERS, CUTS, st.integers(1, 200), st.integers(1, 17), st.integers(1, 8))
def test_pad_last_gives_full_batches_that_cover_everything(
    kind: str, how: str, size: int, batch_size: int, world: int
) -> None:
    order = make_order(kind, size, 3, world)
    batches = read([Epoch(order, Setting(how, world, batch_size, pad_last=True), rank) for rank in range(world)])
    if size >= world:
        assert all(len(batch) == batch_size for rank in batches for batch in rank)
    assert len({len(rank) for rank in batches}) == 1
    assert set(flat(batches)) == set(range(size))


@settings(max_examples=200)
@given(
    ORDERS,
    CUTS,
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 17), st.integers(0, 6)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, 17),
)
def test_resume_reads_exactly_the_unseen_rows(
    kind: str, how: str, size: int, legs: list[tuple[int, int, int]], world: int, batch_size: int
) -> None:
    order = make_order(kind, size, 5, legs[0][0])
    done: tuple[Leg, ...] = ()
    seen: list[int] = []
    for leg_world, leg_batch_size, num_batches in legs:
        epochs = [Epoch(order, Setting(how, leg_world, leg_batch_size), rank, done) for rank in range(leg_world)]
        seen += flat(read(epochs, num_batches))
        done = epochs[0].legs_after(min(epochs[0].start + num_batches, epochs[0].num_batches))
    epochs = [Epoch(order, Setting(how, world, batch_size), rank, done) for rank in range(world)]
    rest = read(epochs)
    assert {len(rank) for rank in rest} == {len(epochs[0]) - sum(leg.num_batches for leg in done)}
    # Rows repeat only where fewer of them than ranks are left.
    assert set(seen) | set(flat(rest)) == set(range(size))
    assert set(seen).isdisjoint(flat(rest))


def test_resume_in_the_same_setting_is_the_suffix() -> None:
    order = GlobalShuffle(100, 1)
    whole = Epoch(order, Setting("striped", 1, 8), 0)
    resumed = Epoch(order, Setting("striped", 1, 8), 0, whole.legs_after(5))
    assert read([resumed])[0] == read([whole])[0][5:]
    assert len(resumed) == len(whole) == 13
    assert resumed.legs_after(7) == whole.legs_after(7)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(world: int) -> None:
    epochs = [Epoch(GlobalShuffle(1000, 9), Setting("striped", world, 32 // world), rank) for rank in range(world)]
    one_rank = Epoch(GlobalShuffle(1000, 9), Setting("striped", 1, 32), 0)
    assert len(one_rank) == len(epochs[0]) == 32
    for batch in range(32):
        together = np.concatenate([epoch.indices(batch) for epoch in epochs])
        assert together.tolist() == one_rank.indices(batch).tolist()


def test_ranks_of_a_block_shuffle_share_only_the_blocks_at_the_seams() -> None:
    blocks = np.arange(0, 1001, 10)
    order = BlockShuffle(blocks, 1, window_rows=50, num_parts=4)
    epochs = [Epoch(order, Setting("contiguous", 4, 7), rank) for rank in range(4)]
    touched = [{row // 10 for row in flat([batches])} for batches in read(epochs)]
    shared = sum(map(len, touched)) - len(set.union(*touched))
    assert shared <= 3


def test_a_window_bounds_the_blocks_in_use() -> None:
    order = BlockShuffle(np.arange(0, 1001, 10), 1, window_rows=50, num_parts=1)
    rows = order.take(0, 1000)
    for start in range(0, 1000, 50):
        assert len(set(rows[start : start + 50] // 10)) == 5
    assert sorted(rows) == list(range(1000))
    within = rows[:50] // 10
    assert (np.diff(within) != 0).sum() > 25, "rows of a window must be mixed"


def test_blocks_are_announced_one_window_ahead_and_once() -> None:
    order = BlockShuffle(np.arange(0, 1001, 10), 1, window_rows=50, num_parts=1)
    epoch = Epoch(order, Setting("contiguous", 1, 25), 0)
    announced: list[int] = []
    for batch in range(len(epoch)):
        rows = epoch.ahead(batch)
        if rows is not None:
            announced += (rows // 10).tolist()
        assert {row // 10 for row in epoch.indices(batch).tolist()} <= set(announced)
    assert sorted(announced) == list(range(100))


def test_orders_differ_by_key_and_repeat() -> None:
    orders = [GlobalShuffle(1000, key).take(0, 1000).tolist() for key in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    blocks = np.arange(0, 1001, 10)
    mixed = [BlockShuffle(blocks, key, window_rows=50, num_parts=1).take(0, 1000).tolist() for key in (1, 2, 1)]
    assert mixed[0] == mixed[2] != mixed[1]


def test_weighted_sampling_follows_the_weights_however_it_is_read() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0])
    order = WeightedSampling(weights, 40_000, 1)
    rows = order.take(0, 40_000)
    counts = np.bincount(rows, minlength=4)
    assert counts[0] == counts[3] == 0
    assert abs(counts[1] - 10_000) < 400
    assert order.take(12_345, 20_000).tolist() == rows[12_345:20_000].tolist()


def test_parts_are_even_and_exact_for_huge_sizes() -> None:
    assert [part(10, 3, number) for number in range(3)] == [(0, 4), (4, 7), (7, 10)]
    assert [part(2, 4, number) for number in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert [part(2**62 + 1, 2, number) for number in range(2)] == [(0, 2**61 + 1), (2**61 + 1, 2**62 + 1)]
