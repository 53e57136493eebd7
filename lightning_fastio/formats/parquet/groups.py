"""Row groups of many files as the blocks of one reader."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.blocks import Int64Array
from lightning_fastio.formats.parquet.fields import Field
from lightning_fastio.formats.parquet.files import Files
from lightning_fastio.formats.parquet.filter import passing_rows

MERGE_BYTES = 1 << 20
"""Neighbouring row groups are merged into one block up to this size: decoding one costs 0.2 ms, whatever its size."""

MIN_BLOCKS = 64
"""Row groups are not merged into fewer blocks, so that there is something to shuffle."""

MANY_GROUPS, SMALL_GROUP_ROWS = 1000, 100
"""A warning tells about more row groups than this that hold fewer rows than this on average."""

_log = logging.getLogger("lightning_fastio")


@dataclass(frozen=True)
class Block:
    """Neighbouring row groups of one file that are decoded together."""

    file: int
    groups: list[int]
    rows: Int64Array
    """Number in the file of each row to deliver."""
    positions: Int64Array | None
    """Where these rows stand in the decoded row groups; None when they are all of them."""


class RowGroups:
    """All row groups that hold rows to deliver, and the blocks that they form."""

    def __init__(self, files: Files, fields: Sequence[Field], filters: Any) -> None:
        """Find the rows to deliver and cut them into blocks.

        Args:
            files: Files in the order of their rows.
            fields: What will be decoded, to know how many bytes a row takes.
            filters: Rows to keep; None keeps all.

        Raises:
            ConfigError: The filters do not fit the columns.
        """
        self._kept: Int64Array | None = None
        self._row_starts = [np.cumsum(file.group_rows) - file.group_rows for file in files.files]
        self._group_rows = [file.group_rows for file in files.files]
        if filters is None:
            counts = [np.where(rows > 0, rows, 0) for rows in self._group_rows]
        else:
            counts = [np.zeros_like(rows) for rows in self._group_rows]
            kept = [np.empty(0, np.int64)]
            for file, group, rows in passing_rows(files, filters):
                counts[file][group] = len(rows)
                kept.append(rows + self._row_starts[file][group])
            self._kept = np.concatenate(kept)
        groups = [np.flatnonzero(rows) for rows in counts]
        self._file = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
        self._group = np.concatenate(groups)
        rows_of = np.concatenate([rows[each] for rows, each in zip(counts, groups, strict=True)])
        self.num_rows = int(rows_of.sum())
        self._nbytes = self._decoded_bytes(files, fields, rows_of)
        self._firsts = self._merge()
        self.bounds: Int64Array = np.append(0, np.cumsum(rows_of))[self._firsts]
        self.nbytes: Int64Array = np.diff(np.append(0, np.cumsum(self._nbytes))[self._firsts])

    def __getitem__(self, number: int) -> Block:
        first, stop = self._firsts[number : number + 2].tolist()
        file, groups = int(self._file[first]), self._group[first:stop]
        starts, sizes = self._row_starts[file][groups], self._group_rows[file][groups]
        # Groups without a row to deliver are skipped, so that neighbours in the table need not be neighbours on disk.
        offsets = np.cumsum(sizes) - sizes - starts
        if self._kept is None:
            rows = np.arange(sizes.sum()) - np.repeat(offsets, sizes)
            return Block(file, groups.tolist(), rows, None)
        rows = self._kept[self.bounds[number] : self.bounds[number + 1]]
        group_of_row = np.searchsorted(starts, rows, side="right") - 1
        return Block(file, groups.tolist(), rows, rows + offsets[group_of_row])

    @property
    def num_groups(self) -> int:
        """Row groups that hold rows to deliver."""
        return len(self._group)

    @property
    def kept_digest(self) -> str:
        """A text that changes with the rows that pass the filters; empty without filters."""
        return "" if self._kept is None else blake2b(self._kept.tobytes(), digest_size=8).hexdigest()

    def _merge(self) -> Int64Array:
        """First row group of each block, and the number of row groups; a block lies within one file."""
        limit = min(MERGE_BYTES, int(self._nbytes.sum()) // MIN_BLOCKS)
        firsts, size, file = [], 0, -1
        for number, (group_file, nbytes) in enumerate(zip(self._file.tolist(), self._nbytes.tolist(), strict=True)):
            if group_file != file or size + nbytes > limit:
                firsts.append(number)
                size, file = 0, group_file
            size += nbytes
        return np.array([*firsts, len(self._file)], np.int64)

    def _decoded_bytes(self, files: Files, fields: Sequence[Field], rows_of: Int64Array) -> Int64Array:
        """Bytes of each row group once decoded; of values that vary in length, as the file states them."""
        fixed = sum(field.spec.nbytes for field in fields if field.spec.kind == "tensor")
        varying = [
            column.name
            for field in fields
            for column in field.columns
            if field.spec.kind != "tensor" and column.stored.leaf >= 0
        ]
        nbytes = rows_of * fixed
        if not varying:
            return nbytes
        for number, (index, group) in enumerate(zip(self._file.tolist(), self._group.tolist(), strict=True)):
            file = files.files[index]
            stored = files.chunks(index).num_bytes[group, [file.columns[name].leaf for name in varying]].sum()
            nbytes[number] += 8 * rows_of[number] + stored * rows_of[number] // file.group_rows[group]
        return nbytes

    def check_sizes(self, files: Files, cache_bytes: int) -> None:
        """Tell about row groups that are too large or too small to read well.

        Raises:
            FormatError: A row group does not fit into the memory of this machine.
        """
        largest = int(np.argmax(self._nbytes))
        path, size = files.files[self._file[largest]].path, int(self._nbytes[largest])
        rewrite = f"fastio convert {path} NEW.parquet"
        if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise FormatError(
                f"{path}: row group {self._group[largest]} decodes to {size / 2**30:.1f} GiB, more than the memory of "
                "this machine; write smaller row groups, or select fewer fields"
            )
        if size > cache_bytes // 4:
            _log.warning(
                "%s: row group %d decodes to %d MiB, so that the cache of %d MiB holds few of them to shuffle rows in; "
                "rewrite the file (%s) or raise cache_bytes",
                path, self._group[largest], size >> 20, cache_bytes >> 20, rewrite,
            )  # fmt: skip
        num_groups, num_blocks = len(self._file), len(self.bounds) - 1
        if num_groups > MANY_GROUPS and self.num_rows / num_groups < SMALL_GROUP_ROWS and num_groups > num_blocks:
            _log.warning(
                "%s: %d row groups hold %.0f rows each, and decoding them one by one is slow; neighbours are decoded "
                "together, and rewriting the file is faster still (%s)",
                path, num_groups, self.num_rows / num_groups, rewrite,
            )  # fmt: skip
