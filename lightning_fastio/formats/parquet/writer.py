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
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lightning_fastio.errors import ConfigError
from lightning_fastio.formats.parquet.arrays import arrow_array, arrow_field, is_scalar, refusal
from lightning_fastio.formats.writing import Column, FileWriter

METADATA_PREFIX = "fastio."
"""Put before the keys of ``metadata`` in the file's key-value metadata."""

CODECS = ("zstd", "lz4", "snappy", "gzip", "brotli")

BLOCK_BYTES = 16 << 20
"""Bytes of a row group: it decodes in about 5 ms, and half of the default cache shuffles rows out of 32 of them."""

PAGE_BYTES = 256 << 10
"""Bytes of a page: large enough to cost nothing by itself, small enough to stay in the processor's cache, which makes
writing twice as fast as pages of a megabyte."""


class ParquetWriter(FileWriter):
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
        super().__init__(path)
        self._metadata = dict(metadata or {})
        self._compression = compression
        self._rows_per_block, self._block_bytes = rows_per_block, block_bytes
        self._schema = pa.schema([])
        self._file: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0

    def _refusal(self, name: str, column: Column) -> str | None:
        return refusal(column)

    def _begin(self, rows: Mapping[str, Any]) -> None:
        self._schema = pa.schema([arrow_field(name, column) for name, column in self._columns.items()])
        metadata = {METADATA_PREFIX + key: value for key, value in self._metadata.items()}
        widest = max(map(_bytes_of, self._schema.types))
        self._file = pq.ParquetWriter(
            self._target.partial,
            self._schema.with_metadata(metadata),
            compression=self._compression or "none",
            use_dictionary=[name for name, column in self._columns.items() if column.kind == "string"],
            write_statistics=[name for name, column in self._columns.items() if is_scalar(column)],
            write_page_checksum=True,
            write_page_index=True,  # With it, rows of uncompressed tensors are read without decoding.
            data_page_size=PAGE_BYTES,
            # pyarrow looks at the size of a page once every so many rows, by default 1024 of them, however wide.
            write_batch_size=min(max(PAGE_BYTES // widest, 1), 1024),
        )

    def _append(self, rows: Mapping[str, Any]) -> None:
        arrays = [arrow_array(self._columns[field.name], field.type, rows[field.name]) for field in self._schema]
        table = pa.table(arrays, schema=self._schema)
        ends = np.cumsum(_row_bytes(table))
        start = 0
        while start < table.num_rows:
            done = int(ends[start - 1]) if start else 0
            if self._rows_per_block is not None:
                stop = start + self._rows_per_block - self._pending_rows
            else:
                stop = int(np.searchsorted(ends, done + self._block_bytes - self._pending_bytes, side="right"))
            stop = min(max(stop, start if self._pending else start + 1), table.num_rows)
            piece = table.slice(start, stop - start)
            # What waits for the next batch is copied, since the caller may use its buffers again.
            self._pending.append(piece if stop < table.num_rows else piece.take(pa.array(range(piece.num_rows))))
            self._pending_rows += stop - start
            self._pending_bytes += int(ends[stop - 1]) - done if stop > start else 0
            if stop < table.num_rows:
                self._flush()
            start = stop

    def _finish(self) -> Path:
        assert self._file is not None
        self._flush()
        self._file.close()
        return self._target.partial

    def _release(self) -> None:
        self._pending.clear()
        if self._file is not None:
            with suppress(OSError):  # It writes a footer, for which there may be no room.
                self._file.close()

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
