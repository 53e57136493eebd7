"""HDF5 files laid out to be read fast: chunked along the first axis only, whole chunks written once.

Numbers lie in unfiltered chunks of about a megabyte, which are read from a memory map; ``compression`` trades that for
size. Text is variable-length UTF-8; rows of varying length and bytes are variable-length arrays. One root attribute
keeps the order of the fields and the metadata, so that any HDF5 tool can read the rest.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import ConfigError, MissingDependencyError, SchemaError
from lightning_fastio.formats.hdf5.types import KIND_ATTRIBUTE, LENGTH_ATTRIBUTE, SHAPE_ATTRIBUTE
from lightning_fastio.formats.writing import Column, FileWriter

FILE_ATTRIBUTE = "fastio"
"""Root attribute with a JSON object: ``fields`` in their order, and ``metadata``."""

BLOCK_BYTES = 1 << 20
"""Size of a chunk by default: a megabyte decodes in about a millisecond."""

SHORTEST_BLOCK_ROWS = 1024
"""Rows that wait before a field of varying length is written."""


class HDF5Writer(FileWriter):
    """Appends rows to an HDF5 file; see `Writer`."""

    def __init__(
        self,
        path: str | Path,
        *,
        metadata: Mapping[str, str] | None = None,
        compression: str | Mapping[str, Any] | None = None,
        rows_per_block: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Begin a file beside the target.

        Args:
            path: File to write; an older one is replaced when this one is whole.
            metadata: Text to store with the data.
            compression: ``gzip`` or ``lzf``, with bytes shuffled first; ``zstd``, ``lz4`` or ``blosc`` through
                hdf5plugin; or keyword arguments of h5py's ``create_dataset``. None is the fastest to read.
            rows_per_block: Rows of a chunk; by default as many as fit in ``block_bytes``.
            block_bytes: Bytes of a chunk before compression.

        Raises:
            ConfigError: A compression is unknown, or a size is not positive.
            MissingDependencyError: A compression needs hdf5plugin.
        """
        if block_bytes < 1 or (rows_per_block is not None and rows_per_block < 1):
            raise ConfigError(f"rows_per_block={rows_per_block} and block_bytes={block_bytes} must be at least 1")
        super().__init__(path)
        self._metadata = {str(name): str(value) for name, value in (metadata or {}).items()}
        self._filters = filter_arguments(compression)
        self._rows_per_block, self._block_bytes = rows_per_block, block_bytes
        self._handles = ExitStack()
        self._datasets: dict[str, _Dataset] = {}

    def _refusal(self, name: str, column: Column) -> str | None:
        return "HDF5 has no bfloat16: write value.float() or value.half()" if column.dtype == "bfloat16" else None

    def _begin(self, rows: Mapping[str, Any]) -> None:
        self._stream = self._handles.enter_context(_Stream(self._target.partial, "w+"))
        self._file = self._handles.enter_context(h5py.File(self._stream, "w"))
        for name, column in self._columns.items():
            self._datasets[name] = _Dataset(self._file, name, column, self._chunk_rows(column), self._filters)

    def _append(self, rows: Mapping[str, Any]) -> None:
        for name, values in rows.items():
            self._datasets[name].append(values)
        self._stream.check()

    def _finish(self) -> Path:
        for dataset in self._datasets.values():
            dataset.finish()
        about = {"fields": list(self._columns), "metadata": self._metadata}
        self._file.attrs[FILE_ATTRIBUTE] = json.dumps(about)
        self._release()
        self._stream.check()
        return self._target.partial

    def _release(self) -> None:
        # A dataset that is still open would write what it holds after the file is gone.
        self._datasets.clear()
        self._handles.close()

    def _chunk_rows(self, column: Column) -> int:
        if self._rows_per_block is not None:
            return self._rows_per_block
        if column.kind != "tensor":
            return SHORTEST_BLOCK_ROWS
        return max(1, self._block_bytes // max(1, np.dtype(column.dtype).itemsize * prod(column.shape)))


class _Stream(io.FileIO):
    """The file below HDF5, in which no write fails: the library crashes at the end of the process after one that did.

    The first error is kept until `check`.
    """

    _error: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        num_bytes = len(rest)
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._error = self._error or error
        return num_bytes

    def truncate(self, size: int | None = None, /) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def check(self) -> None:
        """Raise the error of the first write that failed."""
        if self._error is not None:
            raise self._error


class _Dataset:
    """The dataset of one field, written in whole chunks; what does not fill one waits."""

    def __init__(self, file: h5py.File, name: str, column: Column, chunk_rows: int, filters: Mapping[str, Any]) -> None:
        self._file, self._name, self._column, self._chunk_rows = file, name, column, chunk_rows
        self._filters = filters if column.kind == "tensor" else {}
        self._waiting: list[Any] = []
        self._num_waiting = 0
        self._dataset: Any = None
        self._lengths: set[int] = set()

    def append(self, rows: Any) -> None:
        if self._column.kind == "ragged" and len(self._lengths) < 2:
            self._lengths.update(map(len, rows))
        to_fill = -self._num_waiting % self._chunk_rows
        if len(rows) >= to_fill:
            end = len(rows) - (len(rows) - to_fill) % self._chunk_rows
            self._flush(rows[:to_fill])
            self._write(rows[to_fill:end])
            rows = rows[end:]
        self._waiting.append(self._private(rows))
        self._num_waiting += len(rows)

    def finish(self) -> None:
        if self._dataset is None:
            self._chunk_rows = min(self._chunk_rows, max(1, self._num_waiting))
            self._dataset = self._create()
        self._flush()
        if len(self._lengths) == 1:
            self._dataset.attrs[LENGTH_ATTRIBUTE] = next(iter(self._lengths))

    def _flush(self, last: Any = ()) -> None:
        """Write what waits, and some rows after it."""
        pieces = [piece for piece in (*self._waiting, last) if len(piece)]
        self._waiting, self._num_waiting = [], 0
        if pieces:
            is_array = self._column.kind == "tensor"
            self._write(np.concatenate(pieces) if is_array else [row for piece in pieces for row in piece])

    def _write(self, rows: Any) -> None:
        if not len(rows):
            return
        if self._dataset is None:
            self._dataset = self._create()
        start = len(self._dataset)
        self._dataset.resize(start + len(rows), axis=0)
        if prod(self._column.shape) or self._column.kind != "tensor":
            try:
                self._dataset.write_direct(self._storable(rows), dest_sel=np.s_[start:])
            except (ValueError, TypeError) as error:
                raise SchemaError(
                    f"field {self._name!r}, rows from {start}: HDF5 cannot store them: {error}"
                ) from error

    def _private(self, rows: Any) -> Any:
        """Rows that the caller cannot overwrite."""
        if self._column.kind == "tensor":
            return rows.copy()
        return [row.copy() for row in rows] if self._column.kind == "ragged" else list(rows)

    def _storable(self, rows: Any) -> npt.NDArray[Any]:
        if self._column.kind == "tensor":
            return np.ascontiguousarray(rows)
        out = np.empty(len(rows), self._dataset.dtype)
        for position, row in enumerate(rows):
            out[position] = row if self._column.kind == "string" else self._elements(row)
        return out

    def _elements(self, row: Any) -> npt.NDArray[Any]:
        if self._column.kind == "bytes":
            return np.frombuffer(row, np.uint8)
        return np.ascontiguousarray(row).reshape(-1)

    def _create(self) -> Any:
        column = self._column
        inner = column.shape if column.kind == "tensor" else ()
        dtype: Any = np.dtype(column.dtype)
        if column.kind == "string":
            dtype = h5py.string_dtype()
        elif column.kind != "tensor":
            dtype = h5py.vlen_dtype(dtype)
        # HDF5 has no chunks of an axis without length, unless that may grow.
        maxshape = (None, *(length or None for length in inner))
        chunks = (self._chunk_rows, *(max(1, length) for length in inner))
        try:
            dataset = self._file.create_dataset(
                self._name, (0, *inner), dtype, chunks=chunks, maxshape=maxshape, **self._filters
            )
        except (ValueError, TypeError) as error:
            raise SchemaError(f"field {self._name!r} cannot be stored in HDF5: {error}") from error
        if column.kind == "bytes":
            dataset.attrs[KIND_ATTRIBUTE] = "bytes"
        elif column.kind == "ragged" and column.shape:
            dataset.attrs[SHAPE_ATTRIBUTE] = column.shape
        return dataset


def filter_arguments(compression: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of h5py's ``create_dataset`` for a compression.

    Raises:
        ConfigError: It is unknown.
        MissingDependencyError: It needs hdf5plugin.
    """
    if compression is None:
        return {}
    if not isinstance(compression, str):
        return dict(compression)
    if compression in ("gzip", "lzf"):
        return {"compression": compression, "shuffle": True}
    plugins = {"zstd": "Zstd", "lz4": "LZ4", "blosc": "Blosc"}
    if compression not in plugins:
        raise ConfigError(f"compression={compression!r} is unknown; use gzip, lzf, {', '.join(plugins)} or None")
    try:
        import hdf5plugin
    except ImportError as error:
        raise MissingDependencyError(f"compression={compression!r} needs: pip install hdf5plugin") from error
    return {"compression": getattr(hdf5plugin, plugins[compression])(), "shuffle": compression != "blosc"}
