"""Batches ahead of a loop: its fetcher, exchanged for one with a thread behind it.

A loop keeps its loaders behind a fetcher. When a stage starts, `fetch_ahead` exchanges it for one that goes on with
the live iterator of the old one, so that workers are not started twice, and a loader keeps the position that a
checkpoint gave it. For the loop `fetched` and `done` stay what they were: about the batches that it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataFetcherWrapper, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_fastio._lightning.randomness import QuietFetches
from lightning_fastio._lightning.transfer import TransferAhead
from lightning_fastio.loader import BatchLoader
from lightning_fastio.prefetch import STOP_TIMEOUT_S, Pump, batch_bytes
from lightning_fastio.staging import Staged

States = list[Callable[[], Any]]
"""Where the loaders that have a state stand; each is made when a checkpoint asks for it."""


@dataclass
class Fetched:
    """What came out of the loaders."""

    item: Any
    """Batch, its number, and the number of its loader."""
    states: States
    """Where the loaders stood after it."""
    read_s: float = 0.0
    transform_s: float = 0.0


@dataclass
class Delivery:
    """What the loop was given since it was last asked for this."""

    asked_at: float
    """When the loop asked, on the clock of `time.perf_counter`."""
    is_first: bool
    """Whether it was the first batch since the loaders started."""
    is_copied: bool
    """Whether it was copied to the device ahead."""
    wait_s: float = 0.0
    read_s: float = 0.0
    transform_s: float = 0.0


@dataclass(frozen=True)
class AheadOptions:
    """How batches are fetched ahead."""

    depth: int
    max_bytes: int | None
    keep_randomness: bool
    tell: Callable[[str], None]
    """Takes what the user should know."""


class _Source:
    """The loaders; notes for each batch what it took, and where they stood after it."""

    def __init__(self, combined: CombinedLoader, iterator: Any) -> None:
        self._iterator = iterator
        self._stateful = [loader for loader in combined.flattened if isinstance(loader, _Stateful)]
        self._measured = [loader.stats for loader in combined.flattened if isinstance(loader, BatchLoader)]
        self.to_do: deque[Callable[[], None]] = deque()
        """What waits to be done between two batches."""

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> Fetched:
        while self.to_do:
            self.to_do.popleft()()
        read_s, transform_s = self._busy()
        began = perf_counter()
        item = next(self._iterator)
        fetch_s = perf_counter() - began
        if not self._measured:
            return Fetched(item, self.states(), fetch_s)
        read_now_s, transform_now_s = self._busy()
        return Fetched(item, self.states(), read_now_s - read_s, transform_now_s - transform_s)

    def states(self) -> States:
        """Where the loaders stand now, as `CombinedLoader._state_dicts` orders them."""
        return [_state_later(loader) for loader in self._stateful]

    def _busy(self) -> tuple[float, float]:
        return sum(stats.read_s for stats in self._measured), sum(stats.transform_s for stats in self._measured)


def _state_later(loader: Any) -> Callable[[], Any]:
    if isinstance(loader, BatchLoader):
        return loader.state_later()
    state = deepcopy(loader.state_dict())
    return lambda: state


class AheadFetcher(_DataFetcher):
    """Gives a loop its batches from a thread that fetches them, and copies them to the device, ahead."""

    looks_ahead = True
    """Whether the last batch must be known as such although the loaders have no length."""

    def __init__(self, old: _DataFetcher, options: AheadOptions, transfer: TransferAhead | None) -> None:
        super().__init__()
        self.stager = None if transfer is None else transfer.new_stager()
        """What copies to the device; None where the loop does."""
        self._options = options
        self._transfer = transfer
        self._pump: Pump[Fetched] | None = None
        self._head: deque[Fetched | Exception] = deque()
        self._delivery: Delivery | None = None
        self._combined_loader, self.iterator = old._combined_loader, old.iterator
        # Nothing is to be copied, and the loader has threads of its own: one more would only cost the step time.
        self._reads_ahead = transfer is None and all(
            isinstance(loader, BatchLoader) and loader.num_workers for loader in self.loaders
        )
        self.fetched, self.done, self.length = old.fetched, old.done, old.length
        self._start_profiler, self._stop_profiler = old._start_profiler, old._stop_profiler
        self._begin()
        for item in getattr(old, "batches", ()):
            # Loaders without a length: Lightning has fetched the first batch already.
            self._head.append(Fetched(item, self._states_before))
            self.fetched -= 1
            self.done = False
            self._quiet.note_fetch()

    @property
    def loaders(self) -> list[Any]:
        """The loaders behind it."""
        return list(self.combined_loader.flattened)

    def __iter__(self) -> AheadFetcher:
        # Loaders cannot start again while a thread is still in the middle of their last pass.
        self.stop(None)
        super().__iter__()
        self._begin()
        if self.length is None and self.looks_ahead:
            self._start_profiler()
            try:
                self._has_more()
            finally:
                self._stop_profiler()
        return self

    def __next__(self) -> Any:
        # Lightning's own fetcher does not count the end of the data as a fetch either.
        if self.done:
            raise StopIteration
        self._start_profiler()
        asked_at = perf_counter()
        try:
            fetched = self._next()
            if self.length is None and self.looks_ahead:
                self.done = not self._has_more()
        except StopIteration:
            self.done = True
            raise
        finally:
            wait_s = perf_counter() - asked_at
            self._stop_profiler()
        self.fetched += 1
        if self.length is not None:
            self.done = self.fetched >= self.length
        self._note(fetched, asked_at, wait_s)
        return fetched.item

    def reset(self) -> None:
        super().reset()
        self._head.clear()

    def teardown(self) -> None:
        self.stop()
        super().teardown()

    def stop(self, timeout_s: float | None = STOP_TIMEOUT_S) -> None:
        """End the thread, and drop what was fetched ahead; see `Pump.stop`."""
        if self._pump is not None and self._pump.stop(timeout_s):
            self._pump = None
        self._head.clear()
        if self.stager is not None:
            self.stager.forget()

    def between_fetches(self, action: Callable[[], None]) -> None:
        """Do something to a loader while nothing is asked of it, in the thread that fetches."""
        self._source.to_do.append(action)

    def pop_delivery(self) -> Delivery | None:
        """What was delivered since the last call."""
        delivery, self._delivery = self._delivery, None
        return delivery

    def states_after(self, num_batches: int) -> list[dict[str, Any]]:
        """Where the loaders stood after the last batch that was delivered, or the one before it."""
        return [state() for state in self._states.get(num_batches, self._states_before)]

    def _begin(self) -> None:
        self._source = _Source(self.combined_loader, self.iterator)
        self._quiet = QuietFetches(self.combined_loader, self._options.keep_randomness, self._options.tell)
        self._states_before = self._source.states()
        self._states: dict[int, States] = {}
        self._num_delivered = 0

    def _note(self, fetched: Fetched, asked_at: float, wait_s: float) -> None:
        before = self._states.get(self.fetched - 1, self._states_before)
        self._states = {self.fetched - 1: before, self.fetched: fetched.states}
        if self._delivery is None:
            is_copied = isinstance(fetched.item[0], Staged)
            self._delivery = Delivery(asked_at, is_first=self._num_delivered == 0, is_copied=is_copied)
        self._num_delivered += 1
        self._delivery.wait_s += wait_s
        self._delivery.read_s += fetched.read_s
        self._delivery.transform_s += fetched.transform_s

    def _next(self) -> Fetched:
        if not self._head:
            return self._fetch()
        fetched = self._head.popleft()
        if isinstance(fetched, Exception):
            raise fetched
        return self._prepare(fetched)

    def _has_more(self) -> bool:
        if self._head:
            return True
        pump = self._running_pump()
        if pump is not None:
            return pump.has_more()
        try:
            self._head.append(self._fetch_here())
        except StopIteration:
            return False
        except Exception as error:
            # It is raised at its own batch: the loop still trains on those before it.
            self._head.append(error)
        return True

    def _fetch(self) -> Fetched:
        """The next batch: from the thread, or on this one where that may draw random numbers."""
        pump = self._running_pump()
        if pump is not None:
            return pump.take()
        fetched = self._fetch_here()
        self._running_pump(num_pending=1)
        return fetched

    def _fetch_here(self) -> Fetched:
        # Prepared before a thread starts, so that a user's transfer hook never runs twice at once.
        return self._prepare(next(self._source) if self._reads_ahead else self._quiet.fetch(self._source))

    def _running_pump(self, num_pending: int = 0) -> Pump[Fetched] | None:
        """The thread, started if need be; None where the next batch has to be fetched on this one."""
        if self._pump is not None and self._pump.num_left == 0:
            self._pump.stop()
            self._pump = None
        if self._pump is not None:
            return self._pump
        if self._reads_ahead:
            return None
        limit = self._quiet.num_quiet()
        if self.length is not None:
            # Beyond its length a loader that is cycled would start again.
            left = self.length - self.fetched - num_pending
            limit = left if limit is None else min(limit, left)
        if limit == 0:
            return None
        max_bytes = self._options.max_bytes
        self._pump = Pump(
            self._source,
            self._prepare,
            depth=self._options.depth,
            limit=limit,
            max_bytes=max_bytes,
            num_bytes=None if max_bytes is None else lambda fetched: batch_bytes(fetched.item[0]),
            enter=None if self.stager is None else self.stager.backend.bind_thread,
        )
        return self._pump

    def _prepare(self, fetched: Fetched) -> Fetched:
        batch, batch_idx, dataloader_idx = fetched.item
        if self._transfer is not None and self.stager is not None and not isinstance(batch, Staged):
            fetched.item = self._transfer.stage(self.stager, batch, dataloader_idx), batch_idx, dataloader_idx
        return fetched


class AheadIterFetcher(_DataLoaderIterDataFetcher, AheadFetcher):  # type: ignore[misc]
    """The same for steps that take ``dataloader_iter`` and fetch their batches themselves."""

    looks_ahead = False

    def __init__(self, old: _DataLoaderIterDataFetcher, options: AheadOptions) -> None:
        AheadFetcher.__init__(self, old, options, None)
        self._batch, self._batch_idx, self._dataloader_idx = old._batch, old._batch_idx, old._dataloader_idx
        self.iterator_wrapper = iter(_DataFetcherWrapper(self))


def fetch_ahead(trainer: Trainer, options: AheadOptions, transfer: TransferAhead | None) -> AheadFetcher | None:
    """Exchange the fetcher of the loop that starts now; None where it has been done already, or has no data."""
    loop: Any = trainer._active_loop
    old = loop._data_fetcher
    if old is None or isinstance(old, AheadFetcher):
        return None
    if loop is trainer.fit_loop and loop.restarting and loop._combined_loader_states_to_load:
        # The loaders were built before the checkpoint was read, for `estimated_stepping_batches` (Lightning #20550).
        loop._load_combined_loader_states()
        iter(old)
    new: AheadFetcher
    if isinstance(old, _DataLoaderIterDataFetcher):
        new = AheadIterFetcher(old, options)
    else:
        new = AheadFetcher(old, options, transfer)
    loop._data_fetcher = new
    if loop is trainer.fit_loop:
        combined = new.combined_loader
        combined._state_dicts = _StatesForCheckpoint(loop, new)  # type: ignore[method-assign]
    return new


class _StatesForCheckpoint:
    """Takes the place of `CombinedLoader._state_dicts`: the loaders as they were after the last finished step."""

    def __init__(self, loop: _FitLoop, fetcher: AheadFetcher) -> None:
        self._loop, self._fetcher = loop, fetcher

    def __call__(self) -> list[dict[str, Any]]:
        fetcher = self._fetcher
        combined, current = fetcher.combined_loader, self._loop._data_fetcher
        ended = current is None and combined._iterator is None
        if current is not fetcher and not ended:
            return CombinedLoader._state_dicts(combined)
        if isinstance(fetcher, AheadIterFetcher):
            return fetcher.states_after(fetcher.fetched)
        progress: Any = self._loop.epoch_loop.batch_progress.current
        return fetcher.states_after(progress.processed)
