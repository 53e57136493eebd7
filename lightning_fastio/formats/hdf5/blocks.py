"""HDF5 datasets that are read in blocks: filtered chunks, and everything that only the library can read.

A block is a run of rows: some whole bands of chunks, or about a megabyte where nothing is chunked. It decodes into
arrays of the delivered types, once for all fields that the dataset gives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import CorruptFileError, FormatError
from lightning_fastio.formats.blocks import BlockCache, copy_rows, split_evenly
from lightning_fastio.formats.hdf5.chunks import ChunkIndex, decode_chunk, decoders_for, read_exactly
from lightning_fastio.formats.hdf5.library import H5File
from lightning_fastio.formats.hdf5.types import Element
from lightning_fastio.schema import Batch, FieldSpec

Int64Array: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = "dict[str, npt.NDArray[Any] | list[Any]]"
"""Field name to the delivered rows of one block."""

BLOCK_BYTES = 256 << 10
"""Chunks are joined to blocks of at least this size, so that small chunks cost no Python for each."""

LIBRARY_BLOCK_BYTES = 1 << 20
"""Rows that are read at once where nothing is chunked."""

LONG_ROW_BYTES = 4 << 10
"""Rows of this size that decode alone are blocks of their own, so that any order of rows costs the same."""

SMALL_BYTES = 4 << 20
"""A dataset up to this size, such as labels, is one block: read once, and kept."""


def rows_per_block(num_rows: int, row_bytes: int, band_rows: int | None) -> int:
    """Rows of the blocks of a dataset.

    Args:
        num_rows: Rows of the dataset.
        row_bytes: Decoded bytes of a row.
        band_rows: Rows that decode together, such as those of a chunk; None where nothing is chunked.
    """
    row_bytes = max(1, row_bytes)
    if num_rows * row_bytes <= SMALL_BYTES:
        return max(1, num_rows)
    if band_rows is None:
        return max(1, LIBRARY_BLOCK_BYTES // row_bytes)
    if band_rows == 1 and row_bytes >= LONG_ROW_BYTES:
        return 1
    return band_rows * max(1, BLOCK_BYTES // (band_rows * row_bytes))


class LibraryRows:
    """Runs of rows as h5py reads them: right for every layout and filter, one thread at a time."""

    def __init__(self, file: H5File, path: str) -> None:
        self.file = file
        self.path = path

    def __call__(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Stored values of rows ``start`` to ``stop - 1``."""
        with self.file.use_dataset(self.path) as dataset:
            values: npt.NDArray[Any] = dataset[start:stop]
        return values


