"""What is tuned, and the choices that are tried, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from lightning_fastio.quantities import counted

WorkerType = Literal["thread", "process"]

_MAX_WORKERS = 16
"""More than this many never paid on any machine that feeds one GPU, while each takes a queue of batches."""


@dataclass(frozen=True)
class Settings:
    """How a loader is set."""

    batch_size: int
    """Rows of a batch on one device."""
    num_workers: int
    """Threads or processes that read ahead."""
    worker_type: WorkerType = "thread"
    """What they are."""
    prefetch_factor: int = 2
    """Batches that each reads ahead."""
    pin_memory: bool = False
    """Whether batches are read into pinned memory."""
    cache_bytes: int = 0
    """Bytes of decoded blocks kept at most; 0 where nothing is decoded."""

    def __str__(self) -> str:
        workers = counted(self.num_workers, self.worker_type, "processes" if self.worker_type == "process" else "")
        text = f"{workers} x {self.prefetch_factor}"
        if self.cache_bytes:
            text += f", cache {self.cache_bytes / 2**20:,.0f} MiB"
        return text + (", pinned" if self.pin_memory else "")


class Choice(NamedTuple):
    """One thing to decide."""

    names: tuple[str, ...]
    """The settings that it decides."""
    options: list[dict[str, Any]]
    """Values of these settings, cheapest first."""
    weight: float = 1.0
    """Share of the time for it, in relation to the others."""

    def candidates(self, settings: Settings) -> list[Settings]:
        """The settings with each of the options."""
        return [replace(settings, **option) for option in self.options]


@dataclass(frozen=True)
class Space:
    """Everything that is worth trying on one machine with one data module."""

    cpus: float
    """CPUs that one rank may keep busy."""
    tries_processes: bool
    """Whether worker processes may gain over threads, which takes user code that runs on batches."""
    max_cache_bytes: int = 0
    """Memory that the cache of decoded blocks may grow to; 0 where nothing is decoded."""
    to_cuda: bool = False
    """Whether batches go to a CUDA device, so that pinning matters."""

    def choices(self, settings: Settings) -> Iterator[Choice]:
        """What to decide, in this order; the settings are those to start from."""
        yield Choice(("num_workers", "worker_type"), list(self._workers()), weight=3)
        caches = [{"cache_bytes": size} for size in self._cache_sizes(settings.cache_bytes)]
        if len(caches) > 1:
            yield Choice(("cache_bytes",), caches)
        # One batch ahead would be as fast here, but leaves a training step at the mercy of every delay.
        yield Choice(("prefetch_factor",), [{"prefetch_factor": factor} for factor in (2, 4, 8)])
        if self.to_cuda:
            yield Choice(("pin_memory",), [{"pin_memory": pin} for pin in (False, True)])

    def _workers(self) -> Iterator[dict[str, Any]]:
        # A thread that waits for storage leaves its CPU to another, so that more threads than CPUs can pay.
        for number in _doublings(max(4, int(2 * self.cpus))):
            yield {"num_workers": number, "worker_type": "thread"}
        if self.tries_processes:
            for number in _doublings(max(1, int(self.cpus))):
                yield {"num_workers": number, "worker_type": "process"}

    def _cache_sizes(self, present: int) -> Iterator[int]:
        """The present size and larger ones: a smaller cache would mix fewer rows in a block shuffle."""
        yield present
        size = 2 * present
        while present and size <= min(self.max_cache_bytes, 8 * present):
            yield size
            size *= 2


def _doublings(limit: int) -> Iterator[int]:
    number = 1
    while number <= min(limit, _MAX_WORKERS):
        yield number
        number *= 2
    if number // 2 < limit < _MAX_WORKERS:
        yield limit
