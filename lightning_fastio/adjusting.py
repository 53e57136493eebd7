"""How many reader threads a loader should have, found while training from what its steps waited.

A number is judged over a window of steps. Steps that wait ask for more threads; a larger number is kept if steps
became faster, else it is taken back, and not tried again before reading has become slower or faster. Threads without
work are sent home one at a time, so that they do not take the CPUs of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW = 8
"""Steps by which a number is judged."""
SETTLE = 4
"""Steps after a change that still use what was read before it."""
WAITING_FRACTION = 0.05
"""Share of the time from which steps count as waiting."""
GAIN_FRACTION = 0.05
"""By how much steps must become faster for more threads to be kept."""
IDLE_FACTOR = 1.5
"""Threads are too many when this many times the work would still be done by one less."""
CHANGED_FACTOR = 1.5
"""Reading is another one when it became slower or faster by this."""


@dataclass(frozen=True)
class _Window:
    """Means over a number of steps, in seconds."""

    wait_s: float
    step_s: float
    busy_s: float

    @property
    def is_waiting(self) -> bool:
        return self.wait_s > WAITING_FRACTION * self.step_s

    def has_work_of(self, other: _Window) -> bool:
        """Whether reading takes about as long as it did in another window."""
        return max(self.busy_s, other.busy_s) <= CHANGED_FACTOR * min(self.busy_s, other.busy_s)


class WorkerAdjuster:
    """Decides on the number of reader threads of one loader; applies nothing itself."""

    def __init__(self, num_workers: int, max_workers: int) -> None:
        """Start from a number.

        Args:
            num_workers: Threads at the start.
            max_workers: Threads that CPUs and memory have room for.
        """
        self.num_workers = num_workers
        self.max_workers = max_workers
        self._steps: list[tuple[float, float, float]] = []
        self._to_settle = 0
        self._before: tuple[int, _Window] | None = None
        """The number that was left, and how steps were with it, until the new one is judged."""
        self._refused: tuple[int, _Window] | None = None
        """The number that did not do better, and the work for which it did not."""

    def add(self, wait_s: float, step_s: float, busy_s: float) -> str | None:
        """Take in a step.

        Args:
            wait_s: Seconds that it waited for its batch.
            step_s: Seconds of the whole step.
            busy_s: Seconds of work for its batch, summed over threads.

        Returns:
            Why `num_workers` is another one now; None where it is not.
        """
        if self._to_settle:
            self._to_settle -= 1
            return None
        self._steps.append((wait_s, step_s, busy_s))
        if len(self._steps) < WINDOW:
            return None
        # Without its slowest steps a window does not jump with a checkpoint, or with a neighbour on the machine.
        steady = sorted(self._steps, key=lambda step: step[1])[: WINDOW - 2]
        window = _Window(*(sum(values) / len(steady) for values in zip(*steady, strict=True)))
        self._steps.clear()
        return self._judge(window)

    def _judge(self, window: _Window) -> str | None:
        if self._before is not None:
            number, before = self._before
            self._before = None
            grew = self.num_workers > number
            if window.has_work_of(before):
                if grew and window.step_s > (1 - GAIN_FRACTION) * before.step_s:
                    self._refused = (self.num_workers, window)
                    return self._change(number, "more made steps no faster")
                if not grew and window.is_waiting:
                    self._refused = (self.num_workers, window)
                    return self._change(number, "with fewer, steps waited")
        if window.is_waiting and self.num_workers < self.max_workers:
            compute_s = max(window.step_s - window.wait_s, WAITING_FRACTION * window.step_s)
            needed = math.ceil(window.busy_s / compute_s)
            target = min(max(self.num_workers + 1, min(needed, 2 * self.num_workers)), self.max_workers)
            return self._try(target, window, f"steps wait {window.wait_s / window.step_s * 100:.0f} % of the time")
        if not window.is_waiting and window.busy_s * IDLE_FACTOR < (self.num_workers - 1) * window.step_s:
            return self._try(self.num_workers - 1, window, "one has nothing to do")
        return None

    def _try(self, target: int, window: _Window, reason: str) -> str | None:
        if self._refused is not None and self._refused[1].has_work_of(window):
            refused = self._refused[0]
            if target >= refused > self.num_workers or target <= refused < self.num_workers:
                return None
        self._before = (self.num_workers, window)
        return self._change(target, reason)

    def _change(self, target: int, reason: str) -> str:
        message = f"reader threads {self.num_workers} -> {target}: {reason}"
        self.num_workers = target
        self._to_settle = SETTLE
        return message
