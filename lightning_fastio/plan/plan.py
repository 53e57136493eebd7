"""`Plan`: the order of every epoch of a reader, chosen once."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import ConfigError
from lightning_fastio.formats.base import Reader, row_bytes
from lightning_fastio.plan.epoch import Epoch, Leg, Setting
from lightning_fastio.plan.order import (
    BlockShuffle,
    GlobalShuffle,
    Int64Array,
    Order,
    Sequential,
    WeightedSampling,
    Windows,
)
from lightning_fastio.plan.permutation import seed_from
from lightning_fastio.plan.rows import RowSet

Shuffle: TypeAlias = Literal["auto", "global", "block", "none"]
"""Order of training:

- ``global``: a uniform shuffle of all rows;
- ``block``: blocks in random order, rows mixed inside a window of blocks, so that each block decodes once;
- ``none``: the order of the file;
- ``auto``: ``global`` where every row costs the same or all decoded rows fit in the reader's cache, else ``block``.
"""

AHEAD_BYTES = 64 << 20
"""Rows of this many bytes are announced before they are read: enough to keep a disk's queue full."""

_MOST_WINDOW_ROWS = 1 << 22
"""A window is mixed by a table of its rows, which takes tens of milliseconds and megabytes at this size."""


class Plan:
    """Which rows, in which order: a function of seed and epoch, not of workers, processes or global generators."""

    def __init__(
        self,
        reader: Reader,
        rows: RowSet,
        *,
        shuffle: Shuffle = "none",
        seed: int = 0,
        weights: npt.ArrayLike | None = None,
    ) -> None:
        """Choose the order.

        Args:
            reader: Where rows come from.
            rows: The rows to use.
            shuffle: The order, see `Shuffle`.
            seed: Seed of the order.
            weights: One non-negative number for each used row, to draw rows with replacement.

        Raises:
            ConfigError: A shuffle that the format does not have, or weights that do not fit.
        """
        self.rows = rows
        self.seed = seed
        self._row_bytes = row_bytes(reader)
        self._cache_bytes = reader.cache_bytes
        self._blocks = None if reader.blocks is None else rows.blocks(reader.blocks)
        self._weights = _as_weights(weights, len(rows))
        self.shuffle, self.reason = self._choose(shuffle)
        """The order that was chosen, and why."""
        self._last_order: tuple[tuple[int, ...], Order] | None = None

    @property
    def window_rows(self) -> int:
        """Rows that a window of blocks holds.

        Three eighths of the reader's cache: two windows fit, the one that is read and the one that is decoded
        meanwhile, and the rest is for blocks at the seam of two windows, and for rows larger than the schema tells.
        """
        return min(max(1, int(self._cache_bytes * 3 / 8 / self._row_bytes)), _MOST_WINDOW_ROWS)

    @property
    def weights_fingerprint(self) -> str | None:
        """Changes when the weights do."""
        return None if self._weights is None else blake2b(self._weights.tobytes(), digest_size=8).hexdigest()

    @property
    def by_blocks(self) -> bool:
        """Whether each rank reads blocks from their start to their end."""
        return self._blocks is not None and self._weights is None and self.shuffle != "global"

    def epoch(
        self,
        number: int,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pad_last: bool = False,
        repeat: int = 0,
        done: tuple[Leg, ...] = (),
        window_rows: int | None = None,
    ) -> Epoch:
        """One epoch as one rank sees it.

        Args:
            number: Number of the epoch.
            batch_size: Rows of a batch on one rank.
            rank: This rank.
            world_size: Number of ranks.
            drop_last: See `BatchLoader`.
            pad_last: See `BatchLoader`.
            repeat: How many times this epoch was read to its end before.
            done: What of the epoch was read before.
            window_rows: Rows of a window of blocks, where the epoch was begun with another cache than this one.
        """
        setting = Setting("contiguous" if self.by_blocks else "striped", world_size, batch_size, drop_last, pad_last)
        # Windows of blocks were cut for the ranks that the epoch began with.
        num_parts = (done[0].setting.world_size if done else world_size) if self.by_blocks else 1
        order = self._order(number, repeat, num_parts, window_rows or self.window_rows)
        return Epoch(order, setting, rank, done)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last_order": None}

    def _order(self, *wanted: int) -> Order:
        if self._last_order is None or self._last_order[0] != wanted:
            self._last_order = wanted, self._make_order(*wanted)
        return self._last_order[1]

    def _make_order(self, number: int, repeat: int, num_parts: int, window_rows: int) -> Order:
        key = seed_from(self.seed, number, repeat)
        size = len(self.rows)
        if self._weights is not None:
            return WeightedSampling(self._weights, size, key)
        if self.shuffle == "global":
            return GlobalShuffle(size, key)
        if self._blocks is None:
            return Sequential(size)
        if self.shuffle == "block":
            return BlockShuffle(self._blocks, key, window_rows=window_rows, num_parts=num_parts)
        window_rows = min(window_rows, max(1, int(AHEAD_BYTES / self._row_bytes)))
        windows = Windows(self._blocks, window_rows=window_rows, num_parts=num_parts, index_at=_identity)
        return Sequential(size, windows)

    def _choose(self, shuffle: Shuffle) -> tuple[Shuffle, str]:
        if shuffle not in ("auto", "global", "block", "none"):
            raise ConfigError(
                f"shuffle={shuffle!r}: expected 'auto', 'global', 'block' or 'none' ('auto' is what True would mean)"
            )
        if shuffle == "block" and self._blocks is None:
            raise ConfigError(
                "shuffle='block' needs a format that decodes in blocks, but here every row costs the same: use 'global'"
            )
        if shuffle != "auto":
            return shuffle, "it was asked for"
        if self._blocks is None:
            return "global", "every row costs the same"
        cache = f"three eighths of the cache of {self._cache_bytes >> 20} MiB"
        if len(self.rows) <= self.window_rows:
            return "global", f"the decoded rows fit in {cache}"
        return "block", (
            f"rows decode in {len(self._blocks) - 1:,} blocks that do not fit in {cache}; rows mix inside windows of "
            f"{self.window_rows:,} rows"
        )


