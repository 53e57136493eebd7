"""HDF5 files laid out to be read fast: chunked along the first axis only, whole chunks written once.

Numbers lie in unfiltered chunks of about a megabyte, which are read from a memory map; ``compression`` trades that for
size. Text is variable-length UTF-8; rows of varying length and bytes are variable-length arrays. One root attribute
keeps the order of the fields and the metadata, so that any HDF5 tool can read the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self

from lightning_fastio.errors import ConfigError, FileAccessError, MissingDependencyError, SchemaError
from lightning_fastio.formats.base import check_rows_alike
from lightning_fastio.formats.hdf5.types import KIND_ATTRIBUTE, LENGTH_ATTRIBUTE, SHAPE_ATTRIBUTE
from lightning_fastio.formats.target import Target
from lightning_fastio.schema import Kind

FILE_ATTRIBUTE = "fastio"
"""Root attribute with a JSON object: ``fields`` in their order, and ``metadata``."""

BLOCK_BYTES = 1 << 20
"""Size of a chunk by default: a megabyte decodes in about a millisecond."""

SHORTEST_BLOCK_ROWS = 1024
"""Rows that wait before a field of varying length is written."""


class HDF5Writer:
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
        self._target = Target(path)
        self.path = self._target.path
        self._metadata = {str(name): str(value) for name, value in (metadata or {}).items()}
        self._filters = filter_arguments(compression)
        self._rows_per_block, self._block_bytes = rows_per_block, block_bytes
        self._columns: dict[str, _Column] = {}
        self._file: h5py.File | None = None
        self._is_done = False

    def write(self, batch: Mapping[str, Any]) -> None:
        """Append rows; see `Writer.write`.

        Raises:
            SchemaError: Fields differ in length, from the first batch, or cannot be stored.
        """
        if self._is_done:
            raise SchemaError(f"{self.path}: the writer is closed; open a new one")
        values = {name: as_column(name, value) for name, value in batch.items()}
        lengths = {name: len(rows) for name, (_, rows) in values.items()}
        if len(set(lengths.values())) != 1:
            raise SchemaError(f"{self.path}: the fields of a batch have one length, but these have {lengths}")
        if not self._columns:
            self._target.begin()
            try:
                self._file = h5py.File(self._target.partial, "w")
            except OSError as error:
                raise FileAccessError(f"{self.path} cannot be written: {error.strerror or error}") from error
            for name, (kind, rows) in values.items():
                self._columns[name] = _Column(name, kind, rows, self._chunk_rows(kind, rows), self._filters)
        if list(values) != list(self._columns):
            raise SchemaError(f"{self.path}: the first batch had the fields {list(self._columns)}, not {list(values)}")
        for name, (kind, rows) in values.items():
            self._columns[name].check(kind, rows)
        try:
            for name, (_, rows) in values.items():
                self._columns[name].append(self._file, rows)
        except BaseException:
            # Fields of different lengths must not become data, not even if the caller goes on.
            self.abort()
            raise

    def close(self) -> None:
        """Write what is left, sync, and rename into place.

        Raises:
            SchemaError: Nothing was written.
        """
        if self._is_done:
            return
        if self._file is None:
            self._is_done = True
            raise SchemaError(f"{self.path}: nothing was written, so that there is no file to make")
        try:
            for column in self._columns.values():
                column.finish(self._file)
            about = {"fields": list(self._columns), "metadata": self._metadata}
            self._file.attrs[FILE_ATTRIBUTE] = json.dumps(about)
            self._file.close()
            self._target.publish()
        except BaseException:
            self.abort()
            raise
        self._is_done = True

    def abort(self) -> None:
        """Remove what was written."""
        if self._is_done:
            return
        self._is_done = True
        if self._file is not None:
            self._file.close()
            self._target.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.abort()

    def _chunk_rows(self, kind: Kind, rows: Any) -> int:
        if self._rows_per_block is not None:
            return self._rows_per_block
        if kind != "tensor":
            return SHORTEST_BLOCK_ROWS
        row_bytes: int = rows.dtype.itemsize * prod(rows.shape[1:])
        return max(1, self._block_bytes // max(1, row_bytes))


class _Column:
    """One dataset: rows wait until they fill whole chunks."""

    def __init__(self, name: str, kind: Kind, rows: Any, chunk_rows: int, filters: Mapping[str, Any]) -> None:
        self.name, self.kind, self.chunk_rows = name, kind, chunk_rows
        self.dtype, self.shape = _element(kind, rows)
        self._filters = filters if kind == "tensor" else {}
        self._waiting: list[Any] = []
        self._num_waiting = 0
        self._dataset: Any = None
        self._lengths: set[int] = set()

    def check(self, kind: Kind, rows: Any) -> None:
        dtype, shape = _element(kind, rows)
        if kind != self.kind or (len(rows) and (dtype, shape) != (self.dtype, self.shape)):
            raise SchemaError(
                f"field {self.name!r} began as {self.kind} of {self.dtype} {list(self.shape)}, but a later batch has "
                f"{kind} of {dtype} {list(shape)}"
            )

    def append(self, file: h5py.File, rows: Any) -> None:
        if self.kind == "tensor":
            rows = rows.copy()  # The caller may use its buffer again.
        elif self.kind == "ragged" and len(self._lengths) < 2:
            self._lengths.update(map(len, rows))
        self._waiting.append(rows)
        self._num_waiting += len(rows)
        whole = self._num_waiting // self.chunk_rows * self.chunk_rows
        if whole:
            self._write(file, whole)

    def finish(self, file: h5py.File) -> None:
        if self._num_waiting or self._dataset is None:
            self.chunk_rows = min(self.chunk_rows, max(1, self._num_waiting)) if self._dataset is None else 0
            self._write(file, self._num_waiting)
        if len(self._lengths) == 1:
            self._dataset.attrs[LENGTH_ATTRIBUTE] = next(iter(self._lengths))

    def _write(self, file: h5py.File, num_rows: int) -> None:
        waiting = _joined(self.kind, self._waiting)
        rows, rest = waiting[:num_rows], waiting[num_rows:]
        if self._dataset is None:
            self._dataset = self._create(file)
        start = len(self._dataset)
        self._dataset.resize(start + len(rows), axis=0)
        if len(rows) and prod(self.shape):
            try:
                self._dataset.write_direct(self._storable(rows), dest_sel=np.s_[start:])
            except (ValueError, TypeError) as error:
                raise SchemaError(f"field {self.name!r}, rows from {start}: HDF5 cannot store them: {error}") from error
        self._waiting = [rest.copy() if self.kind == "tensor" else rest]
        self._num_waiting = len(rest)

    def _storable(self, rows: Any) -> npt.NDArray[Any]:
        if self.kind == "tensor":
            return np.ascontiguousarray(rows)
        out = np.empty(len(rows), self._dataset.dtype)
        for position, row in enumerate(rows):
            out[position] = row if self.kind == "string" else np.ascontiguousarray(row, self.dtype).reshape(-1)
        return out

    def _create(self, file: h5py.File) -> Any:
        inner = self.shape if self.kind == "tensor" else ()
        dtype: Any = self.dtype
        if self.kind == "string":
            dtype = h5py.string_dtype()
        elif self.kind != "tensor":
            dtype = h5py.vlen_dtype(self.dtype)
        # HDF5 has no chunks of an axis without length, unless that may grow.
        maxshape = (None, *(length or None for length in inner))
        chunks = (self.chunk_rows, *(max(1, length) for length in inner))
        try:
            dataset = file.create_dataset(
                self.name, (0, *inner), dtype, chunks=chunks, maxshape=maxshape, **self._filters
            )
        except (ValueError, TypeError) as error:
            raise SchemaError(f"field {self.name!r} cannot be stored in HDF5: {error}") from error
        if self.kind == "bytes":
            dataset.attrs[KIND_ATTRIBUTE] = "bytes"
        elif self.kind == "ragged" and self.shape:
            dataset.attrs[SHAPE_ATTRIBUTE] = self.shape
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


def as_column(name: str, value: Any) -> tuple[Kind, Any]:
    """A field of a batch as its kind and its rows: an array, or a list of str, bytes or arrays.

    Raises:
        SchemaError: It cannot be stored.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise SchemaError(f"field {name!r} is bfloat16, which HDF5 has not; write value.float() or value.half()")
        return "tensor", value.detach().cpu().numpy()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value):
        if isinstance(value[0], str):
            check_rows_alike(name, value, str)
            return "string", [str(item) for item in value]
        if isinstance(value[0], bytes | bytearray | memoryview):
            check_rows_alike(name, value, bytes, bytearray, memoryview)
            return "bytes", [np.frombuffer(item, np.uint8) for item in value]
        if isinstance(value[0], torch.Tensor | np.ndarray) and np.ndim(value[0]) > 0:
            rows = [np.array(item) for item in value]
            return "ragged", [row.astype(row.dtype.newbyteorder("="), copy=False) for row in rows]
    array = np.asarray(value)
    if array.dtype.kind in "UT":
        return "string", [str(item) for item in array.ravel()]
    if array.dtype.kind == "S":
        return "string", [item.decode() for item in array.ravel()]
    if array.dtype.kind not in "biufc" or array.ndim == 0:
        raise SchemaError(f"field {name!r} is {array.dtype} of shape {array.shape}; numbers, text or bytes by row fit")
    return "tensor", array


def _element(kind: Kind, rows: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape of one row, after the varying axis where there is one."""
    if kind == "tensor":
        return rows.dtype, rows.shape[1:]
    if kind == "ragged" and len(rows):
        kinds = {(row.dtype, row.shape[1:]) for row in rows}
        if len(kinds) > 1:
            raise SchemaError(f"ragged rows of one field have one type and one shape after the first axis, not {kinds}")
        return next(iter(kinds))
    return np.dtype(np.uint8), ()


def _joined(kind: Kind, pieces: list[Any]) -> Any:
    if kind == "tensor":
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    return [row for piece in pieces for row in piece]
