"""Unfiltered HDF5 datasets: rows copied out of the memory-mapped file, without the library.

A row is a run of bytes at an address that follows from its number: in a contiguous dataset always, in a chunked one
where chunks are cut along the first axis only.
"""

from __future__ import annotations

import mmap
import os
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import CorruptFileError
from lightning_fastio.formats.hdf5_chunks import ChunkIndex
from lightning_fastio.formats.hdf5_library import H5File
from lightning_fastio.formats.hdf5_types import Element, deliver_into, numpy_dtype
from lightning_fastio.schema import Batch, FieldSpec

Int64Array = npt.NDArray[np.int64]

LONG_ROW_BYTES = 2048
"""Rows from this size on are copied one by one, which needs no temporary; shorter ones by one fancy index."""

MAX_HINTS = 1024
"""Ranges that one announcement asks the kernel to read."""


class FileMap:
    """Bytes of a file by address, mapped read-only once in each process. Picklable."""

    def __init__(self, file: H5File) -> None:
        self.file = file
        self._maps: dict[int, mmap.mmap] = {}

    def __getstate__(self) -> H5File:
        return self.file

    def __setstate__(self, file: H5File) -> None:
        self.file, self._maps = file, {}

    def gather(self, addresses: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """Copy one run of bytes for each address.

        Args:
            addresses: Where runs begin, shape ``(num_rows,)``; -1 leaves the row of ``out`` as it is.
            out: Contiguous, shape ``(num_rows, row_bytes)``.

        Raises:
            CorruptFileError: The file is shorter than it was. A file that is cut short in the very moment of copying
                ends the process with SIGBUS, as it does with every memory map.
        """
        data = np.frombuffer(self._map(), np.uint8)
        row_bytes = out.shape[1]
        if row_bytes >= LONG_ROW_BYTES:
            for row, address in zip(out, addresses.tolist(), strict=True):
                if address >= 0:
                    row[...] = data[address : address + row_bytes]
            return
        runs = np.lib.stride_tricks.as_strided(data, (len(data) - row_bytes + 1, row_bytes), (1, 1), writeable=False)
        is_stored = addresses >= 0
        if is_stored.all():
            out[...] = runs[addresses]
        else:
            out[is_stored] = runs[addresses[is_stored]]

    def will_need(self, addresses: Int64Array, row_bytes: int) -> None:
        """Ask the kernel to read runs of bytes into its cache; neighbours become one request."""
        starts = np.unique(addresses[addresses >= 0])
        if not len(starts):
            return
        page = mmap.PAGESIZE
        first, last = starts // page, (starts + row_bytes - 1) // page
        cuts = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
        begins, ends = first[np.concatenate([[0], cuts])], last[np.concatenate([cuts - 1, [len(last) - 1]])]
        mapped = self._map()
        for begin, end in zip(begins[:MAX_HINTS].tolist(), ends[:MAX_HINTS].tolist(), strict=True):
            mapped.madvise(mmap.MADV_WILLNEED, begin * page, min((end + 1) * page, len(mapped)) - begin * page)

    def close(self) -> None:
        """Give the map back; it goes when the last copy under way is done."""
        self._maps.clear()

    def _map(self) -> mmap.mmap:
        mapped = self._maps.get(os.getpid())
        if mapped is None:
            with open(self.file.path, "rb") as file:
                self.file.check_unchanged(os.fstat(file.fileno()))
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.madvise(mmap.MADV_RANDOM)
            self._maps[os.getpid()] = mapped
        elif mapped.size() < self.file.size:  # The map keeps a descriptor of the file that it was made from.
            raise CorruptFileError(f"{self.file.path}: the file was cut short to {mapped.size()} bytes while in use")
        return mapped


class Addresses(Protocol):
    """From row numbers to byte addresses."""

    def __call__(self, rows: Int64Array) -> Int64Array:
        """Addresses of checked row numbers; -1 where nothing was ever written."""
        ...


class ContiguousAddresses:
    """Rows one after the other, or windows of them at a constant step."""

    def __init__(self, offset: int, step_bytes: int) -> None:
        self._offset, self._step_bytes = offset, step_bytes

    def __call__(self, rows: Int64Array) -> Int64Array:
        return rows * self._step_bytes + self._offset


class ChunkedAddresses:
    """Rows in chunks that hold whole rows."""

    def __init__(self, index: ChunkIndex) -> None:
        self._offsets = index.offsets[:, 0]
        self._rows_per_chunk = index.chunk[0]
        self._row_bytes = index.chunk_bytes // index.chunk[0]

    def __call__(self, rows: Int64Array) -> Int64Array:
        chunk = rows // self._rows_per_chunk
        offsets = self._offsets[chunk]
        return np.where(offsets < 0, -1, offsets + (rows - chunk * self._rows_per_chunk) * self._row_bytes)


class MappedDataset:
    """Rows of one dataset out of the map of its file."""

    bounds = None

    def __init__(
        self,
        name: str,
        file_map: FileMap,
        element: Element,
        num_rows: int,
        addresses: Addresses,
        *,
        fill: npt.NDArray[Any] | None = None,
    ) -> None:
        """Set up.

        Args:
            name: Field name.
            file_map: The mapped file.
            element: What a row becomes.
            num_rows: Number of rows.
            addresses: Where each row begins.
            fill: The stored value of elements that were never written.
        """
        self.fields: dict[str, FieldSpec] = {name: element.spec}
        self.num_rows = num_rows
        self._name, self._map, self._element, self._addresses, self._fill = name, file_map, element, addresses, fill
        self._row_bytes = element.stored.itemsize * prod(element.spec.shape)
        self._delivered = numpy_dtype(element.spec)
        self._is_as_stored = element.stored == self._delivered and self._delivered.kind != "b"

    def read(self, rows: Int64Array, out: Batch) -> Batch:
        """Rows into the buffer in ``out``."""
        target = out[self._name].numpy()  # type: ignore[union-attr]
        if self._row_bytes == 0 or len(rows) == 0:
            return {self._name: out[self._name]}
        raw = target if self._is_as_stored else np.empty((len(rows), *self._element.spec.shape), self._element.stored)
        addresses = self._addresses(rows)
        if self._fill is not None:
            raw[addresses < 0] = self._fill
        self._map.gather(addresses, raw.view(np.uint8).reshape(len(rows), self._row_bytes))
        if not self._is_as_stored:
            deliver_into(raw, target)
        return {self._name: out[self._name]}

    def announce(self, rows: Int64Array) -> None:
        """Start the I/O of rows."""
        self._map.will_need(self._addresses(rows), self._row_bytes)

    def close(self) -> None:
        """Give the map back."""
        self._map.close()