def class_imbalance(order: Order, batch_size: int, *, num_classes: int = 10, num_batches: int = 200) -> float:
    """How far the batches of an order are from holding every class equally, if the rows were sorted by class.

    The mean total variation distance between a batch and the whole: 0 is perfect, and a uniform shuffle has about
    ``sqrt(num_classes / (2 pi batch_size))``, since batches are small. Sorted rows are the worst case for a block
    shuffle: a window of ``n`` blocks is as good as a uniform batch of ``n`` rows, and a batch out of it a little less.

    Args:
        order: The order to judge.
        batch_size: Rows of a batch.
        num_classes: Number of equally large classes.
        num_batches: Batches to look at, evenly spread over the epoch.
    """
    last_start = max(0, order.size - batch_size)
    distances = []
    for start in np.linspace(0, last_start, min(num_batches, last_start // batch_size + 1), dtype=np.int64):
        indices = order.take(int(start), min(int(start) + batch_size, order.size))
        share = np.bincount(indices * num_classes // order.size, minlength=num_classes) / len(indices)
        distances.append(np.abs(share - 1 / num_classes).sum() / 2)
    return float(np.mean(distances))


def _as_weights(weights: npt.ArrayLike | None, num_rows: int) -> npt.NDArray[np.float64] | None:
    if weights is None:
        return None
    array = np.asarray(weights, np.float64)
    if array.shape != (num_rows,):
        raise ConfigError(f"weights has shape {array.shape}; expected one number for each of the {num_rows} used rows")
    if not np.isfinite(array).all() or (array < 0).any() or not array.any():
        raise ConfigError("weights must be finite, not negative, and not all zero")
    scaled: npt.NDArray[np.float64] = array / array.max()
    return scaled


def _identity(positions: Int64Array) -> Int64Array:
    return positions
