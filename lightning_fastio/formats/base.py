"""The contract between a storage format and the rest of the package: `Reader` and `Writer`.

A new format is a module or a folder here with a class for each, plus its line in ``formats/files.py``; the
conformance suite in ``tests/formats`` then covers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from lightning_fastio.errors import RowIndexError
from lightning_fastio.schema import Batch, Schema

Rows: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Row numbers as NumPy fancy indexing takes them: any order, repeats, negatives."""

Fields: TypeAlias = Sequence[str] | Mapping[str, str | Sequence[str]] | None
"""Which fields to deliver, in this order: names; or new name to stored name; or new name to a list of stored
names that are stacked into one matrix. None takes every field that can be loaded."""


@dataclass(frozen=True)
class FieldLayout:
    """How one field lies in its file and how it is read, for ``fastio inspect`` and the advice of reports."""

    name: str
    """Field name as delivered."""
    stored: str
    """Type, shape and layout on disk, such as ``uint8 (5000, 64, 64), chunks (16, 64, 64), gzip + shuffle``."""
    read_path: str
    """How rows get out, such as ``memory map`` or ``h5py (slow: ...)``."""
    hint: str = ""
    """Why the layout is slow and what rewrites it; empty when there is nothing to gain."""


@runtime_checkable
class Reader(Protocol):
    """Rows of one source in one storage format.

    Contract:

    - Everything that can be checked is checked when the reader opens: the files are complete, their schemas
      agree, every link and filter is there. Errors of this package name path, field, expectation and remedy.
    - Thread-safe: ``read`` and ``will_need`` may run in several threads at once.
    - Picklable and deep-copyable, before and after use: paths and options travel, handles and decoded data do
      not. Each process opens its own handles; a handle is never used in a process that did not open it.
    - Memory does not grow with the number of rows, except by flat arrays; no Python list with an entry a row.
    - A file is never opened for writing and never changed.
    """

    @property
    def schema(self) -> Schema:
        """The fields of a row, in the order in which a batch holds them."""
        ...

    @property
    def blocks(self) -> npt.NDArray[np.int64] | None:
        """Row boundaries of the units that decode whole, or None when every row costs the same.

        Shape ``(num_blocks + 1,)``, strictly increasing, from 0 to ``len(self)``: block ``b`` holds the rows
        ``blocks[b]`` to ``blocks[b + 1] - 1``. Where fields are cut differently, the field with the most bytes
        decides.
        """
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of decoded blocks that this reader keeps at most; 0 when there is nothing to decode.

        Two windows of a block shuffle fit in it, so that one is decoded while the other is read.
        """
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the writer stored with the data, such as ``classes`` as a JSON list; empty for foreign files."""
        ...

    @property
    def fingerprint(self) -> str:
        """A short text that changes when the rows, the schema or the set of files change, and only then.

        It depends on file names, sizes and row counts, not on the folder, so that moved data keeps it.
        """
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def will_need(self, rows: Rows) -> None:
        """Hint that ``rows`` will be read soon. Starts their I/O or decoding and returns at once, never failing."""
        ...

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows.

        Args:
            rows: Row numbers as NumPy fancy indexing takes them: any order, repeats, negatives.
            out: Buffers from ``schema.allocate(len(rows))`` to fill and return; without it, new ones are made.

        Returns:
            A batch that nothing else refers to: writable, contiguous, in native byte order.

        Raises:
            RowIndexError: A row lies outside ``-len(self)`` to ``len(self) - 1``.
            SchemaError: A buffer in ``out`` does not fit.
            CorruptFileError: The data cannot be decoded, or the file shrank since it was opened.
        """
        ...

    def layout(self) -> list[FieldLayout]:
        """How each field is stored and read."""
        ...

    def close(self) -> None:
        """Release handles, maps, threads and cached data. Idempotent; a later ``read`` opens them again."""
        ...


@runtime_checkable
class Writer(Protocol):
    """Appends rows to a file or folder that appears at its final name only when it is whole.

    Contract: data goes to a temporary sibling of the target, is synced, and is renamed over the target by
    ``close``. Until then, and after an error or ``abort``, an older file at the target stays as it was. The
    first batch fixes the fields, dtypes and sample shapes; a later one that differs raises `SchemaError`.

    Use as a context manager: leaving it with an exception aborts, otherwise closes.
    """

    def write(self, batch: Mapping[str, Any]) -> None:
        """Append rows: field name to array, tensor, list of str, list of bytes, or list of 1-D or higher arrays
        (ragged). All fields have the same length.
        """
        ...

    def close(self) -> None:
        """Finish, sync and rename into place. Raises `SchemaError` if nothing was ever written."""
        ...

    def abort(self) -> None:
        """Remove what was written; the target stays as it was before. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def row_bytes(reader: Reader) -> float:
    """Mean bytes of a decoded row.

    A reader whose rows vary in length may have an attribute ``row_bytes`` that tells; the schema can only guess.
    """
    told = getattr(reader, "row_bytes", None)
    return max(1.0, float(reader.schema.row_bytes if told is None else told))


def check_rows(rows: Rows, num_rows: int) -> npt.NDArray[np.int64]:
    """Row numbers as int64 in ``0`` to ``num_rows - 1``, negatives resolved.

    Raises:
        RowIndexError: A row is out of range, or ``rows`` is not a one-dimensional list of integers.
    """
    indices = np.asarray(rows)
    if indices.size == 0 and indices.ndim == 1:
        return np.empty(0, np.int64)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise RowIndexError(f"rows must be a one-dimensional list of integers, not {indices.dtype} {indices.shape}")
    if indices.dtype == np.int64 and int(indices.view(np.uint64).max()) < num_rows:
        return indices  # A negative row would be a huge one.
    low, high = int(indices.min()), int(indices.max())
    if low < -num_rows or high >= num_rows:
        raise RowIndexError(f"row {high if high >= num_rows else low} is out of range for {num_rows} rows")
    indices = indices.astype(np.int64, copy=False)
    return np.where(indices < 0, indices + num_rows, indices) if low < 0 else indices
