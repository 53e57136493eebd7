"""Batch numbers to row numbers, and word to the reader of the rows that come soon."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_fastio.formats.base import Reader
from lightning_fastio.plan.epoch import Epoch
from lightning_fastio.plan.order import Int64Array
from lightning_fastio.plan.permutation import seed_from
from lightning_fastio.plan.plan import AHEAD_BYTES
from lightning_fastio.plan.rows import RowSet

_AHEAD_BATCHES = 4, 64
"""Batches that are announced ahead, at least and at most, however large they are."""


class Task(NamedTuple):
    """One batch to fetch."""

    rows: Int64Array
    """Row numbers of the reader."""
    seed: int
    """Seed of the random numbers that transforms may draw for this batch."""


class Tasks:
    """The tasks of one epoch on one rank. May be asked from several threads."""

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
        least, most = _AHEAD_BATCHES
        self._ahead = min(max(least, AHEAD_BYTES // batch_bytes), most)

    def __call__(self, batches: range) -> list[Task]:
        """The tasks of some batches that follow each other."""
        if self._reader is not None:
            self._announce(self._reader, batches)
        epoch = self._epoch
        return [
            Task(self._rows.at(indices), seed_from(*self._seed_keys, epoch.num_past_batches + batch))
            for batch, indices in zip(batches, epoch.indices_of(batches), strict=True)
        ]

    def _announce(self, reader: Reader, batches: range) -> None:
        """Announce each row once: whole windows of blocks, or the batches that are ``ahead`` of these."""
        epoch = self._epoch
        if epoch.by_blocks:
            soon = [indices for batch in batches if (indices := epoch.ahead(batch)) is not None]
        else:
            first = batches.stop if batches.start == epoch.start else batches.start + self._ahead
            later = range(first, min(batches.stop + self._ahead, epoch.num_batches))
            soon = epoch.indices_of(later) if later else []
        if soon:
            reader.will_need(self._rows.at(np.concatenate(soon)))
