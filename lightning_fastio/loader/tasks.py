"""Batch numbers to row numbers, and word to the reader of the rows that come soon."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

import numpy as np

from lightning_fastio.formats.base import Reader
from lightning_fastio.plan.epoch import Epoch
from lightning_fastio.plan.order import Int64Array
from lightning_fastio.plan.permutation import seed_from
from lightning_fastio.plan.plan import AHEAD_BYTES
from lightning_fastio.plan.rows import RowSet

_PAGE_BYTES = 64 << 20
_PAGE_BATCHES = 64
"""Rows of this many batches, or of this many bytes if that is less, are computed and announced at a time."""

_PAGES_KEPT = 16


class Task(NamedTuple):
    """One batch to fetch."""

    rows: Int64Array
    """Row numbers of the reader."""
    seed_keys: tuple[int, ...]
    """What the random numbers depend on that transforms may draw for this batch."""

    @property
    def seed(self) -> int:
        """Seed of those random numbers."""
        return seed_from(*self.seed_keys)


class Tasks:
    """The tasks of one epoch on one rank. May be asked from several threads.

    Row numbers are computed by pages of several batches, and the reader hears of them by pages, so that a small batch
    costs little.
    """

    def __init__(
        self, epoch: Epoch, rows: RowSet, seed_keys: tuple[int, ...], *, reader: Reader | None, batch_bytes: int
    ) -> None:
        """Set up.

        Args:
            epoch: Which indices make up a batch.
            rows: Row numbers behind indices.
            seed_keys: What the seeds of batches depend on, besides their numbers.
            reader: Is told which rows come soon; None where it reads in other processes.
            batch_bytes: Bytes of a batch.
        """
        self._epoch = epoch
        self._rows = rows
        self._seed_keys = seed_keys
        self._reader = reader
        self._page_batches = max(1, min(_PAGE_BYTES // batch_bytes, _PAGE_BATCHES))
        self._pages: OrderedDict[int, list[Int64Array]] = OrderedDict()
        self._num_pages = -(-(epoch.num_batches - epoch.start) // self._page_batches)
        self._num_announced = 0
        # At least four batches, of whatever size.
        least = -(-4 // self._page_batches)
        self._pages_ahead = max(least, min(AHEAD_BYTES // (batch_bytes * self._page_batches), _PAGES_KEPT // 2))
        self._lock = Lock()

    def __call__(self, batches: range) -> list[Task]:
        """The tasks of some batches that follow each other."""
        if self._reader is not None and self._epoch.by_blocks:
            self._announce_blocks(self._reader, batches)
        return [
            Task(self._rows_of(batch), (*self._seed_keys, self._epoch.num_past_batches + batch)) for batch in batches
        ]

    def _rows_of(self, batch: int) -> Int64Array:
        page, place = divmod(batch - self._epoch.start, self._page_batches)
        with self._lock:
            rows = self._page(page)[place]
            soon = [] if self._reader is None or self._epoch.by_blocks else self._soon(page)
        for page_rows in soon:
            if page_rows and self._reader is not None:
                self._reader.will_need(np.concatenate(page_rows))
        return rows

    def _page(self, page: int) -> list[Int64Array]:
        found = self._pages.get(page)
        if found is None:
            first = self._epoch.start + page * self._page_batches
            batches = range(first, min(first + self._page_batches, self._epoch.num_batches))
            found = self._pages[page] = [self._rows.at(indices) for indices in self._epoch.indices_of(batches)]
            if len(self._pages) > _PAGES_KEPT:
                self._pages.popitem(last=False)
        return found

    def _soon(self, page: int) -> list[list[Int64Array]]:
        """Pages to announce when a page is begun: two pages at a time, until enough are announced ahead.

        Of the first page those after the first batch, which is read right now.
        """
        first = self._num_announced
        last = min(page + 1 + self._pages_ahead, first + 2, self._num_pages)
        self._num_announced = max(first, last)
        soon = [self._page(later) for later in range(first, last)]
        return [soon[0][1:], *soon[1:]] if first == 0 and soon else soon

    def _announce_blocks(self, reader: Reader, batches: range) -> None:
        soon = [indices for batch in batches if (indices := self._epoch.ahead(batch)) is not None]
        if soon:
            reader.will_need(self._rows.at(np.concatenate(soon)))