class ChunkRows:
    """Runs of rows out of raw chunks, read and decoded outside the library."""

    def __init__(self, file: H5File, path: str, index: ChunkIndex, fill: npt.NDArray[Any]) -> None:
        self.file = file
        self._path = path
        self._index = index
        self._fill = fill
        self._start_decoders()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_decoders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_decoders()

    def _start_decoders(self) -> None:
        self._decoders = decoders_for(self._index.filters) or []

    def __call__(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Stored values of rows ``start`` to ``stop - 1``; ``start`` begins a band of chunks."""
        index, file = self._index, self.file
        bands = range(start // index.chunk[0], -(-stop // index.chunk[0]))
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file.check_unchanged(os.fstat(descriptor))
            is_one_chunk = index.covers_sample and stop - start == index.chunk[0]
            if is_one_chunk and index.offsets[bands[0], 0] >= 0:
                return self._chunk(descriptor, bands[0], 0)
            out = np.empty((stop - start, *index.shape[1:]), index.dtype)
            for band in bands:
                for position in range(index.offsets.shape[1]):
                    self._copy_chunk(descriptor, band, position, out, start)
        finally:
            os.close(descriptor)
        return out

    def _chunk(self, descriptor: int, band: int, position: int) -> npt.NDArray[Any]:
        index = self._index
        offset, size = int(index.offsets[band, position]), int(index.sizes[band, position])
        try:
            data = read_exactly(descriptor, size, offset)
            data = decode_chunk(data, int(index.masks[band, position]), self._decoders, index.chunk_bytes)
        except CorruptFileError as error:
            raise CorruptFileError(f"the chunk of {size} bytes at byte {offset} is damaged: {error}") from error
        return np.frombuffer(data, index.dtype).reshape(index.chunk)

    def _copy_chunk(self, descriptor: int, band: int, position: int, out: npt.NDArray[Any], first_row: int) -> None:
        index = self._index
        starts = index.starts(band, position)
        inside = tuple(
            slice(0, min(size, whole - at)) for at, size, whole in zip(starts, index.chunk, index.shape, strict=True)
        )
        target = tuple(
            slice(at - shift, at - shift + part.stop)
            for at, part, shift in zip(starts, inside, (first_row, *[0] * (len(starts) - 1)), strict=True)
        )
        if index.offsets[band, position] < 0:
            out[target] = self._fill
            return
        is_partial = any(part.stop < whole for part, whole in zip(inside, index.chunk, strict=True))
        if is_partial and index.sizes[band, position] == index.chunk_bytes and self._decoders:
            # Such a chunk may be stored without its filters although its mask says otherwise.
            with self.file.use_dataset(self._path) as dataset:
                out[target] = dataset[tuple(map(_shifted, inside, starts))]
            return
        out[target] = self._chunk(descriptor, band, position)[inside]


def _shifted(part: slice, start: int) -> slice:
    return slice(start, start + part.stop)


class BlockDataset:
    """Rows of the fields of one dataset, in blocks that a cache keeps."""

    def __init__(
        self,
        path: str,
        elements: Mapping[str, Element],
        read_rows: LibraryRows | ChunkRows,
        num_rows: int,
        block_rows: int,
        row_bytes: int,
        cache: BlockCache[tuple[BlockDataset, int], Values],
    ) -> None:
        """Set up.

        Args:
            path: Path of the dataset in its file.
            elements: Field name to what the rows become.
            read_rows: Reads the stored values of a run of rows.
            num_rows: Rows of the dataset.
            block_rows: Rows of a block; the last one may have fewer.
            row_bytes: Decoded bytes of a row, estimated where rows vary in length.
            cache: Keeps blocks; shared with other datasets.
        """
        self.fields: dict[str, FieldSpec] = {name: element.spec for name, element in elements.items()}
        self.num_rows = num_rows
        self.num_bytes = self.num_rows * row_bytes
        self._block_rows = block_rows
        self._path, self._elements, self._read_rows = path, dict(elements), read_rows
        self._row_bytes, self._cache = row_bytes, cache

    @property
    def bounds(self) -> Int64Array | None:
        """Row boundaries of the blocks; None where each row is one, so that every row costs the same."""
        if self._block_rows == 1 < self.num_rows:
            return None
        return np.append(np.arange(0, self.num_rows, self._block_rows, dtype=np.int64), self.num_rows)

    def block_bytes(self, block: int) -> int:
        """Bytes of a decoded block, estimated where rows vary in length."""
        return len(self._rows_of(block)) * self._row_bytes

    def decode(self, block: int) -> Values:
        """The delivered rows of one block."""
        rows = self._rows_of(block)
        where = f"{self._read_rows.file.path}: dataset {self._path!r}, rows {rows.start} to {rows.stop - 1}"
        try:
            stored = self._read_rows(rows.start, rows.stop)
            return {name: element.deliver(stored, rows) for name, element in self._elements.items()}
        except CorruptFileError as error:
            raise CorruptFileError(f"{where}: {error}") from error
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        except FileNotFoundError as error:
            raise CorruptFileError(f"{where}: the file is gone since its reader was opened") from error

    def read(self, rows: Int64Array, out: Batch, positions: Int64Array | None = None) -> Batch:
        """Rows into the buffers in ``out``, and as new lists for fields without; see `Source.read`."""
        batch: dict[str, Any] = {name: out.get(name, [None] * len(rows)) for name in self.fields}
        arrays = {name: target.numpy() for name, target in batch.items() if isinstance(target, torch.Tensor)}
        parts = {(self, part.block): part for part in split_evenly(rows, self._block_rows)}
        for key, values in self._cache.read([(key, len(part.rows)) for key, part in parts.items()]):
            part = parts[key]
            places = part.positions if positions is None else positions[part.positions]
            for name, target in batch.items():
                if name in arrays:
                    copy_rows(values[name], part.rows, arrays[name], places)  # type: ignore[arg-type]
                else:
                    _copy_values(values[name], part.rows, target, places)
        return batch

    def announce(self, rows: Int64Array) -> None:
        """Decode the blocks of rows ahead."""
        self._cache.announce([((self, part.block), len(part.rows)) for part in split_evenly(rows, self._block_rows)])

    def close(self) -> None:
        """Forget decoded blocks."""
        self._cache.close()

    def _rows_of(self, block: int) -> range:
        return range(block * self._block_rows, min((block + 1) * self._block_rows, self.num_rows))


def _copy_values(source: Any, rows: Int64Array, out: list[Any], positions: Int64Array) -> None:
    """``out[position] = source[row]``, arrays as tensors that nothing else refers to."""
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        value = source[row]
        out[position] = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def make_cache(max_bytes: int) -> BlockCache[tuple[BlockDataset, int], Values]:
    """A cache that any number of datasets share."""
    return BlockCache(_decode, _size_of, max_bytes=max_bytes)


def _decode(key: tuple[BlockDataset, int]) -> Values:
    return key[0].decode(key[1])


def _size_of(key: tuple[BlockDataset, int]) -> int:
    return key[0].block_bytes(key[1])
