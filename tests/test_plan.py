"""The choice of an order, and how good it is."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest

from lightning_fastio.plan import Plan, class_imbalance
from lightning_fastio.plan.order import BlockShuffle, GlobalShuffle, Sequential
from lightning_fastio.plan.rows import AllRows
from tests.memory import counting_reader


def test_imbalance_of_a_uniform_shuffle_is_what_chance_gives() -> None:
    found = class_imbalance(GlobalShuffle(100_000, 1), 250)
    assert found == pytest.approx(sqrt(10 / (2 * pi * 250)), rel=0.1)


def test_imbalance_falls_from_no_shuffle_to_wider_windows() -> None:
    blocks = np.arange(0, 100_001, 100)

    def windowed(num_blocks: int) -> float:
        order = BlockShuffle(blocks, 1, window_rows=100 * num_blocks, num_parts=1)
        return class_imbalance(order, 250)

    uniform = class_imbalance(GlobalShuffle(100_000, 1), 250)
    sequential = class_imbalance(Sequential(100_000), 250)
    assert sequential == pytest.approx(0.9, abs=0.01)
    assert sequential > windowed(4) > windowed(16) > windowed(64) > uniform
    # The blocks of a window are a sample of the classes, and a batch is a sample of the window.
    assert windowed(64) == pytest.approx(sqrt(10 / (2 * pi) * (1 / 64 + 1 / 250)), rel=0.15)
    assert windowed(1000) == pytest.approx(uniform, rel=0.1)


def test_the_order_is_made_once_for_an_epoch() -> None:
    plan = Plan(counting_reader(100), AllRows(100), shuffle="global")
    first = plan.epoch(0, batch_size=8)
    again = plan.epoch(0, batch_size=8, rank=1, world_size=2)
    other = plan.epoch(1, batch_size=8)
    assert first._order is again._order
    assert first._order is not other._order
