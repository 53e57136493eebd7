"""Fetches batches ahead of the loop that uses them, and copies them to the device ahead of the step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

from lightning_fastio.errors import ConfigError
from lightning_fastio.staging import Staged, Stager, move_batch, open_backend, tensors_in
from lightning_fastio.waits import WaitStats

T = TypeVar("T")

STOP_TIMEOUT_S = 2.0
"""How long a loop that ended waits for a loader that is still busy. Its thread ends by itself after that."""


class Pump(Generic[T]):
    """A thread that keeps up to ``depth`` items ready. Used by one consumer.

    It waits for room before it fetches, so it is never more than ``depth`` items ahead. An error of the source comes
    out at the place of the item that failed, with its traceback.
    """

    def __init__(
        self,
        source: Iterator[Any],
        prepare: Callable[[Any], T],
        *,
        depth: int,
        limit: int | None = None,
        max_bytes: int | None = None,
        num_bytes: Callable[[T], int] | None = None,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """Start fetching.

        Args:
            source: Where items come from.
            prepare: Turns an item into what `take` returns; called in the thread.
            depth: Items to keep ready.
            limit: Items to fetch at most.
            max_bytes: Fetch no further item while so many bytes are ready.
            num_bytes: Bytes of what `take` returns.
            enter: Called in the thread before anything else.
        """
        self.num_left = limit
        """Items of the limit that were not taken yet; None without a limit."""
        self._source = source
        self._prepare = prepare
        self._depth = depth
        self._to_fetch = limit
        self._max_bytes = max_bytes
        self._num_bytes = num_bytes
        self._items: deque[T] = deque()
        self._ready_bytes = 0
        self._stopped = self._finished = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # Modes of gradients are kept per thread; items are made under those of the loop that asks for them.
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._thread = threading.Thread(target=self._run, args=(enter, *modes), name="fastio-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """The next item, in order.

        Raises:
            StopIteration: The source has ended, or the limit is reached.
        """
        with self._changed:
            while not self._items and not self._finished:
                self._changed.wait()
            if not self._items:
                error, self._error = self._error, None
                raise error or StopIteration
            item = self._items.popleft()
            if self._num_bytes is not None:
                self._ready_bytes -= self._num_bytes(item)
            if self.num_left is not None:
                self.num_left -= 1
            self._changed.notify_all()
            return item

    def has_more(self) -> bool:
        """Whether `take` will give an item or an error; waits until that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished)
            return bool(self._items) or self._error is not None

    def stop(self, timeout_s: float | None = STOP_TIMEOUT_S) -> bool:
        """Drop what is ready and end the thread.

        Args:
            timeout_s: Seconds after which to go on if the source is stuck; None waits for it.

        Returns:
            Whether the thread has ended, so that the source may be used by others.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        with self._changed:
            self._items.clear()
            self._error = None
            self._ready_bytes = 0
        return not self._thread.is_alive()

    def _run(self, enter: Callable[[], None] | None, inference_mode: bool, grad_enabled: bool) -> None:
        error: BaseException | None = None
        try:
            with ExitStack() as modes:
                modes.enter_context(_grad_mode(inference_mode, grad_enabled))
                if enter is not None:
                    enter()
                while self._wait_for_room() and self._fetch():
                    pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error = None if self._stopped else error
            self._finished = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room())
            return not self._stopped and self._to_fetch != 0

    def _has_room(self) -> bool:
        if self._max_bytes is not None and self._items and self._ready_bytes >= self._max_bytes:
            return False
        return len(self._items) < self._depth

    def _fetch(self) -> bool:
        try:
            fetched = next(self._source)
        except StopIteration:
            return False
        try:
            item = self._prepare(fetched)
        except StopIteration as stop:
            # Only the source may end the data. This one would pass for the end of an epoch (cf. PEP 479).
            raise RuntimeError("StopIteration was raised while a batch was prepared") from stop
        with self._changed:
            if not self._stopped:
                self._items.append(item)
                if self._num_bytes is not None:
                    self._ready_bytes += self._num_bytes(item)
            if self._to_fetch is not None:
                self._to_fetch -= 1
            self._changed.notify_all()
        return True


def _grad_mode(inference_mode: bool, grad_enabled: bool) -> AbstractContextManager[Any]:
    if inference_mode:
        return torch.inference_mode()
    return torch.set_grad_enabled(grad_enabled)


class DevicePrefetcher:
    """An iterable over the batches of a loader, on a device, fetched and copied ahead of the loop that uses them.

    On CUDA a thread fetches, pins what is not pinned, and copies on a stream of its own, while the loop computes. On
    a CPU it fetches ahead; on MPS and other devices it fetches ahead and moves a batch when it is delivered.
    Each batch lies at a new address: copy it into the static inputs of a CUDA graph that you captured by hand.

    Example:
        >>> batches = DevicePrefetcher(loader, "cuda")
        >>> for batch in batches:
        ...     loss = model(batch["x"])
        >>> batches.waits.data_wait_fraction  # share of the time that the loop waited for data
    """

    def __init__(
        self, iterable: Iterable[Any], device: str | torch.device, depth: int = 2, *, max_bytes: int | None = None
    ) -> None:
        """Set up; nothing is fetched before the first batch is asked for.

        Args:
            iterable: A loader of batches: any nesting of tensors, objects with ``to(device)``, and other things.
            device: Where the batches go.
            depth: Batches ready ahead of the one in use, 1 or more. So many batches more are in device memory.
            max_bytes: Get no further batch ready while so many bytes are.

        Raises:
            ConfigError: An argument is out of range.
        """
        check_depth(depth, max_bytes)
        self.iterable = iterable
        self.device = torch.device(device)
        self.depth = depth
        self.max_bytes = max_bytes
        self.waits = WaitStats()
        """How long each step waited for its batch."""
        self._epoch = 0

    def __len__(self) -> int:
        """Batches of an epoch, where the loader knows."""
        if not isinstance(self.iterable, Sized):
            raise TypeError(f"{type(self.iterable).__name__} has no length")
        return len(self.iterable)

    def __iter__(self) -> Iterator[Any]:
        backend = open_backend(self.device)
        stager = None if backend is None else Stager(backend)
        pump: Pump[Any] = Pump(
            iter(self.iterable),
            (lambda batch: batch) if stager is None else stager.stage,
            depth=self.depth,
            max_bytes=self.max_bytes,
            num_bytes=None if self.max_bytes is None else batch_bytes,
            enter=None if stager is None else stager.backend.bind_thread,
        )
        is_first = True
        try:
            while True:
                asked = perf_counter()
                try:
                    batch = pump.take()
                except StopIteration:
                    return
                wait_s = perf_counter() - asked
                batch = move_batch(batch, self.device) if stager is None else stager.ready(batch)
                num_rows = rows_in(batch)
                # Nothing here refers to the batch while the loop uses it, so that the loop can free it.
                handed_over = [batch]
                del batch
                yield handed_over.pop()
                self.waits.add(
                    epoch=self._epoch,
                    data_wait_s=wait_s,
                    step_s=perf_counter() - asked,
                    num_rows=num_rows,
                    is_first=is_first,
                    is_copied=stager is not None,
                )
                is_first = False
                if stager is not None:
                    self.waits.add_copies(stager.finished_copies())
        finally:
            self._epoch += 1
            pump.stop()


def check_depth(depth: int, max_bytes: int | None) -> None:
    """Refuse a depth or a bound that means nothing."""
    if depth < 1:
        raise ConfigError(f"depth={depth}: expected 1 or more batches; leave the prefetcher out to switch it off")
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes}: expected 1 or more, or None for no bound")


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors of a batch."""
    if isinstance(batch, Staged):
        return batch.nbytes
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def rows_in(batch: Any) -> int:
    """Rows of a batch: the length of its first tensor, of PyG its graphs; 0 where there is none."""
    if isinstance(num_graphs := getattr(batch, "num_graphs", None), int):
        return num_graphs
    # Most batches start with a tensor; to look for it costs more than all else that a step is asked.
    first = next(iter(batch.values() if type(batch) is dict else batch), None) if type(batch) in _PLAIN else batch
    if type(first) is torch.Tensor and first.layout is torch.strided and not first.is_nested:
        return first.shape[0] if first.ndim else 1
    for tensor in tensors_in(batch):
        return len(tensor) if tensor.ndim else 1
    return 0


_PLAIN = (dict, list, tuple)
