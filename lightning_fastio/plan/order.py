"""In which order the rows of an epoch stand: four orders, each computed where it is needed.

An order maps positions ``0`` to ``size - 1`` to indices of a row set. It is a function of its key alone, holds no
array that grows with the rows (above a few million), and may be used from several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fastio.plan.permutation import Permutation, seed_from

Int64Array: TypeAlias = npt.NDArray[np.int64]

_CHUNK = 1 << 16
"""Positions computed at a time: small enough for the CPU's cache, large enough to hide NumPy's cost a call."""

_CHUNKS_KEPT = 24
"""Chunks kept: those between the rows that are announced and the rows that are read, for several threads."""


class Order(Protocol):
    """Positions of an epoch to indices of a row set."""

    size: int
    """Number of positions."""

    def take(self, start: int, stop: int) -> Int64Array:
        """Indices at the positions ``start`` to ``stop - 1``; to be read only."""
        ...

    def ahead(self, start: int, stop: int, *, first: bool) -> Int64Array | None:
        """Indices whose blocks should begin to decode when the positions ``start`` to ``stop - 1`` are read.

        None where blocks play no part. ``first`` says that nothing was announced before.
        """
        ...


class Sequential:
    """The order of the file."""

    def __init__(self, size: int, windows: Windows | None = None) -> None:
        self.size = size
        self._windows = windows

    def take(self, start: int, stop: int) -> Int64Array:
        return np.arange(start, stop)

    def ahead(self, start: int, stop: int, *, first: bool) -> Int64Array | None:
        return self._windows.entered(start, stop, first=first) if self._windows else None


class GlobalShuffle:
    """A uniform shuffle of all rows."""

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        permutation = Permutation(size, key)
        self._take = permutation.take if permutation.is_table else _chunked(permutation.take, size)

    def take(self, start: int, stop: int) -> Int64Array:
        return self._take(start, stop)

    def ahead(self, start: int, stop: int, *, first: bool) -> Int64Array | None:
        return None


class WeightedSampling:
    """Rows drawn with replacement, each with a probability in proportion to its weight."""

    def __init__(self, weights: npt.NDArray[np.float64], size: int, key: int) -> None:
        self.size = size
        self._cumulative = np.cumsum(weights)
        self._key = key
        self._take = _chunked(self._draw, size)

    def take(self, start: int, stop: int) -> Int64Array:
        return self._take(start, stop)

    def ahead(self, start: int, stop: int, *, first: bool) -> Int64Array | None:
        return None

    def _draw(self, start: int, stop: int) -> Int64Array:
        # Called for whole chunks only, so that a position has the same draw however it is read.
        generator = np.random.Generator(np.random.Philox(seed_from(self._key, start)))
        points = generator.random(stop - start) * self._cumulative[-1]
        # A product that rounds up to the total would fall behind the last row that has a weight.
        last = np.searchsorted(self._cumulative, self._cumulative[-1], side="left")
        drawn: Int64Array = np.minimum(np.searchsorted(self._cumulative, points, side="right"), last)
        return drawn


class BlockShuffle:
    """Blocks in random order, laid end to end, and rows mixed inside windows of neighbouring blocks.

    Each block is decoded once per epoch, and a window bounds how many are needed at the same time. The windows end
    at the borders of ``num_parts`` equal parts, one for each rank, so that no rank decodes another one's blocks
    except the one at a seam.
    """

    def __init__(self, blocks: Int64Array, key: int, *, window_rows: int, num_parts: int) -> None:
        """Lay out the blocks.

        Args:
            blocks: Row boundaries of the blocks, shape ``(num_blocks + 1,)``.
            key: Any integer; equal keys give equal orders.
            window_rows: A window ends before it would hold more rows than this; it holds one block at least.
            num_parts: Number of ranks.
        """
        self.size = int(blocks[-1])
        self._key = key
        block_order = Permutation(len(blocks) - 1, seed_from(key, 0)).take(0, len(blocks) - 1)
        self._block_starts = blocks[:-1][block_order]
        edges = np.concatenate(([0], np.cumsum(np.diff(blocks)[block_order])))
        self._windows = Windows(edges, window_rows=window_rows, num_parts=num_parts, index_at=self._index_at)
        self._edges = edges
        self._mixed: Callable[[int], Int64Array] = lru_cache(maxsize=2)(self._mix_window)
        # Threads that enter a window together wait for the one that mixes it.
        self._mixing = Lock()

    def take(self, start: int, stop: int) -> Int64Array:
        window = self._windows.containing(start)
        pieces = []
        while start < stop:
            first, last = self._windows.span(window)
            end = min(stop, last)
            with self._mixing:
                mixed = self._mixed(window)
            pieces.append(mixed[start - first : end - first])
            start, window = end, window + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def ahead(self, start: int, stop: int, *, first: bool) -> Int64Array | None:
        return self._windows.entered(start, stop, first=first)

    def _mix_window(self, window: int) -> Int64Array:
        first, last = self._windows.span(window)
        return self._index_at(first + Permutation(last - first, seed_from(self._key, 1, window)).take(0, last - first))

    def _index_at(self, laid: Int64Array) -> Int64Array:
        block = np.searchsorted(self._edges, laid, side="right") - 1
        indices: Int64Array = self._block_starts[block] + (laid - self._edges[block])
        return indices


class Windows:
    """Runs of neighbouring blocks that are needed at the same time, and the one to decode next."""

    def __init__(
        self, edges: Int64Array, *, window_rows: int, num_parts: int, index_at: Callable[[Int64Array], Int64Array]
    ) -> None:
        """Cut a row of blocks into windows.

        Args:
            edges: Positions at which the blocks begin, and the end; shape ``(num_blocks + 1,)``.
            window_rows: Rows that a window may hold, unless one block alone holds more.
            num_parts: Windows also end at the borders of this many equal parts.
            index_at: Gives the indices of the row set at positions.
        """
        size = int(edges[-1])
        borders = np.array([0] + [part(size, num_parts, number)[1] for number in range(num_parts)])
        edges = np.union1d(edges, borders)
        starts = [0]
        while starts[-1] < size:
            start = starts[-1]
            part_end = int(borders[np.searchsorted(borders, start, side="right")])
            next_edge = int(edges[np.searchsorted(edges, start, side="right")])
            reached = int(edges[np.searchsorted(edges, start + window_rows, side="right") - 1])
            starts.append(min(max(reached, next_edge), part_end))
        self._starts = np.asarray(starts)
        self._edges = edges
        self._index_at = index_at

    def containing(self, position: int) -> int:
        """The window that holds a position."""
        return int(np.searchsorted(self._starts, position, side="right")) - 1

    def span(self, window: int) -> tuple[int, int]:
        """First position of a window, and the one after its last."""
        return int(self._starts[window]), int(self._starts[window + 1])

    def entered(self, start: int, stop: int, *, first: bool) -> Int64Array | None:
        """One index of each block to decode next, on reading the positions ``start`` to ``stop - 1``.

        On entering a window that is the window after it; on the first call it is also the window itself.
        """
        low = self.containing(start) if first else int(np.searchsorted(self._starts, start, side="left"))
        high = self.containing(stop - 1)
        from_window, to_window = (low if first else low + 1), min(high + 1, len(self._starts) - 2)
        if high < low or to_window < from_window:
            return None
        begin, end = np.searchsorted(self._edges, [self._starts[from_window], self._starts[to_window + 1]])
        return self._index_at(self._edges[begin:end])


def part(size: int, num_parts: int, number: int) -> tuple[int, int]:
    """Start and end of one of ``num_parts`` parts of ``range(size)`` whose lengths differ by one at most."""
    length, longer = divmod(size, num_parts)
    start = number * length + min(number, longer)
    return start, start + length + (number < longer)


def _chunked(compute: Callable[[int, int], Int64Array], size: int) -> Callable[[int, int], Int64Array]:
    """The same function, computed in whole aligned chunks of which the last few are kept."""
    chunk_at: Callable[[int], Int64Array] = lru_cache(maxsize=_CHUNKS_KEPT)(
        lambda index: compute(index * _CHUNK, min((index + 1) * _CHUNK, size))
    )

    def take(start: int, stop: int) -> Int64Array:
        first, last = start // _CHUNK, max(start, stop - 1) // _CHUNK
        if first == last:
            return chunk_at(first)[start - first * _CHUNK : stop - first * _CHUNK]
        joined = np.concatenate([chunk_at(index) for index in range(first, last + 1)])
        return joined[start - first * _CHUNK : stop - first * _CHUNK]

    return take
