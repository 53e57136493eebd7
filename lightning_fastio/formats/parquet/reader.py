"""Parquet: rows out of mapped pages where these hold tensors as they are, else out of row groups that decode whole.

A row group is decoded once, into values from which rows are gathered (`columns` says what each type becomes);
a cache that is bounded in bytes keeps it while its rows are needed, and the row groups that come next are decoded
ahead. Rows are numbered in file order, files in natural order, counting only rows that pass ``filters``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_fastio.errors import RowIndexError, SchemaError
from lightning_fastio.formats.base import FieldLayout, Fields, Rows, check_rows
from lightning_fastio.formats.blocks import BlockCache, BlockRows, Int64Array, split_by_block
from lightning_fastio.formats.files import Source, fingerprint_of, resolve
from lightning_fastio.formats.parquet.fields import FieldOptions, plan_fields
from lightning_fastio.formats.parquet.files import Files
from lightning_fastio.formats.parquet.groups import RowGroups
from lightning_fastio.formats.parquet.layout import describe_field
from lightning_fastio.formats.parquet.mapped import MappedColumn, map_column
from lightning_fastio.formats.parquet.partition import partitions_of, root_of
from lightning_fastio.formats.parquet.survey import RaggedPolicy
from lightning_fastio.formats.parquet.values import Dense, Values, pad
from lightning_fastio.formats.parquet.writer import BLOCK_BYTES, METADATA_PREFIX, ParquetWriter
from lightning_fastio.schema import Batch, Schema

LARGE_BLOCK_BYTES = 32 << 20
"""From this size on a block costs so much to decode that tidying up before costs nothing."""


class ParquetReader:
    """Rows of Parquet files that have the same fields."""

    def __init__(
        self,
        paths: Sequence[Path],
        fields: Fields = None,
        *,
        ragged: RaggedPolicy = "auto",
        null_fill: Any = None,
        filters: Any = None,
        widen_unsigned: bool = True,
        cache_bytes: int = 1 << 30,
        roots: Sequence[Path] = (),
    ) -> None:
        """Read all footers and check the files against each other.

        Args:
            paths: Files, in the order of their rows.
            fields: Columns to deliver; see `Fields`.
            ragged: Lists of varying length: tensors if all are equal (auto), a list of tensors (list), one tensor
                padded with zeros to the longest of the batch (pad), or refused (error).
            null_fill: What nulls become, for all fields or by field; by default they are refused.
            filters: Rows to keep: a pyarrow expression, or tuples such as ``[("split", "==", "train")]``.
            widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64.
            cache_bytes: Decoded row groups to keep at most; one is always kept.
            roots: Folders below which names such as ``split=train`` become fields.

        Raises:
            FileAccessError: A file is missing or may not be read.
            CorruptFileError: A file is incomplete or damaged, or no Parquet file.
            SchemaError: The files differ in a field, or have no rows.
            FormatError: A field cannot be loaded.
            ConfigError: An option or a name is wrong.
        """
        self._files = Files(paths, partitions_of(paths, roots))
        self._check_has_rows(self._files.num_rows, "")
        options = FieldOptions(ragged, widen_unsigned, null_fill, has_filters=filters is not None)
        self._fields = plan_fields(self._files, fields, options)
        mapped = {} if filters is not None else {field.name: map_column(field, self._files) for field in self._fields}
        self._mapped: dict[str, MappedColumn] = {name: column for name, column in mapped.items() if column is not None}
        self._decoded = [field for field in self._fields if field.name not in self._mapped]
        self._columns = list(dict.fromkeys(column.name for field in self._decoded for column in field.columns))
        self._pads = ragged == "pad"
        self._groups = RowGroups(self._files, self._fields, filters)
        self._check_has_rows(self._groups.num_rows, " that passes the filters")
        self._groups.check_sizes(self._files, cache_bytes)
        self.schema = Schema({field.name: field.spec for field in self._fields})
        self.cache_bytes = cache_bytes
        self._start()

    @property
    def _name(self) -> str:
        others = f" and {len(self._files.files) - 1} more" if len(self._files.files) > 1 else ""
        return f"{self._files.files[0].path}{others}"

    def _check_has_rows(self, num_rows: int, which: str) -> None:
        if num_rows == 0:
            raise SchemaError(f"{self._name} has no row{which}")

    def _start(self) -> None:
        self._cache: BlockCache[int, dict[str, Values]] = BlockCache(
            self._decode, self._decoded_bytes, max_bytes=self.cache_bytes
        )
        self._is_verified = np.zeros(len(self.blocks) - 1, np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", "_is_verified")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return self._groups.num_rows

    def __repr__(self) -> str:
        return f"ParquetReader({self._name}: {len(self)} rows, {self.schema})"

    @property
    def blocks(self) -> Int64Array:
        """Row boundaries of the row groups; small neighbours are one block."""
        return self._groups.bounds

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a decoded row, text and lists included."""
        return float(self._groups.nbytes.sum()) / len(self)

    @property
    def metadata(self) -> dict[str, str]:
        """What the writer stored with the data."""
        stored = self._files.files[0].schema.metadata or {}
        return {
            key.decode().removeprefix(METADATA_PREFIX): value.decode()
            for key, value in stored.items()
            if key.startswith(METADATA_PREFIX.encode())
        }

    @property
    def fingerprint(self) -> str:
        """Changes with the names, sizes and row counts of the files, the schema, and the rows that pass filters."""
        counts = [file.num_rows for file in self._files.files]
        partitions = [dict(file.partition) for file in self._files.files]
        paths = [file.path for file in self._files.files]
        return fingerprint_of(paths, counts, partitions, self.schema, self._groups.kept_digest)

    def will_need(self, rows: Rows) -> None:
        """Begin to decode the row groups of these rows, as far as the cache has room."""
        with suppress(RowIndexError):
            checked = check_rows(rows, len(self))
            parts = list(split_by_block(checked, self.blocks))
            if self._decoded:
                self._cache.announce(_requests(parts))
            if not parts or not self._mapped:
                return
            blocks = np.array([part.block for part in parts])
            starts, stops = self.blocks[blocks], self.blocks[blocks + 1]
            if self._groups.nbytes[blocks].sum() > self.cache_bytes:
                starts, stops = checked, checked + 1  # A few rows out of very many blocks.
            for column in self._mapped.values():
                column.will_need(starts, stops)

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows; see `Reader.read`."""
        checked = check_rows(rows, len(self))
        num_rows = len(checked)
        found = {part.block: part for part in split_by_block(checked, self.blocks)} if self._decoded else {}
        tensors = self.schema.buffers(num_rows, out)
        batch: Batch = {}
        for field in self._fields:
            batch[field.name] = tensors[field.name] if field.spec.kind == "tensor" else [None] * num_rows  # type: ignore[assignment]
        for block, decoded in self._cache.read(_requests(found.values())):
            for name, values in decoded.items():
                _gather(values, found[block], batch[name])
        for name, column in self._mapped.items():
            column.read(checked, tensors[name])  # type: ignore[arg-type]
        if self._pads:
            for field in self._fields:
                if field.spec.kind == "ragged":
                    batch[field.name] = pad(batch[field.name], field.spec.shape, field.spec.dtype)  # type: ignore[arg-type]
        return batch

    def layout(self) -> list[FieldLayout]:
        """How each field is stored and read."""
        return [
            describe_field(field, self._files, self._groups, is_mapped=field.name in self._mapped)
            for field in self._fields
        ]

    def close(self) -> None:
        """Forget decoded row groups, end the decoding threads, close the files."""
        self._cache.close()
        for column in self._mapped.values():
            column.close()
        self._files.close()

    def _decoded_bytes(self, number: int) -> int:
        """Bytes of a block without the fields that stay in the file."""
        num_rows = int(self.blocks[number + 1] - self.blocks[number])
        return int(self._groups.nbytes[number]) - num_rows * sum(self.schema[name].nbytes for name in self._mapped)

    def _decode(self, number: int) -> dict[str, Values]:
        block = self._groups[number]
        if self._decoded_bytes(number) >= LARGE_BLOCK_BYTES:
            # Arrow keeps what was freed, in pieces that may not fit the next block.
            pa.default_memory_pool().release_unused()
        table = self._files.read(block.file, block.groups, self._columns, verify=not self._is_verified[number])
        # Pages are compared with their checksums the first time only: it takes as long as decoding them.
        self._is_verified[number] = True
        if block.positions is not None:
            table = table.take(pa.array(block.positions))
        path = self._files.files[block.file].path

        def place(index: int) -> str:
            return f"row {block.rows[index]} of {path}"

        return {field.name: field.decode(table, place) for field in self._decoded}


def _requests(parts: Iterable[BlockRows]) -> list[tuple[int, int]]:
    return [(part.block, len(part.rows)) for part in parts]


def _gather(values: Values, part: BlockRows, target: Any) -> None:
    """Put the rows of one block where they belong in the batch."""
    if isinstance(values, Dense):
        values.gather(part.rows, target, part.positions)
        return
    for position, value in zip(part.positions.tolist(), values.take(part.rows), strict=True):
        target[position] = value


def open_source(
    source: Source,
    fields: Fields = None,
    *,
    ragged: RaggedPolicy = "auto",
    null_fill: Any = None,
    filters: Any = None,
    widen_unsigned: bool = True,
    cache_bytes: int = 1 << 30,
) -> ParquetReader:
    """Open a file, a folder, a glob, or a list of these; see `ParquetReader`."""
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    return ParquetReader(
        resolve(source, "parquet"),
        fields,
        ragged=ragged,
        null_fill=null_fill,
        filters=filters,
        widen_unsigned=widen_unsigned,
        cache_bytes=cache_bytes,
        roots=[root_of(each) for each in sources],
    )


def open_target(
    path: str | Path,
    *,
    metadata: Mapping[str, str] | None = None,
    compression: str | None = None,
    rows_per_block: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> ParquetWriter:
    """Create a file; see `ParquetWriter`."""
    return ParquetWriter(
        path, metadata=metadata, compression=compression, rows_per_block=rows_per_block, block_bytes=block_bytes
    )
