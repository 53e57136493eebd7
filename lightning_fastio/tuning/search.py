"""One race after the other: workers, then cache, prefetching and pinning, each with the winner of the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lightning_fastio.errors import ConfigError
from lightning_fastio.tuning.race import Race
from lightning_fastio.tuning.settings import Settings, Space

FIRST_START_S = 4.0
"""Seconds that worker processes are taken to need until some were started."""


class Measurement(NamedTuple):
    """What a loader did for a moment."""

    rows_per_s: float
    """Rows delivered per second."""
    cpu_s_per_s: float = 0.0
    """CPUs kept busy, worker processes included."""
    memory_bytes: int = 0
    """Memory that the loader took: queues, buffers, caches and worker processes."""


class Probe(Protocol):
    """Measures loaders."""

    def __call__(self, settings: Settings) -> Measurement:
        """Measure one; ConfigError if it cannot run."""
        ...

    def release(self) -> None:
        """Stop what was kept running for the next measurement of the same settings."""
        ...


@dataclass
class Tried:
    """One setting that was measured."""

    settings: Settings
    measurements: list[Measurement] = field(default_factory=list)
    """One for each round."""
    rows_per_s: float = 0.0
    """The median."""
    is_out: bool = False
    """Whether it was clearly worse, so that it was measured no more."""
    obstacle: str = ""
    """Why it cannot run; empty if it can."""


@dataclass
class Finding:
    """What a search found."""

    settings: Settings
    rows_per_s: float
    """Of these settings."""
    tried: list[Tried]
    """Everything that was measured, in this order."""
    decided: tuple[str, ...]
    """Names of the settings that were decided."""
    is_enough: bool
    """Whether it stopped since the loader is clearly faster than needed."""


class Search:
    """Finds settings with a probe."""

    def __init__(
        self,
        probe: Probe,
        *,
        clock: Callable[[], float],
        ends_at: float,
        agree: Callable[[float], float],
        needed_rows_per_s: float | None = None,
    ) -> None:
        """Set up.

        Args:
            probe: Measures loaders.
            clock: Gives seconds.
            ends_at: When to stop, on this clock.
            agree: Gives the smallest of all ranks' numbers, so that all decide the same.
            needed_rows_per_s: What the training step takes.
        """
        self._probe = probe
        self._clock = clock
        self._ends_at = ends_at
        self._agree = agree
        self._needed = needed_rows_per_s
        self._tried: dict[Settings, Tried] = {}
        self._start_s: float | None = None
        self._has_measured = False

    def run(self, settings: Settings, space: Space) -> Finding:
        """Decide everything that the space offers, starting from some settings."""
        choices = list(space.choices(settings))
        tried: list[Tried] = []
        decided: tuple[str, ...] = ()
        rows_per_s, is_enough = 0.0, False
        for number, choice in enumerate(choices):
            if number and self._left_s() <= 0:
                break
            share = choice.weight / sum(each.weight for each in choices[number:])
            ends_at = self._clock() + share * self._left_s()
            self._tried = {}
            race = Race(
                choice.candidates(settings),
                self._measure,
                is_over=lambda ends_at=ends_at: self._agree(ends_at - self._clock()) <= 0,  # type: ignore[misc]
                needed=self._needed,
            )
            winner = race.run()
            self._probe.release()
            settings, rows_per_s = winner.setting, winner.rate
            decided += choice.names
            for runner in race.runners:
                if runner.setting in self._tried:
                    entry = self._tried[runner.setting]
                    entry.rows_per_s, entry.is_out = runner.rate, runner.is_out
                    tried.append(entry)
            if not rows_per_s:
                raise ConfigError(f"no setting of the loader can run: {tried[-1].obstacle or 'it gives no rows'}")
            is_enough = race.is_enough
            if is_enough:
                break
        return Finding(settings, rows_per_s, tried, decided, is_enough)

    def _left_s(self) -> float:
        return self._agree(self._ends_at - self._clock())

    def _measure(self, settings: Settings) -> float:
        starts_processes = settings.worker_type == "process" and settings not in self._tried
        entry = self._tried.setdefault(settings, Tried(settings))
        if starts_processes and self._has_measured and self._left_s() < (self._start_s or FIRST_START_S):
            entry.obstacle = f"no time was left to start {settings}"
        rate = 0.0
        if not entry.obstacle:
            started = self._clock()
            try:
                measurement = self._probe(settings)
                entry.measurements.append(measurement)
                rate = measurement.rows_per_s
                self._has_measured = True
            except ConfigError as error:
                entry.obstacle = str(error)
            if starts_processes:
                # The slowest rank counts for all of them.
                self._start_s = max(self._start_s or 0.0, -self._agree(started - self._clock()))
        return self._agree(rate)
