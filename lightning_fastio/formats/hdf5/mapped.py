"""Unfiltered HDF5 datasets: rows copied out of the memory-mapped file, without the library.

A contiguous dataset is a mapped array. In a chunked one whose chunks are cut along the first axis only, a row is still
one run of bytes, at an offset that follows from the place of its chunk.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.hdf5.chunks import ChunkIndex
from lightning_fastio.formats.hdf5.types import Element, is_as_delivered
from lightning_fastio.formats.mapped import MappedArray, MappedFile, as_items, copy_items, sample
from lightning_fastio.formats.pages import address_of, announce
from lightning_fastio.schema import Batch, FieldSpec

Int64Array = npt.NDArray[np.int64]


class ContiguousDataset:
    """Rows, or windows of rows, of a dataset that lies in one piece."""

    bounds = None

    def __init__(
        self,
        name: str,
        element: Element,
        mapped: MappedFile,
        offset: int,
        num_rows: int,
        *,
        window: int | None = None,
        stride: int | None = None,
    ) -> None:
        """Set up.

        Args:
            name: Field name.
            element: What a stored row becomes.
            mapped: The mapped file.
            offset: Where the first row begins in it.
            num_rows: Number of stored rows.
            window: Stored rows of one delivered row; by default each is one.
            stride: Stored rows from the start of a window to the start of the next.

        Raises:
            FormatError: A row is too large.
        """
        shape = (num_rows, *element.spec.shape)
        self._array = MappedArray(mapped, offset, element.stored, shape, window=window, stride=stride)
        self._name = name
        self.fields: dict[str, FieldSpec] = {name: replace(element.spec, shape=self._array.row_shape)}
        self.num_rows = self._array.num_rows
        self.num_bytes = num_rows * element.spec.nbytes

    @property
    def array(self) -> MappedArray:
        """The rows as they lie in the file."""
        return self._array

    def read(self, rows: Int64Array, out: Batch, positions: Int64Array | None = None) -> Batch:
        """Rows into the buffer in ``out``; see `Source.read`."""
        self._array.read(rows, out[self._name].numpy(), positions)  # type: ignore[union-attr]
        return {self._name: out[self._name]}

    def announce(self, rows: Int64Array) -> None:
        """Start the I/O of rows."""
        self._array.will_need(rows)

    def close(self) -> None:
        """Give the map back."""
        self._array.close()


class MappedChunks:
    """Rows of a dataset in unfiltered chunks that hold whole rows."""

    bounds = None

    def __init__(
        self, name: str, element: Element, mapped: MappedFile, index: ChunkIndex, fill: npt.NDArray[Any]
    ) -> None:
        """Set up.

        Args:
            name: Field name.
            element: What a stored row becomes.
            mapped: The mapped file.
            index: Where the chunks lie in it.
            fill: The stored value of elements that were never written.
        """
        self.fields: dict[str, FieldSpec] = {name: element.spec}
        self.num_rows = index.shape[0]
        self.num_bytes = self.num_rows * element.spec.nbytes
        self._name, self._element, self._mapped, self._fill = name, element, mapped, fill
        self._starts = index.offsets[:, 0]
        self._has_gaps = bool((self._starts < 0).any())
        self._rows_per_chunk = index.chunk[0]
        self._row_bytes = element.stored.itemsize * prod(element.spec.shape)
        self._is_as_stored = is_as_delivered(element.stored, element.spec)

    def read(self, rows: Int64Array, out: Batch, positions: Int64Array | None = None) -> Batch:
        """Rows into the buffer in ``out``; see `Source.read`."""
        target: npt.NDArray[Any] = out[self._name].numpy()  # type: ignore[union-attr]
        if target.size == 0 or len(rows) == 0:
            return {self._name: out[self._name]}
        if self._is_as_stored:
            self._gather(rows, target, positions)
            return {self._name: out[self._name]}
        raw = np.empty((len(rows), *self._element.spec.shape), self._element.stored)
        self._gather(rows, raw)
        try:
            target[slice(None) if positions is None else positions] = self._element.deliver(raw, rows)
        except FormatError as error:
            raise FormatError(f"{self._mapped.path}: field {self._name!r}, {error}") from error
        return {self._name: out[self._name]}

    def announce(self, rows: Int64Array) -> None:
        """Start the I/O of rows."""
        offsets = self._offsets_of(rows)
        offsets = offsets[offsets >= 0]
        if len(offsets) and self._row_bytes and not self._mapped.has_in_memory(sample(offsets)):
            announce(address_of(self._mapped.view()) + offsets, self._row_bytes)

    def close(self) -> None:
        """Give the map back."""
        self._mapped.close()

    def _gather(self, rows: Int64Array, out: npt.NDArray[Any], positions: Int64Array | None = None) -> None:
        """Stored rows into an array, the fill value where nothing was written."""
        offsets = self._offsets_of(rows)
        if not self._has_gaps:
            self._copy(offsets, out, positions)
            return
        places = np.arange(len(rows)) if positions is None else positions
        is_stored = offsets >= 0
        out[places[~is_stored]] = self._fill
        self._copy(offsets[is_stored], out, places[is_stored])

    def _copy(self, offsets: Int64Array, out: npt.NDArray[Any], positions: Int64Array | None = None) -> None:
        view = self._mapped.view()
        # An item of one row's bytes at every offset in the file; they overlap.
        num_items = len(view) - self._row_bytes + 1
        items = np.ndarray((num_items,), f"V{self._row_bytes}", view, 0, (1,))
        copy_items(items, offsets, as_items(out), positions)

    def _offsets_of(self, rows: Int64Array) -> Int64Array:
        """Where each row begins in the file; -1 if it was never written."""
        chunks, within = np.divmod(rows, self._rows_per_chunk)
        starts = self._starts[chunks]
        offsets: Int64Array = np.where(starts < 0, -1, starts + within * self._row_bytes)
        return offsets
