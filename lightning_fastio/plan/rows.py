"""Which rows of a reader are used: all of them, a chosen part, or one side of a split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import floor
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import ConfigError
from lightning_fastio.plan.order import Int64Array
from lightning_fastio.plan.permutation import Permutation

Part: TypeAlias = Literal["train", "val", "test"]


LISTED_ROWS = 1 << 25
"""Up to this many rows the parts of a split are lists (256 MiB of int64), read in the order of the file. Above, a part
of a random-access source is computed, and stands in random order."""


class RowSet(ABC):
    """Indices ``0`` to ``len - 1`` to row numbers of a reader."""

    fingerprint: str
    """Changes when other rows are chosen."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def at(self, indices: Int64Array) -> Int64Array:
        """Row numbers behind indices."""

    @abstractmethod
    def blocks(self, blocks: Int64Array) -> Int64Array:
        """Borders, in indices, of the blocks whose borders are given in rows; blocks without a chosen row vanish."""


class AllRows(RowSet):
    """Every row, or the first ones."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.fingerprint = f"all {num_rows}"

    def __len__(self) -> int:
        return self._num_rows

    def at(self, indices: Int64Array) -> Int64Array:
        return indices

    def blocks(self, blocks: Int64Array) -> Int64Array:
        return blocks if blocks[-1] == self._num_rows else np.unique(np.minimum(blocks, self._num_rows))


class ChosenRows(RowSet):
    """Some rows, each once, in the order of the file."""

    def __init__(self, rows: npt.ArrayLike, num_rows: int) -> None:
        """Choose rows.

        Args:
            rows: Row numbers (negative ones count from the end), or one bool for each of ``num_rows`` rows.
            num_rows: Rows of the reader.

        Raises:
            ConfigError: A mask of another length, a row out of range or given twice, or not a one-dimensional array.
        """
        chosen = np.asarray(rows)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "biu"):
            raise ConfigError(
                f"rows is an array of {chosen.dtype} with shape {chosen.shape}; expected one dimension of row numbers "
                "or of bool"
            )
        self._rows: Int64Array = _of_mask(chosen, num_rows) if chosen.dtype == bool else _of_numbers(chosen, num_rows)
        digest = blake2b(self._rows.tobytes(), digest_size=8).hexdigest()
        self.fingerprint = f"{len(self._rows)} of {num_rows}: {digest}"

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, indices: Int64Array) -> Int64Array:
        return self._rows[indices]

    def blocks(self, blocks: Int64Array) -> Int64Array:
        return np.unique(np.searchsorted(self._rows, blocks))


def _of_mask(mask: npt.NDArray[Any], num_rows: int) -> Int64Array:
    if len(mask) != num_rows:
        raise ConfigError(f"rows is a mask of {len(mask)} values, but the data has {num_rows} rows")
    return np.flatnonzero(mask)


def _of_numbers(numbers: npt.NDArray[Any], num_rows: int) -> Int64Array:
    outside = numbers[(numbers < -num_rows) | (numbers >= num_rows)] if numbers.size else numbers
    if outside.size:
        raise ConfigError(f"rows holds {outside[0]}, but the data has {num_rows} rows")
    rows = np.sort(numbers.astype(np.int64) % max(num_rows, 1))
    twice = np.flatnonzero(rows[1:] == rows[:-1])
    if twice.size:
        raise ConfigError(f"rows holds {rows[twice[0]]} more than once: draw rows more often with weights=")
    return rows


class PermutedRows(RowSet):
    """A run of positions in a random order of all rows: one side of a split of more rows than a list should hold."""

    def __init__(self, permutation: Permutation, start: int, stop: int, key: int) -> None:
        self._permutation = permutation
        self._start = start
        self._stop = stop
        self.fingerprint = f"{stop - start} of {len(permutation)}: key {key}, from {start}"

    def __len__(self) -> int:
        return self._stop - self._start

    def at(self, indices: Int64Array) -> Int64Array:
        return self._permutation.at(indices + self._start)

    def blocks(self, blocks: Int64Array) -> Int64Array:
        raise ConfigError("a computed split has no blocks; split block data through tables")


@dataclass(frozen=True)
class Split:
    """How rows are divided into train, val and test. The same settings and data always give the same parts."""

    val: int | float = 0
    """Validation part: a fraction below 1, or a number of rows."""
    test: int | float = 0
    """Test part: a fraction below 1, or a number of rows."""
    seed: int = 0
    """Seed of the division; independent of the order of training and of the global seed."""

    def sizes(self, num_rows: int) -> tuple[int, int]:
        """Rows of the val and test parts.

        Raises:
            ConfigError: A part is negative or empty, or nothing would be left to train on.
        """
        sizes = tuple(size if isinstance(size, int) else floor(size * num_rows + 0.5) for size in (self.val, self.test))
        for name, size, wish in zip(("val_split", "test_split"), sizes, (self.val, self.test), strict=True):
            if wish < 0 or (isinstance(wish, float) and wish >= 1):
                raise ConfigError(f"{name}={wish}: expected a fraction from 0 to below 1, or a number of rows")
            if wish and not size:
                raise ConfigError(f"{name}={wish} of {num_rows} rows is no row: ask for a larger part")
        if sum(sizes) >= num_rows:
            raise ConfigError(f"val_split={self.val} and test_split={self.test} leave none of {num_rows} rows to train")
        return sizes[0], sizes[1]

    def rows(
        self,
        part: Part,
        num_rows: int,
        *,
        has_blocks: bool = False,
        groups: npt.NDArray[np.generic] | None = None,
        strata: npt.NDArray[np.generic] | None = None,
    ) -> RowSet:
        """The rows of one part.

        Args:
            part: Which part.
            num_rows: Rows of the reader.
            has_blocks: The reader decodes in blocks, so that rows must be found by block.
            groups: A value for each row; rows with the same value go to the same part, whose size is then met as
                nearly as whole groups allow.
            strata: A value for each row; each part holds every value in the same proportion.
        """
        sizes = self.sizes(num_rows)
        if groups is not None:
            return ChosenRows(self._whole_groups(groups, sizes)[part], num_rows)
        if strata is not None:
            return ChosenRows(self._by_stratum(strata, sizes)[part], num_rows)
        permutation = Permutation(num_rows, self.seed)
        start, stop = _run(part, sizes, num_rows)
        if num_rows > LISTED_ROWS and not has_blocks:
            return PermutedRows(permutation, start, stop, self.seed)
        # Only the parts that are set apart are computed, however many rows are left to train on.
        mask = np.full(num_rows, part == "train")
        mask[permutation.take(0, sum(sizes)) if part == "train" else permutation.take(start, stop)] = part != "train"
        return ChosenRows(mask, num_rows)

    def _whole_groups(self, groups: npt.NDArray[np.generic], sizes: tuple[int, int]) -> dict[Part, Int64Array]:
        names, group_of_row, counts = np.unique(groups, return_inverse=True, return_counts=True)
        wanted = [size for size in sizes if size]
        if len(names) <= len(wanted):
            raise ConfigError(f"split_by has {len(names)} different values, too few for {len(wanted) + 1} parts")
        part_of_group = np.full(len(names), _PARTS.index("train"))
        free = list(Permutation(len(names), self.seed).take(0, len(names)))
        for number, size in enumerate(sizes):
            if size:
                wanted.pop(0)
                taken = _fill(size, free, counts, leave=len(wanted) + 1)
                part_of_group[taken] = number
                free = [group for group in free if part_of_group[group] == _PARTS.index("train")]
        part_of_row = part_of_group[group_of_row.ravel()]
        return {part: np.flatnonzero(part_of_row == code) for code, part in enumerate(_PARTS)}

    def _by_stratum(self, strata: npt.NDArray[np.generic], sizes: tuple[int, int]) -> dict[Part, Int64Array]:
        names, stratum_of_row = np.unique(strata, return_inverse=True)
        num_rows = len(strata)
        # Rows in random order, stably sorted by stratum, then dealt evenly: position p of each stratum belongs to
        # the part in which p lies when the whole line is scaled to the parts' sizes.
        shuffled = Permutation(num_rows, self.seed).take(0, num_rows)
        line = shuffled[np.argsort(stratum_of_row.ravel()[shuffled], kind="stable")]
        spread = np.empty(num_rows, np.int64)
        counts = np.bincount(stratum_of_row.ravel(), minlength=len(names))
        rank_in_stratum = np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts)
        spread[np.argsort((rank_in_stratum + 0.5) / np.repeat(counts, counts), kind="stable")] = np.arange(num_rows)
        runs = {part: _run(part, sizes, num_rows) for part in _PARTS}
        return {part: np.sort(line[(spread >= start) & (spread < stop)]) for part, (start, stop) in runs.items()}


_PARTS: tuple[Part, Part, Part] = ("val", "test", "train")


def _run(part: Part, sizes: Sequence[int], num_rows: int) -> tuple[int, int]:
    """Positions of a part when val comes first, then test, then train."""
    borders = [0, sizes[0], sum(sizes), num_rows]
    number = _PARTS.index(part)
    return borders[number], borders[number + 1]


def _fill(size: int, groups: Sequence[int], counts: Int64Array, *, leave: int) -> list[int]:
    """Groups, in the given order, each of which brings the number of rows nearer to ``size``; one at least."""
    taken: list[int] = []
    rows = 0
    for group in groups:
        if len(taken) < len(groups) - leave and abs(rows + counts[group] - size) < abs(rows - size):
            taken.append(group)
            rows += int(counts[group])
    return taken or [min(groups, key=lambda group: int(counts[group]))]


def balanced_weights(labels: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """A weight for each row that makes every label equally likely."""
    _, label_of_row, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights: npt.NDArray[np.float64] = 1.0 / counts[label_of_row.ravel()]
    return weights
