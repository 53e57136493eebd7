"""Settings measured in turns, until it is clear which is the cheapest that is as good as the best.

A machine is never quiet: another job halves one measurement, or slows down all of them for a while. So settings take
turns, those of one round are compared with each other, and of many rounds the median counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

AS_GOOD = 0.95
"""A setting with this share of the best rate is as good."""

ENOUGH = 1.25
"""A loader with this multiple of the rate that the step needs is clearly faster."""

_HOPELESS, _WORSE = 0.25, 0.8
_LEAST_NOISE = 0.05
_MIN_ROUNDS, _MAX_ROUNDS = 7, 15


@dataclass
class Runner(Generic[T]):
    """One setting in a race."""

    setting: T
    rates: list[float] = field(default_factory=list)
    """Rows per second of each round."""
    is_out: bool = False
    """Whether it was clearly worse, and is measured no more."""

    @property
    def rate(self) -> float:
        """The median of the rounds; 0 before the first."""
        return median(self.rates) if self.rates else 0.0


class Race(Generic[T]):
    """Measures settings against each other."""

    def __init__(
        self,
        candidates: Sequence[T],
        measure: Callable[[T], float],
        *,
        is_over: Callable[[], bool],
        needed: float | None = None,
    ) -> None:
        """Set up.

        Args:
            candidates: Settings, cheapest first.
            measure: Gives rows per second; 0 for a setting that cannot run.
            is_over: Whether the time is up.
            needed: Rows per second that are needed; more are of no use.
        """
        self.runners = [Runner(each) for each in candidates]
        self.is_enough = False
        """Whether the chosen one is clearly faster than needed, so that the rest was not measured to the end."""
        self._measure = measure
        self._is_over = is_over
        self._needed = needed

    def run(self) -> Runner[T]:
        """Measure until one is chosen, or the time is up."""
        for number in range(_MAX_ROUNDS):
            running = [each for each in self.runners if not each.is_out]
            # To and fro, so that a machine that gets slower or faster favours none.
            for runner in running if number % 2 == 0 else running[::-1]:
                if number and self._is_over():
                    return self.chosen
                runner.rates.append(self._measure(runner.setting))
                if self._is_clearly_enough(runner):
                    self.is_enough = True
                    return runner
                if not number and self._is_over():
                    return self.chosen
            self._drop_clearly_worse()
            if number + 1 >= _MIN_ROUNDS and self._is_decided():
                break
        return self.chosen

    @property
    def chosen(self) -> Runner[T]:
        """The cheapest that is as good as the best, or may be, as far as the noise tells."""
        best = self._best()
        for runner in self.runners:
            if not runner.is_out and runner.rates:
                ratio, error = _compare(runner, best)
                if ratio + 2 * error >= AS_GOOD:
                    return runner
        return best

    def _best(self) -> Runner[T]:
        return max(self.runners, key=lambda each: each.rate)

    def _is_clearly_enough(self, runner: Runner[T]) -> bool:
        """Whether a setting is clearly faster than needed, three times in a row."""
        if self._needed is None or runner.rates[-1] < ENOUGH * self._needed:
            return False
        runner.rates += [self._measure(runner.setting) for _ in range(2) if not self._is_over()]
        return min(runner.rates[-3:]) >= ENOUGH * self._needed

    def _drop_clearly_worse(self) -> None:
        leader = self._best().rate
        for runner in self.runners:
            limit = _HOPELESS if len(runner.rates) == 1 else _WORSE
            if not runner.is_out and max(runner.rates) < limit * leader:
                runner.is_out = True

    def _is_decided(self) -> bool:
        best = self._best()
        others = [_compare(each, best) for each in self.runners if not each.is_out and each is not best]
        return all(abs(ratio - AS_GOOD) > 2 * error for ratio, error in others)


def _compare(runner: Runner[T], best: Runner[T]) -> tuple[float, float]:
    """The rate in relation to the best one's, round by round, and the standard error of that."""
    rounds = min(len(runner.rates), len(best.rates))
    if runner is best or not rounds or not best.rate:
        return 1.0, 0.0
    ratios = np.array(runner.rates[:rounds]) / np.maximum(best.rates[:rounds], 1e-9)
    middle = float(np.median(ratios))
    # Of a normal distribution: its deviation out of the median deviation, and the error of its median. A few rounds may
    # agree by chance.
    deviation = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(ratios - middle))))
    return middle, min(0.05, 1.2533 * deviation / rounds**0.5)
