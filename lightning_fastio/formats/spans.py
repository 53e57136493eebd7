"""Rows of many mapped arrays, copied in one go however many files they lie in.

All maps lie in the address space of the process. What is between them is never touched, so that a row is an item at an
address, and a batch out of a thousand shards is one indexing operation instead of a thousand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import FastIOError
from lightning_fastio.formats.mapped import MappedArray, as_items, copy_items, sample
from lightning_fastio.formats.pages import Int64Array, address_of, announce, items_between

MAX_JOINED_BYTES = 32 << 10
"""Rows up to this size are copied from many files in one go; for larger ones a call for each file costs little."""


class JoinedArrays:
    """Rows of several mapped arrays, one after another. Thread-safe and picklable."""

    def __init__(self, arrays: Sequence[MappedArray]) -> None:
        """Set up.

        Args:
            arrays: Arrays that `can_join`.
        """
        self._arrays = list(arrays)
        self._spans: dict[int, _Spans] = {}

    @staticmethod
    def can_join(arrays: Sequence[MappedArray], dtype: npt.DTypeLike) -> bool:
        """Whether arrays differ in their rows only, and these need no conversion to the delivered type."""
        first = arrays[0]
        return 0 < first.row_bytes <= MAX_JOINED_BYTES and all(
            array.is_plain(np.dtype(dtype)) and array.row_bytes == first.row_bytes for array in arrays
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_spans": {}}

    def read(self, arrays: Int64Array, rows: Int64Array, out: npt.NDArray[Any]) -> None:
        """Copy rows.

        Args:
            arrays: Number of the array of each row.
            rows: Number of the row in it.
            out: Contiguous array of as many rows.

        Raises:
            CorruptFileError: A file is not as it was when it was opened.
        """
        spans = self._mapped()
        for number in np.unique(arrays).tolist():
            self._arrays[number].check()
        if len(rows):
            copy_items(spans.items, spans.starts[arrays] + rows * spans.step_bytes, as_items(out))

    def will_need(self, arrays: Int64Array, rows: Int64Array) -> None:
        """Hint that rows will be read soon; never fails."""
        with suppress(FastIOError, OSError):
            spans = self._mapped()
            if not all(
                self._arrays[number].has_in_memory(row)
                for number, row in zip(sample(arrays).tolist(), sample(rows).tolist(), strict=True)
            ):
                starts = spans.origin + spans.starts[arrays] + rows * spans.step_bytes
                announce(starts, self._arrays[0].row_bytes)

    def close(self) -> None:
        """Let go of all maps."""
        self._spans.pop(os.getpid(), None)

    def _mapped(self) -> _Spans:
        found = self._spans.get(os.getpid())
        if found is None:
            found = self._spans.setdefault(os.getpid(), _Spans.of(self._arrays))
        return found


class _Spans(NamedTuple):
    """Where the rows of several arrays are in the memory of this process."""

    views: list[npt.NDArray[np.void]]
    """Keeps the memory mapped."""
    origin: int
    """Lowest address."""
    starts: Int64Array
    """First row of each array, from there."""
    step_bytes: int
    items: npt.NDArray[np.void]
    """All memory from the lowest address to the highest, as rows that begin at every byte."""

    @classmethod
    def of(cls, arrays: Sequence[MappedArray]) -> _Spans:
        views = [array.items() for array in arrays]
        addresses = np.array([address_of(view) for view in views])
        step_bytes, row_bytes = views[0].strides[0], views[0].itemsize
        ends = [
            address + (len(view) - 1) * step_bytes + row_bytes for address, view in zip(addresses, views, strict=True)
        ]
        origin = int(addresses.min())
        return cls(views, origin, addresses - origin, step_bytes, items_between(origin, int(max(ends)), row_bytes))
