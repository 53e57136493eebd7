"""How many reader threads a loader should have, found while training from what its steps waited.

A number is judged over a window of steps, or of strides of steps where small batches are read together. Steps that
wait ask for more threads; a larger number is kept if steps became faster, else it is taken back, and not tried again
before reading has become slower or faster. Threads without work are sent home one at a time, so that they do not take
the CPUs of the step, and the later the more often that proved wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WINDOW = 8
"""Strides by which a number is judged."""
SETTLE = 4
"""Strides after a change that still use what was read before it."""
WAITING_FRACTION = 0.05
"""Share of the time from which steps count as waiting."""
HAND_OVER_S = 0.0003
"""Seconds of waiting that more threads do not cure, as they pass while a batch is handed over."""
GAIN_FRACTION = 0.05
"""By how much steps must become faster for more threads to be kept."""
IDLE_FACTOR = 1.5
"""Threads are too many when this many times the work would still be done by one less."""
PATIENCE, MAX_PATIENCE = 2, 64
"""Windows in a row before an idle thread is sent home; twice as many after each time that it was wrong."""
CHANGED_FACTOR = 2
"""Reading is another one when it became slower or faster by this."""


@dataclass(frozen=True)
class _Window:
    """Means over a number of steps, in seconds."""

    wait_s: float
    step_s: float
    busy_s: float

    @property
    def is_waiting(self) -> bool:
        return self.wait_s > max(WAITING_FRACTION * self.step_s, HAND_OVER_S)

    def has_work_of(self, other: _Window) -> bool:
        """Whether reading takes about as long as it did in another window."""
        return max(self.busy_s, other.busy_s) <= CHANGED_FACTOR * min(self.busy_s, other.busy_s)


class WorkerAdjuster:
    """Decides on the number of reader threads of one loader; applies nothing itself."""

    def __init__(self, num_workers: int, max_workers: int, stride: int = 1) -> None:
        """Start from a number.

        Args:
            num_workers: Threads at the start.
            max_workers: Threads that CPUs and memory have room for.
            stride: Steps that are taken together, where their batches are read together.
        """
        self.num_workers = num_workers
        self.max_workers = max_workers
        self._stride = stride
        self._strides: list[npt.NDArray[np.float64]] = []
        self._steps: list[tuple[float, float, float]] = []
        self._to_settle = 0
        self._before: tuple[int, _Window] | None = None
        """The number that was left, and how steps were with it, until the new one is judged."""
        self._too_many: tuple[int, _Window] | None = None
        """The number that did no better than fewer, and the work for which it did not."""
        self._num_idle = 0
        """Windows in a row in which a thread had nothing to do."""
        self._patience = PATIENCE
        self._shrank = False
        """Whether the last change was to fewer."""

    def add(self, wait_s: float, step_s: float, busy_s: float) -> str | None:
        """Take in a step.

        Args:
            wait_s: Seconds that it waited for its batch.
            step_s: Seconds of the whole step.
            busy_s: Seconds of work for its batch, summed over threads.

        Returns:
            Why `num_workers` is another one now; None where it is not.
        """
        self._steps.append((wait_s, step_s, busy_s))
        if len(self._steps) < self._stride:
            return None
        stride = np.mean(self._steps, axis=0)
        self._steps.clear()
        if self._to_settle:
            self._to_settle -= 1
            return None
        self._strides.append(stride)
        if len(self._strides) < WINDOW:
            return None
        # Without its slowest steps a window does not jump with a checkpoint, or with a neighbour on the machine.
        steady = sorted(self._strides, key=lambda each: float(each[1]))[: WINDOW - 2]
        self._strides.clear()
        return self._judge(_Window(*np.mean(steady, axis=0).tolist()))

    def _judge(self, window: _Window) -> str | None:
        if self._before is not None:
            number, before = self._before
            self._before = None
            grew = self.num_workers > number
            if window.has_work_of(before):
                if grew and window.step_s > (1 - GAIN_FRACTION) * before.step_s:
                    self._too_many = (self.num_workers, window)
                    return self._change(number, "more made steps no faster")
                if not grew and window.is_waiting:
                    return self._grow(number, "with fewer, steps waited")
        if window.is_waiting and self.num_workers < self.max_workers:
            compute_s = max(window.step_s - window.wait_s, WAITING_FRACTION * window.step_s)
            needed = math.ceil(window.busy_s / compute_s)
            target = min(max(self.num_workers + 1, min(needed, 2 * self.num_workers)), self.max_workers)
            if self._too_many is None or target < self._too_many[0] or not window.has_work_of(self._too_many[1]):
                self._before = (self.num_workers, window)
                return self._grow(target, f"steps wait {window.wait_s / window.step_s * 100:.0f} % of the time")
        is_idle = not window.is_waiting and window.busy_s * IDLE_FACTOR < (self.num_workers - 1) * window.step_s
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle < self._patience:
            return None
        self._before = (self.num_workers, window)
        self._shrank = True
        return self._change(self.num_workers - 1, "one has nothing to do")

    def _grow(self, target: int, reason: str) -> str:
        if self._shrank:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._shrank = False
        return self._change(target, reason)

    def _change(self, target: int, reason: str) -> str:
        message = f"reader threads {self.num_workers} -> {target}: {reason}"
        self.num_workers = target
        self._to_settle, self._num_idle = SETTLE, 0
        return message
