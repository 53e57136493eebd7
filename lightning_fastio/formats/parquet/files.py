"""Parquet files on disk: footers, and row groups as Arrow tables.

Every footer is read once. Files are opened again when rows are read, each handle for one thread at a time, and only a
few idle ones stay open, so that hundreds of files work under a small limit on open files. Neither pyarrow's threads nor
its read-ahead are used: its pools would not survive a fork, and they keep more in memory than was asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_fastio.errors import CorruptFileError, FastIOError, FileAccessError, FormatError
from lightning_fastio.formats.parquet.footer import Chunks, read_chunks
from lightning_fastio.formats.parquet.partition import Partition
from lightning_fastio.formats.parquet.schema import StoredColumn, stored_columns

MAX_IDLE_FILES = 16
"""Files kept open while no thread reads them."""

BUFFER_BYTES = 256 << 10
"""Read at a time, so that a column is not held twice, once as in the file and once decoded."""

_SMALL_BATCH_ROWS = 1024


@dataclass(frozen=True)
class DataFile:
    """What the footer of one file says."""

    path: Path
    schema: pa.Schema
    columns: dict[str, StoredColumn]
    group_rows: npt.NDArray[np.int64]
    """Rows of each row group."""
    stamp: tuple[int, int]
    """Size and modification time when the footer was read."""
    partition: Partition
    """Columns that the folders of a Hive partition give, each with one value for all rows."""

    @property
    def num_rows(self) -> int:
        """Rows of all row groups."""
        return int(self.group_rows.sum())


class Files:
    """Reads footers and row groups, in any thread of any process."""

    def __init__(self, paths: Sequence[Path], partitions: Sequence[Partition]) -> None:
        """Read all footers.

        Args:
            paths: Files, in the order of their rows.
            partitions: For each file, values that all its rows have.

        Raises:
            FileAccessError: A file is missing or may not be read.
            CorruptFileError: A file is incomplete or damaged, or no Parquet file.
        """
        self._start()
        self.files: list[DataFile] = []
        for index, (path, partition) in enumerate(zip(paths, partitions, strict=True)):
            with _errors_of(path), self._open(path, verify=True) as parquet_file:
                self._footers[index] = parquet_file.metadata
                self.files.append(_data_file(path, parquet_file, partition, like=self.files[0] if self.files else None))
        self.num_chunks = sum(footer.num_row_groups * footer.num_columns for footer in self._footers.values())

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._footers: dict[int, pq.FileMetaData] = {}
        self._chunks: dict[int, Chunks] = {}
        self._idle: list[tuple[tuple[int, bool], pq.ParquetFile]] = []

    def _enter_process(self) -> None:
        """After a fork, leave the parent's files and its lock, which one of its threads may have held, alone."""
        if self._pid != os.getpid():
            self._start()

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(file.num_rows for file in self.files)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "num_chunks": self.num_chunks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def chunks(self, index: int) -> Chunks:
        """What the footer of one file says about its column chunks."""
        if index not in self._chunks:
            with self._handle(index, verify=True) as parquet_file:
                shape = (parquet_file.metadata.num_row_groups, parquet_file.metadata.num_columns)
            self._chunks[index] = read_chunks(self.files[index].path, *shape)
        return self._chunks[index]

    def read(self, index: int, groups: Sequence[int], columns: Sequence[str], *, verify: bool = True) -> pa.Table:
        """Decode some columns of some row groups of one file.

        Args:
            index: Number of the file.
            groups: Row groups, ascending.
            columns: Names of stored columns; struct members as ``struct.member``.
            verify: Compare the page checksums, where the file has them.

        Raises:
            CorruptFileError: The data cannot be decoded, or the file was changed since its footer was read.
        """
        file = self.files[index]
        expected = int(file.group_rows[list(groups)].sum())
        stored = [name for name in columns if name not in file.partition]
        table = self._read_stored(index, groups, stored, verify) if stored else pa.table({})
        constant = [name for name in columns if name in file.partition]
        if constant:
            values = [pa.scalar(file.partition[name], file.columns[name].type) for name in constant]
            arrays = [*table.columns, *(pa.repeat(value, expected) for value in values)]
            table = pa.table(arrays, names=[*table.column_names, *constant])
        for name, column in zip(table.column_names, table.columns, strict=True):
            if len(column) != expected:
                raise CorruptFileError(
                    f"{file.path}: column {name!r} holds {len(column)} rows in row groups {_listed(groups)}, but its "
                    f"footer says {expected}; the file is damaged, write it again"
                )
        return table

    def _read_stored(self, index: int, groups: Sequence[int], columns: list[str], verify: bool) -> pa.Table:
        with self._handle(index, verify) as parquet_file:
            try:
                return parquet_file.read_row_groups(list(groups), columns=columns, use_threads=False)
            except NotImplementedError:  # Arrow cannot hold large nested values in one array.
                pass
            try:
                batches = parquet_file.iter_batches(_SMALL_BATCH_ROWS, list(groups), columns, use_threads=False)
                return pa.Table.from_batches(list(batches))
            except NotImplementedError as error:
                raise FormatError(
                    f"{self.files[index].path}: pyarrow cannot decode {', '.join(map(repr, columns))} ({error}); "
                    "write smaller row groups, or store the values as fixed-size binary (fastio convert)"
                ) from error

    def batches(self, index: int, groups: Sequence[int], column: str) -> Iterator[pa.Table]:
        """One column in small pieces, to look at it in bounded memory."""
        with self._handle(index, verify=True) as parquet_file:
            pieces = parquet_file.iter_batches(_SMALL_BATCH_ROWS, list(groups), [column], use_threads=False)
            for piece in pieces:
                yield pa.Table.from_batches([piece])

    def close(self) -> None:
        """Close all files; reading opens them again."""
        self._enter_process()
        with self._lock:
            idle, self._idle = self._idle, []
        for _, parquet_file in idle:
            parquet_file.close()

    @contextmanager
    def _handle(self, index: int, verify: bool) -> Iterator[pq.ParquetFile]:
        """An open file that no other thread uses meanwhile."""
        self._enter_process()
        file = self.files[index]
        with _errors_of(file.path):
            if _stamp(file.path) != file.stamp:
                raise CorruptFileError(
                    f"{file.path} was changed while it was in use: it had {file.stamp[0]} bytes, now "
                    f"{_stamp(file.path)[0]}; write to a new file and rename it, and open the reader again"
                )
            with self._lock:
                key = (index, verify)
                position = next((i for i, (idle, _) in enumerate(self._idle) if idle == key), None)
                opened = None if position is None else self._idle.pop(position)[1]
            opened = opened or self._open(file.path, verify=verify, footer=self._footers.get(index))
            self._footers.setdefault(index, opened.metadata)
            try:
                yield opened
            finally:
                with self._lock:
                    self._idle.append((key, opened))
                    surplus = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE_FILES else None
                if surplus is not None:
                    surplus.close()

    @staticmethod
    def _open(path: Path, *, verify: bool, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
        return pq.ParquetFile(
            path,
            metadata=footer,
            pre_buffer=False,
            buffer_size=BUFFER_BYTES,
            page_checksum_verification=verify,
            coerce_int96_timestamp_unit="us",  # Nanoseconds, the default, wrap around silently after the year 2262.
        )


def _data_file(path: Path, parquet_file: pq.ParquetFile, partition: Partition, *, like: DataFile | None) -> DataFile:
    metadata = parquet_file.metadata
    group_rows = np.array([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], np.int64)
    if group_rows.sum() != metadata.num_rows or group_rows.min(initial=0) < 0:
        raise CorruptFileError(
            f"{path}: its footer counts {metadata.num_rows} rows, but its row groups hold {group_rows.sum()}; "
            "the file is damaged, write it again"
        )
    schema = parquet_file.schema_arrow
    num_stored = len(schema)
    added = {name: value for name, value in partition.items() if name not in schema.names}
    for name, value in added.items():
        schema = schema.append(pa.field(name, pa.int64() if isinstance(value, int) else pa.string()))
    if like is not None and schema.remove_metadata().equals(like.schema.remove_metadata(), check_metadata=True):
        # One object for all files: quick to compare, and pickled once.
        return DataFile(path, like.schema, like.columns, group_rows, _stamp(path), added)
    return DataFile(path, schema, stored_columns(schema, num_stored=num_stored), group_rows, _stamp(path), added)


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _listed(groups: Sequence[int]) -> str:
    return str(groups[0]) if len(groups) == 1 else f"{groups[0]} to {groups[-1]}"


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Errors of the system and of pyarrow as errors of this package that name the file."""
    try:
        yield
    except FastIOError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise FileAccessError(f"{path} cannot be opened: {error.strerror or error}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        raise CorruptFileError(
            f"{path} cannot be read as Parquet: {error}; it is incomplete, damaged, or in another format"
        ) from error
