"""Rows out of blocks that decode whole: compressed HDF5 chunks, Parquet row groups.

A decoded block is kept in a cache that is bounded in bytes. Announced blocks are decoded ahead by a few threads, and
stay until the rows that were announced have been read. A read that finds several blocks missing decodes them in its
own thread as well, side by side with those threads.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_fastio.formats.mapped import as_items, copy_items

Int64Array: TypeAlias = npt.NDArray[np.int64]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

FEW_ROWS = 8
"""Fewer rows than this are copied one by one, which costs less than setting up an index."""

LONG_ROW_BYTES = 4096
"""So are rows from this size on: each is one long copy, and needs no temporary."""

IDLE_S = 1.0
"""Seconds after which a decoding thread without work ends; the next announcement starts another."""


class BlockRows(NamedTuple):
    """The rows of one request that lie in one block."""

    block: int
    """Number of the block."""
    positions: Int64Array
    """Where the rows stand in the request."""
    rows: Int64Array
    """Row numbers counted from the start of the block, in the order of ``positions``."""


def split_by_block(rows: Int64Array, bounds: Int64Array) -> Iterator[BlockRows]:
    """Group checked row numbers by block, blocks ascending.

    Args:
        rows: Row numbers in any order, shape ``(num_rows,)``.
        bounds: First row of each block, and the number of rows at the end, shape ``(num_blocks + 1,)``.
    """
    blocks = np.searchsorted(bounds, rows, side="right") - 1
    return _group(blocks, rows - bounds[blocks])


def split_evenly(rows: Int64Array, block_rows: int) -> Iterator[BlockRows]:
    """As `split_by_block`, for blocks of one length."""
    blocks, local = np.divmod(rows, block_rows)
    return _group(blocks, local)


def _group(blocks: Int64Array, local: Int64Array) -> Iterator[BlockRows]:
    if blocks.size == 0:
        return
    order = np.argsort(blocks, kind="stable")
    blocks, local = blocks[order], local[order]
    starts = np.concatenate([[0], np.flatnonzero(blocks[1:] != blocks[:-1]) + 1, [blocks.size]])
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield BlockRows(int(blocks[start]), order[start:stop], local[start:stop])


def copy_rows(source: npt.NDArray[Any], rows: Int64Array, out: npt.NDArray[Any], positions: Int64Array) -> None:
    """``out[positions] = source[rows]`` for contiguous arrays of rows of one type, and ascending positions."""
    num_rows = len(rows)
    if num_rows == 0 or source.nbytes == 0:
        return
    first, last = int(positions[0]), int(positions[-1])
    if num_rows >= FEW_ROWS and last - first == num_rows - 1:  # They fill a slice, which needs no temporary.
        copy_items(as_items(source), rows, as_items(out[first : last + 1]))
    elif num_rows >= FEW_ROWS and source.nbytes < LONG_ROW_BYTES * len(source):
        copy_items(as_items(source), rows, as_items(out), positions)
    else:
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            out[position] = source[row]


class BlockCache(Generic[Key, Value]):
    """Decoded blocks by key, bounded in bytes and shared by all threads of a process.

    Each block decodes once however many threads ask for it. What exceeds the bound goes by last use, blocks that
    announced rows still need after all others; only blocks that a reading thread is holding come on top.

    Every process has blocks and threads of its own: after a fork the child starts empty. A pickled or copied cache
    is empty too.
    """

    def __init__(
        self,
        decode: Callable[[Key], Value],
        size_of: Callable[[Key], int],
        *,
        max_bytes: int,
        num_threads: int | None = None,
    ) -> None:
        """Set up; no thread starts before something is announced.

        Args:
            decode: Makes the block of a key. Runs in any thread, several at once. What it raises surfaces at the
                read that needs the block.
            size_of: Bytes of the decoded block of a key, or an estimate.
            max_bytes: Bytes of decoded blocks that are kept at most, though always one block.
            num_threads: Threads that decode ahead; by default one for each processor of this process, at most 8.
        """
        self.decode = decode
        self.size_of = size_of
        self.max_bytes = max_bytes
        self.num_threads = min(8, len(os.sched_getaffinity(0))) if num_threads is None else num_threads
        self._stores: dict[int, _Store[Key, Value]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_cache, (self.decode, self.size_of, self.max_bytes, self.num_threads)

    def announce(self, requests: Iterable[tuple[Key, int]]) -> None:
        """Decode blocks ahead, as far as the cache has room; never blocks and never fails.

        Args:
            requests: Key of each block, and the number of its rows that will be read.
        """
        self._store().announce(requests)

    def read(self, requests: Iterable[tuple[Key, int]]) -> Iterator[tuple[Key, Value]]:
        """Blocks as they become ready, in an order that may differ from the requests.

        Args:
            requests: Key of each block, each once, and the number of its rows that the caller reads now.
        """
        return self._store().read(dict(requests))

    def get(self, key: Key, num_rows: int = 1) -> Value:
        """One block."""
        return next(self.read([(key, num_rows)]))[1]

    def close(self) -> None:
        """Forget all blocks and end the threads. Idempotent; a later read starts afresh."""
        store = self._stores.pop(os.getpid(), None)
        if store is not None:
            store.close()

    def _store(self) -> _Store[Key, Value]:
        pid = os.getpid()
        store = self._stores.get(pid)
        if store is None:
            for other in list(self._stores):  # Blocks of the parent, whose locks may be held by threads it kept.
                self._stores.pop(other, None)
            store = self._stores.setdefault(pid, _Store(self.decode, self.size_of, self.max_bytes, self.num_threads))
        return store


def _make_cache(decode: Callable[[Any], Any], size_of: Any, max_bytes: int, num_threads: int) -> BlockCache[Any, Any]:
    return BlockCache(decode, size_of, max_bytes=max_bytes, num_threads=num_threads)


class _Block(Generic[Value]):
    __slots__ = ("size", "touched", "value")

    def __init__(self, value: Value, size: int, touched: int) -> None:
        self.value = value
        self.size = size
        self.touched = touched
        """Bytes that had been decoded in all when the block was last announced or read."""


class _Store(Generic[Key, Value]):
    """The blocks and threads of one process. A thread refers to the store only, and ends when it has no work."""

    def __init__(
        self, decode: Callable[[Key], Value], size_of: Callable[[Key], int], max_bytes: int, num_threads: int
    ) -> None:
        self._decode, self._size_of = decode, size_of
        self._max_bytes, self._num_threads = max_bytes, num_threads
        # One condition for everything that changes: a block got ready, work came in, room came free.
        self._changed = threading.Condition()
        self._idle: OrderedDict[Key, _Block[Value]] = OrderedDict()
        self._needed: OrderedDict[Key, _Block[Value]] = OrderedDict()
        self._wanted_rows: dict[Key, int] = {}
        self._decoding: dict[Key, int] = {}
        self._queue: deque[Key] = deque()
        self._queued: dict[Key, int] = {}
        self._queued_bytes = self._idle_bytes = self._needed_bytes = self._decoded_bytes = 0
        self._threads: list[threading.Thread] = []
        self._num_waiting = 0
        self._closed = False

    def announce(self, requests: Iterable[tuple[Key, int]]) -> None:
        with self._changed:
            for key, num_rows in requests:
                if self._enqueue(key, urgent=False):
                    self._want(key, self._wanted_rows.get(key, 0) + num_rows)
            self._set_to_work()

    def read(self, pending: dict[Key, int]) -> Iterator[tuple[Key, Value]]:
        with self._changed:
            missing = []
            for key, num_rows in pending.items():
                self._want(key, max(self._wanted_rows.get(key, 0), num_rows))
                if key not in self._needed and key not in self._decoding:
                    missing.append(key)
            # The calling thread begins with the first one, the decoding threads with the next.
            for key in reversed(missing[1:]):
                self._enqueue(key, urgent=True)
            self._set_to_work()
        while pending:
            key, value = self._next(pending)
            del pending[key]
            yield key, value

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._changed:
            self._idle.clear()
            self._needed.clear()

    def _next(self, pending: dict[Key, int]) -> tuple[Key, Value]:
        """One pending block: the first that is ready or that no thread is decoding yet."""
        with self._changed:
            while True:
                key = next((key for key in pending if key not in self._decoding), None)
                if key is not None:
                    break
                self._changed.wait()
            block = self._needed.get(key) or self._idle.get(key)
            if block is not None:
                self._consume(key, pending[key])
                self._set_to_work()
                return key, block.value
            self._claim(key)
        return key, self._decode_claimed(key, pending[key])

    def _decode_claimed(self, key: Key, num_rows: int) -> Value:
        """Decode a block outside the lock and keep it; ``num_rows`` of its wanted rows are read by the caller."""
        try:
            value = self._decode(key)
        except BaseException:
            with self._changed:
                del self._decoding[key]
                self._wanted_rows.pop(key, None)
                self._changed.notify_all()
            raise
        with self._changed:
            size = self._decoding.pop(key)
            self._decoded_bytes += size
            if not self._closed:
                self._idle[key] = _Block(value, size, self._decoded_bytes)
                self._idle_bytes += size
                self._want(key, self._wanted_rows.get(key, 0))
                self._consume(key, num_rows)
                self._evict()
            self._set_to_work()
            self._changed.notify_all()
        return value

    def _want(self, key: Key, num_rows: int) -> None:
        """Set the number of rows that are still to be read, and mark the block as just used."""
        if num_rows > 0:
            self._wanted_rows[key] = num_rows
        else:
            self._wanted_rows.pop(key, None)
        block = self._needed.pop(key, None)
        if block is not None:
            self._needed_bytes -= block.size
        elif (block := self._idle.pop(key, None)) is not None:
            self._idle_bytes -= block.size
        if block is None:
            return
        block.touched = self._decoded_bytes
        if num_rows > 0:
            self._needed[key] = block
            self._needed_bytes += block.size
        else:
            self._idle[key] = block
            self._idle_bytes += block.size

    def _consume(self, key: Key, num_rows: int) -> None:
        self._want(key, self._wanted_rows.get(key, 0) - num_rows)

    def _evict(self, *, coming: int = 0) -> None:
        """Bring the cache below its bound, less what is ``coming``, for which blocks that are needed stay."""
        while self._idle_bytes + self._needed_bytes + coming > self._max_bytes:
            if len(self._idle) + len(self._needed) <= (0 if coming else 1):
                return
            oldest = next(iter(self._needed.values()), None)
            # Rows of an iteration that ended half-way are never read: what was announced two caches ago is stale.
            is_stale = oldest is not None and self._decoded_bytes - oldest.touched > 2 * self._max_bytes
            if self._idle and not is_stale:
                _, block = self._idle.popitem(last=False)
                self._idle_bytes -= block.size
            elif coming and not is_stale:
                return
            else:
                key, block = self._needed.popitem(last=not is_stale)
                self._needed_bytes -= block.size
                self._wanted_rows.pop(key, None)

    def _enqueue(self, key: Key, *, urgent: bool) -> bool:
        """Queue a block that is not there yet; False when more is queued than the cache can hold."""
        if key in self._needed or key in self._idle or key in self._decoding or (key in self._queued and not urgent):
            return True
        size = self._size_of(key)
        if not urgent and self._queued_bytes + size > self._max_bytes:
            return False
        if key not in self._queued:
            self._queued[key] = size
            self._queued_bytes += size
        if urgent:
            self._queue.appendleft(key)
        else:
            self._queue.append(key)
        return True

    def _claim(self, key: Key) -> None:
        """Mark a block as being decoded by this thread; its place in the queue is skipped later."""
        self._queued_bytes -= self._queued.pop(key, 0)
        self._decoding[key] = self._size_of(key)
        # Room is made before it is filled: a block may be as large as a good part of the cache.
        self._evict(coming=sum(self._decoding.values()))

    def _claim_next(self) -> Key | None:
        """The next queued block, if there is one and it fits beside the blocks that are needed."""
        while self._queue:
            key = self._queue[0]
            if key in self._queued:
                taken = self._needed_bytes + sum(self._decoding.values())
                if taken + self._queued[key] > self._max_bytes:
                    return None
                self._queue.popleft()
                self._claim(key)
                return key
            self._queue.popleft()
        return None

    def _set_to_work(self) -> None:
        if not self._queue or self._closed:
            return
        if self._num_waiting:
            self._changed.notify_all()
        elif len(self._threads) < self._num_threads:
            name = f"fastio-decode-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (key := self._wait_for_work()) is not None:
            with suppress(Exception):  # The read that needs the block meets the same error itself.
                self._decode_claimed(key, 0)

    def _wait_for_work(self) -> Key | None:
        """A block for a decoding thread; None when there was nothing to do for a while."""
        with self._changed:
            is_waiting = True
            while not self._closed:
                key = self._claim_next()
                if key is not None:
                    self._set_to_work()
                    return key
                if not is_waiting:
                    break
                self._num_waiting += 1
                is_waiting = self._changed.wait(IDLE_S)
                self._num_waiting -= 1
            self._threads.remove(threading.current_thread())
            return None
