"""The number of reader threads follows the work, in a model of a loader whose best number is known."""

from __future__ import annotations

import math
import random

import pytest

from lightning_fastio.adjusting import WorkerAdjuster

COMPUTE_S = 0.010


def step_s(num_workers: int, busy_s: float, useful: int = 99, crowding_s: float = 0.0) -> float:
    """A step waits for the slower of itself and its readers; only ``useful`` of them help, and all take CPU time."""
    return max(COMPUTE_S, busy_s / min(num_workers, useful)) + crowding_s * num_workers


def run(
    adjuster: WorkerAdjuster, num_steps: int, busy_s: float, noise: float = 0.0, **model: float
) -> tuple[list[float], list[str]]:
    """Train for some steps; their times, and the changes that were made."""
    draw = random.Random(0)
    times, changes = [], []
    for _ in range(num_steps):
        total_s = step_s(adjuster.num_workers, busy_s, **model) * (1 + noise * draw.random())  # type: ignore[arg-type]
        times.append(total_s)
        wait_s = max(0.0, total_s - COMPUTE_S)
        change = adjuster.add(wait_s, total_s, busy_s)
        if change is not None:
            changes.append(change)
    return times, changes


def best(busy_s: float, **model: float) -> float:
    return min(step_s(number, busy_s, **model) for number in range(1, 17))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [1, 2, 4, 16])
@pytest.mark.parametrize("busy_s", [0.002, 0.009, 0.035, 0.1, 0.155])
@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_within_100_steps_it_is_within_a_tenth_of_the_best(start: int, busy_s: float, noise: float) -> None:
    adjuster = WorkerAdjuster(start, 16)
    run(adjuster, 100, busy_s, noise)
    assert step_s(adjuster.num_workers, busy_s) <= 1.1 * best(busy_s)


def test_a_reader_that_becomes_slower_and_faster_is_followed() -> None:
    adjuster = WorkerAdjuster(2, 16)
    for busy_s in (0.01, 0.12, 0.005, 0.06):
        run(adjuster, 100, busy_s)
        assert step_s(adjuster.num_workers, busy_s) <= 1.1 * best(busy_s)
    for _ in range(3):
        run(adjuster, 100, 0.005)
    assert adjuster.num_workers <= 2


def test_threads_that_do_not_help_are_taken_back_and_not_tried_again() -> None:
    # A disk that serves two readers at most.
    adjuster = WorkerAdjuster(2, 16)
    _, changes = run(adjuster, 400, 0.1, useful=2)
    assert adjuster.num_workers == 2
    assert changes == [
        "reader threads 2 -> 4: steps wait 80 % of the time",
        "reader threads 4 -> 2: more made steps no faster",
    ]
    # The disk is no longer the limit, which shows in the time of reading.
    _, changes = run(adjuster, 400, 0.03)
    assert adjuster.num_workers == 3
    assert len(changes) <= 3


def test_a_steady_run_is_left_alone() -> None:
    for busy_s, number in ((0.009, 1), (0.018, 2), (0.038, 4)):
        adjuster = WorkerAdjuster(number, 16)
        _, changes = run(adjuster, 1000, busy_s, noise=0.03)
        assert changes == []


def test_the_limit_holds() -> None:
    adjuster = WorkerAdjuster(1, 3)
    run(adjuster, 200, 1.0)
    assert adjuster.num_workers == 3


def test_idle_threads_go_home_one_at_a_time() -> None:
    adjuster = WorkerAdjuster(8, 16)
    _, changes = run(adjuster, 400, 0.010)
    assert adjuster.num_workers == math.ceil(1.5)
    assert [change.split(":")[0] for change in changes] == [
        f"reader threads {number} -> {number - 1}" for number in range(8, 2, -1)
    ]


def test_steps_whose_batches_are_read_together_are_judged_together() -> None:
    # Sixteen small batches come in one read: one step in sixteen waits, for all of them.
    adjuster = WorkerAdjuster(1, 8, stride=16)
    for number in range(16 * 100):
        total_s = step_s(adjuster.num_workers, 0.025)
        wait_s = 16 * (total_s - COMPUTE_S) if number % 16 == 0 else 0.0
        adjuster.add(wait_s, COMPUTE_S + wait_s, 0.025)
    assert adjuster.num_workers == 3


def test_one_slow_step_changes_nothing() -> None:
    adjuster = WorkerAdjuster(2, 16)
    for number in range(200):
        wait_s = 5.0 if number % 8 == 3 else 0.0
        assert adjuster.add(wait_s, COMPUTE_S + wait_s, 0.018) is None


def test_idle_threads_are_sent_home_the_later_the_more_often_it_was_wrong() -> None:
    adjuster = WorkerAdjuster(2, 16)
    changes_at = []
    for number in range(2000):
        # A neighbour takes the CPU of a single reader for half of the time.
        slow = adjuster.num_workers == 1 and number % 40 >= 20
        wait_s = 0.003 if slow else 0.0
        if adjuster.add(wait_s, COMPUTE_S + wait_s, 0.006) is not None:
            changes_at.append(number)
    with_two = [end - start for start, end in zip(changes_at[1::2], changes_at[2::2], strict=False)]
    assert with_two == sorted(with_two)
    assert with_two[-1] > 400
