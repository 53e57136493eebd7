"""Which rows each rank reads, batch by batch, and how to go on in the middle of an epoch.

The state of an epoch is a short list of legs: how many batches of which size were done on how many ranks. From it
follows which rows are left, for any new batch size and number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Literal, TypeAlias

import numpy as np

from lightning_fastio.plan.order import Int64Array, Order, part

Span: TypeAlias = tuple[int, int]
"""First position, and the one after the last."""

Cut: TypeAlias = Literal["striped", "contiguous"]
"""How positions go to the ranks:

- ``striped``: global batch ``k`` is the same run of positions for any number of ranks, each taking an equal slice;
- ``contiguous``: each rank reads one part from its start to its end, so that it decodes only its own blocks.
"""


@dataclass(frozen=True)
class Setting:
    """How positions are dealt out."""

    cut: Cut
    """How positions go to the ranks."""
    world_size: int
    """Number of ranks."""
    batch_size: int
    """Rows of a batch on one rank."""
    drop_last: bool = False
    """Leave out the batches at the end that would not be full on every rank."""
    pad_last: bool = False
    """Fill those batches up with positions from the start instead of making them smaller."""


@dataclass(frozen=True)
class Leg:
    """A stretch of an epoch that was read with one setting."""

    setting: Setting
    """How positions were dealt out."""
    num_batches: int
    """Batches done on each rank."""


class Epoch:
    """One epoch as one rank sees it: batch numbers to row positions."""

    def __init__(self, order: Order, setting: Setting, rank: int, done: Sequence[Leg] = ()) -> None:
        """Deal out what is left of an epoch.

        Args:
            order: The order of the whole epoch.
            setting: How positions are dealt out from now on.
            rank: This rank.
            done: What was read before, oldest first.
        """
        self._order = order
        left: list[Span] = [(0, order.size)]
        same_setting = bool(done) and done[-1].setting == setting
        self._past = tuple(done[:-1] if same_setting else done)
        for leg in self._past:
            left = _Deal(left, leg.setting).left_after(leg.num_batches)
        self._deal = _Deal(left, setting)
        # Asked for twice: when rows are announced, and when they are read.
        self._spans = lru_cache(maxsize=512)(partial(self._deal.spans, rank=rank))
        self._setting = setting
        self.start = done[-1].num_batches if same_setting else 0
        """The number of the first batch to read; those before it were read in an earlier run."""

    def __len__(self) -> int:
        """Batches of the whole epoch, those of earlier runs included."""
        return self.num_past_batches + self._deal.num_batches

    @property
    def by_blocks(self) -> bool:
        """Whether this rank reads blocks from their start to their end."""
        return self._setting.cut == "contiguous"

    @property
    def num_batches(self) -> int:
        """Batches are numbered from 0 to this in the present setting."""
        return self._deal.num_batches

    @property
    def num_past_batches(self) -> int:
        """Batches that were read in earlier settings."""
        return sum(leg.num_batches for leg in self._past)

    def indices(self, batch: int) -> Int64Array:
        """Indices of the row set that make up a batch."""
        return self.indices_of(range(batch, batch + 1))[0]

    def indices_of(self, batches: range) -> list[Int64Array]:
        """Indices of several batches, cheaper than one by one where they follow each other."""
        spans = [self._spans(batch) for batch in batches]
        sizes = [sum(stop - start for start, stop in of_batch) for of_batch in spans]
        pieces = [self._order.take(start, stop) for start, stop in _joined(chain.from_iterable(spans))]
        indices = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        ends = accumulate(sizes)
        return [indices[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def ahead(self, batch: int) -> Int64Array | None:
        """Indices whose blocks should begin to decode when a batch is read; None where blocks play no part."""
        found = [
            self._order.ahead(*span, first=batch == self.start and number == 0)
            for number, span in enumerate(self._spans(batch))
        ]
        announced = [indices for indices in found if indices is not None]
        return np.concatenate(announced) if announced else None

    def legs_after(self, batch: int) -> tuple[Leg, ...]:
        """The state once the batches before number ``batch`` are done."""
        return (*self._past, Leg(self._setting, batch))


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans that follow each other as one."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


class _Deal:
    """Positions that are left in an epoch, dealt out to ranks in batches.

    Every rank gets the same number of batches. Unless they are dropped or padded, the positions at the end are
    spread so that each is dealt once and no batch is empty; with batch size 1 this makes some last batches hold
    two. Fewer positions than ranks must repeat.
    """

    def __init__(self, left: Sequence[Span], setting: Setting) -> None:
        self._left = [span for span in left if span[0] < span[1]]
        self._offsets = list(accumulate((stop - start for start, stop in self._left), initial=0))
        self._size = self._offsets[-1]
        self._setting = setting
        self._repeats = 0 < self._size < setting.world_size and not setting.drop_last
        self.num_batches = self._count()

    def spans(self, batch: int, rank: int) -> list[Span]:
        """Positions of a batch."""
        if self._repeats:
            return self._positions(rank % self._size, rank % self._size + 1)
        start, stop = self._span(batch, rank)
        if not self._setting.pad_last:
            return self._positions(start, stop)
        low, high = (0, self._size) if self._setting.cut == "striped" else self._part(rank)
        spans: list[Span] = []
        while start < stop:
            # Past the end, go on from the start.
            offset = (start - low) % (high - low)
            length = min(stop - start, high - low - offset)
            spans += self._positions(low + offset, low + offset + length)
            start += length
        return spans

    def left_after(self, num_batches: int) -> list[Span]:
        """Positions that no rank has had once each has done ``num_batches``."""
        if num_batches == 0:
            return self._left
        if num_batches >= self.num_batches:
            return []
        last = self._setting.world_size - 1
        if self._setting.cut == "striped":
            return self._positions(self._span(num_batches - 1, last)[1], self._size)
        return [
            span
            for rank in range(self._setting.world_size)
            for span in self._positions(self._span(num_batches - 1, rank)[1], self._part(rank)[1])
        ]

    def _count(self) -> int:
        setting = self._setting
        longest, shortest = -(-self._size // setting.world_size), self._size // setting.world_size
        if setting.drop_last:
            return shortest // setting.batch_size
        if setting.pad_last or setting.batch_size > 1 or self._repeats:
            return -(-longest // setting.batch_size)
        return shortest

    def _span(self, batch: int, rank: int) -> Span:
        """Numbers of a batch's positions, counted among those that are left."""
        size, world_size = self._setting.batch_size, self._setting.world_size
        if self._setting.cut == "contiguous":
            first, end = self._part(rank)
            return self._tail(batch, first, end, size, 1)
        start, stop = self._tail(batch, 0, self._size, size * world_size, world_size)
        first, end = part(stop - start, world_size, rank)
        return start + first, start + end

    def _tail(self, batch: int, first: int, end: int, size: int, least: int) -> Span:
        """A batch of ``size`` out of ``first`` to ``end``; the last gets ``least`` at least, from the one before."""
        start, stop = first + batch * size, first + (batch + 1) * size
        if self._setting.drop_last or self._setting.pad_last:
            return start, stop
        last_start = min(first + (self.num_batches - 1) * size, end - least)
        if batch == self.num_batches - 1:
            return last_start, end
        return start, min(stop, last_start)

    def _part(self, rank: int) -> Span:
        return part(self._size, self._setting.world_size, rank)

    def _positions(self, start: int, stop: int) -> list[Span]:
        """Positions of the epoch behind a run of those that are left."""
        spans: list[Span] = []
        piece = bisect_right(self._offsets, start) - 1
        while start < stop:
            offset = start - self._offsets[piece]
            first, last = self._left[piece]
            length = min(stop - start, last - first - offset)
            spans.append((first + offset, first + offset + length))
            start, piece = start + length, piece + 1
        return spans
