"""Writes Parquet so that it reads fast here and opens everywhere.

Tensors are fixed-size binary columns, uncompressed, without dictionary and statistics, so that a row group decodes by
copying; their field metadata holds ``fastio.dtype`` and ``fastio.shape``. Any tool reads them back with
``np.frombuffer(value, dtype).reshape(shape)``. Scalars, strings, bytes and lists are ordinary columns. Every page has a
checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typing_extensions import Self

from lightning_fastio.errors import ConfigError, FileAccessError, SchemaError
from lightning_fastio.formats.parquet.arrays import StoredField, describe
from lightning_fastio.formats.target import Target

METADATA_PREFIX = "fastio."
"""Put before the keys of ``metadata`` in the file's key-value metadata."""

CODECS = ("zstd", "lz4", "snappy", "gzip", "brotli")

BLOCK_BYTES = 16 << 20
"""Bytes of a row group: it decodes in about 5 ms, and half of the default cache shuffles rows out of 32 of them."""

PAGE_BYTES = 1 << 20
"""Bytes of a page: large enough to cost nothing by itself, small enough to stay in the processor's cache."""


class ParquetWriter:
    """Appends batches to a Parquet file that appears when it is whole."""

    def __init__(
        self,
        path: str | Path,
        *,
        metadata: Mapping[str, str] | None = None,
        compression: str | None = None,
        rows_per_block: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Set up; the first batch creates a temporary file beside ``path``.

        Args:
            path: File to write; an older one is replaced when this one is whole.
            metadata: Texts to store with the data.
            compression: None, zstd, lz4, snappy, gzip or brotli.
            rows_per_block: Rows of a row group; by default ``block_bytes`` decides.
            block_bytes: Bytes of a row group before compression.

        Raises:
            ConfigError: The codec is unknown, or a size is not positive.
        """
        if compression not in (None, *CODECS):
            raise ConfigError(f"compression={compression!r} is no codec of Parquet; use None or one of {CODECS}")
        if block_bytes < 1 or (rows_per_block is not None and rows_per_block < 1):
            raise ConfigError(f"rows_per_block={rows_per_block} and block_bytes={block_bytes} must be positive")
        self._target = Target(path)
        self.path = self._target.path
        self._is_done = False
        self._metadata = dict(metadata or {})
        self._compression = compression
        self._rows_per_block, self._block_bytes = rows_per_block, block_bytes
        self._fields: list[StoredField] = []
        self._file: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0

    def write(self, batch: Mapping[str, Any]) -> None:
        """Append rows; see `Writer.write`.

        Raises:
            SchemaError: Fields, dtypes or shapes differ from the first batch, or lengths from each other.
            FormatError: A field cannot be stored in Parquet.
        """
        if self._is_done:
            raise SchemaError(f"{self.path}: the writer is closed; open a new one")
        table = self._table(batch)
        if self._file is None:
            self._file = self._create(table.schema)
        ends = np.cumsum(_row_bytes(table))
        start = 0
        while start < table.num_rows:
            done = int(ends[start - 1]) if start else 0
            if self._rows_per_block is not None:
                stop = start + self._rows_per_block - self._pending_rows
            else:
                stop = int(np.searchsorted(ends, done + self._block_bytes - self._pending_bytes, side="right"))
            stop = min(max(stop, start if self._pending else start + 1), table.num_rows)
            self._pending.append(table.slice(start, stop - start))
            self._pending_rows += stop - start
            self._pending_bytes += int(ends[stop - 1]) - done if stop > start else 0
            if stop < table.num_rows:
                self._flush()
            start = stop

    def close(self) -> None:
        """Write what is left, sync, and rename into place.

        Raises:
            SchemaError: Nothing was written.
        """
        if self._is_done:
            return
        if self._file is None:
            self._is_done = True
            raise SchemaError(f"{self.path}: nothing was written; write at least one batch before close")
        try:
            self._flush()
            self._file.close()
            self._target.publish()
        except BaseException:  # A full disk, for example.
            self.abort()
            raise
        self._file, self._is_done = None, True

    def abort(self) -> None:
        """Remove what was written; an older file at the target stays."""
        if self._is_done:
            return
        self._is_done = True
        if self._file is not None:
            with suppress(OSError):  # It writes a footer, for which there may be no room.
                self._file.close()
            self._file = None
        self._pending.clear()
        self._target.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _table(self, batch: Mapping[str, Any]) -> pa.Table:
        order = [field.name for field in self._fields]
        if self._fields and sorted(batch) != sorted(order):
            raise SchemaError(f"{self.path}: a batch has the fields {list(batch)}, but the first one had {order}")
        described = [describe(name, batch[name]) for name in order or batch]
        lengths = {field.name: len(values) for field, values in described}
        if len(set(lengths.values())) != 1:
            raise SchemaError(f"{self.path}: fields of a batch differ in length: {lengths}")
        fields = [field for field, _ in described]
        if not self._fields:
            self._fields = fields
        elif lengths[fields[0].name] == 0:
            return pa.schema([field.arrow for field in self._fields]).empty_table()
        for expected, found in zip(self._fields, fields, strict=True):
            if found != expected:
                raise SchemaError(f"{self.path}: field {found.name!r} is {found}, but the first batch had {expected}")
        arrays = [field.array(values) for field, values in described]
        return pa.table(arrays, schema=pa.schema([field.arrow for field in fields]))

    def _create(self, schema: pa.Schema) -> pq.ParquetWriter:
        metadata = {METADATA_PREFIX + key: value for key, value in self._metadata.items()}
        widest = max(map(_bytes_of, schema.types))
        self._target.begin()
        try:
            return pq.ParquetWriter(
                self._target.partial,
                schema.with_metadata(metadata),
                compression=self._compression or "none",
                use_dictionary=[field.name for field in self._fields if field.kind == "string"],
                write_statistics=[field.name for field in self._fields if field.kind == "scalar"],
                write_page_checksum=True,
                write_page_index=True,  # With it, rows of uncompressed tensors are read without decoding.
                # pyarrow looks at the size of a page once every so many rows, by default 1024 of them, however wide.
                write_batch_size=min(max(PAGE_BYTES // widest, 1), 1024),
            )
        except OSError as error:
            raise FileAccessError(f"{self.path} cannot be written: {error}") from error

    def _flush(self) -> None:
        if self._pending_rows:
            assert self._file is not None
            self._file.write_table(pa.concat_tables(self._pending), row_group_size=self._pending_rows)
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0


def _row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """Bytes of each row."""
    sizes = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if pa.types.is_list(column.type):
            sizes += pc.list_value_length(column).to_numpy() * _bytes_of(column.type.value_type)
        elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            sizes += pc.binary_length(column).to_numpy()
        else:
            sizes += _bytes_of(column.type)
    return sizes


def _bytes_of(type_: pa.DataType) -> int:
    """Bytes of a value of fixed size, and 1 for others."""
    if pa.types.is_fixed_size_list(type_):
        return int(type_.list_size) * _bytes_of(type_.value_type)
    return (
        max(1, int(type_.bit_width) // 8) if pa.types.is_primitive(type_) or pa.types.is_fixed_size_binary(type_) else 1
    )
