"""Rows out of memory-mapped bytes.

`MappedFile` maps a file, `MappedArray` sees an array in its bytes and copies rows of it into batches. The map is
read-only, so that no bug can change the file, and keeps no file open, so that thousands of files work under a small
limit on open files.

A file that somebody cuts short while it is mapped has no bytes to give: the kernel would end the process with SIGBUS.
Each read therefore looks first whether the file is still as it was, and raises `CorruptFileError` if not. What is left
is a file that shrinks between that look and the copy, some microseconds later, and a disk that fails. Write to a new
file and rename it: then readers that are open keep the old data.
"""

from __future__ import annotations

import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import CorruptFileError, FastIOError, FileAccessError, FormatError
from lightning_fastio.formats.pages import (
    Bytes,
    Int64Array,
    address_of,
    announce,
    are_in_memory,
    as_rows,
    map_file,
)

CHUNK_BYTES = 128 << 10
"""Rows that cannot be copied in one go pass through memory of this size, which stays in a processor's own cache."""

_LARGE_ITEM_BYTES = 256 << 10
"""Items above this size are copied one by one."""

_NUM_SAMPLES = 8


class ByteSource(Protocol):
    """Where an array's bytes are: a mapped file, or memory."""

    path: Path

    def view(self) -> Bytes:
        """All bytes, read-only or private to this package.

        Raises:
            CorruptFileError: The file is not as it was when it was opened.
        """
        ...

    def has_in_memory(self, offsets: Int64Array) -> bool:
        """Whether the pages at these offsets need not be announced."""
        ...

    def close(self) -> None:
        """Let go of the bytes; a later `view` gets them again."""
        ...


class MappedFile:
    """The bytes of a file, mapped when they are first used in a process. Thread-safe and picklable."""

    def __init__(self, path: str | Path) -> None:
        """Note size and time of the file.

        Raises:
            FileAccessError: It is missing or may not be read.
        """
        self.path = Path(os.path.abspath(path))
        self._name = str(self.path)
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            raise FileAccessError(f"{self.path} cannot be opened: {error.strerror or error}") from error
        self.size = status.st_size
        self._stamp = _stamp(status)
        self._maps: dict[int, _Map] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def __repr__(self) -> str:
        return f"MappedFile({str(self.path)!r})"

    def view(self) -> Bytes:
        """All bytes of the file, read-only; they stay mapped while something refers to them."""
        found = self._maps.get(os.getpid())
        if found is None:
            found = self._maps.setdefault(os.getpid(), self._open())
        try:
            status = os.stat(self._name)
        except OSError:  # Removed or renamed: what is mapped stays whole.
            return found.view
        if (status.st_dev, status.st_ino) == found.inode and _stamp(status) != self._stamp:
            raise self._changed(status)
        return found.view

    def has_in_memory(self, offsets: Int64Array) -> bool:
        """Whether the pages at these offsets need not be announced."""
        return are_in_memory(self._name, offsets)

    def close(self) -> None:
        """Unmap the file once no read in another thread uses it."""
        self._maps.pop(os.getpid(), None)

    def _open(self) -> _Map:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if _stamp(status) != self._stamp:
                    raise self._changed(status)
                return _Map(map_file(file.fileno(), self.size), (status.st_dev, status.st_ino))
        except OSError as error:
            if isinstance(error, FastIOError):
                raise
            raise FileAccessError(f"{self.path} cannot be mapped into memory: {error.strerror or error}") from error

    def _changed(self, status: os.stat_result) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} was changed while it was in use: it had {self.size} bytes, now {status.st_size}; "
            "write to a new file and rename it, and open the reader again"
        )


class _Map(NamedTuple):
    view: Bytes
    inode: tuple[int, int]


class MappedArray:
    """Rows of an array that lies in mapped bytes; or windows along its first axis as rows."""

    def __init__(
        self,
        source: ByteSource,
        offset: int,
        dtype: npt.DTypeLike,
        shape: tuple[int, ...],
        *,
        order: Literal["C", "F"] = "C",
        window: int | None = None,
        stride: int | None = None,
    ) -> None:
        """See an array in bytes.

        Args:
            source: The bytes.
            offset: Where the first element begins.
            dtype: Stored type, in any byte order.
            shape: Stored shape, at least one axis.
            order: ``F`` when the first index runs fastest.
            window: Items along the first axis that are one row; by default each item is one.
            stride: Items from the start of a window to the start of the next; ``window`` by default.

        Raises:
            FormatError: A row is larger than 2 GiB.
        """
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._source = source
        self._offset = offset
        self._item_bytes = self.dtype.itemsize * prod(shape[1:])
        is_matrix = sum(length > 1 for length in shape) > 1
        self.order: Literal["C", "F"] = order if is_matrix else "C"
        """How the elements lie; an array with one long axis lies both ways."""
        if window is None:
            self.num_rows, self.row_shape = shape[0], shape[1:]
            self._step = 1
        else:
            self._step = stride or window
            self.num_rows = max(0, (shape[0] - window) // self._step + 1)
            self.row_shape = (window, *shape[1:])
        self._window = window
        self.row_bytes = self.dtype.itemsize * prod(self.row_shape)
        if self.row_bytes >= 1 << 31:
            raise FormatError(
                f"{source.path}: a row of {self.row_bytes / 2**30:.1f} GiB is too large, 2 GiB is the most"
            )

    def read(self, rows: Int64Array, out: npt.NDArray[Any], positions: Int64Array | None = None) -> None:
        """Copy rows, converted to native byte order and to the type of ``out``.

        Args:
            rows: Row numbers in ``0`` to ``num_rows - 1``.
            out: Contiguous array of rows: of the stored type in native order, or of a wider one.
            positions: Place in ``out`` of each row; one after another by default.

        Raises:
            CorruptFileError: The file is not as it was when it was opened.
            FormatError: A uint64 is too large for int64.
        """
        if self.row_bytes == 0 or len(rows) == 0:
            return
        if self.is_plain(out.dtype):
            copy_items(self.items(), rows, as_items(out), positions)
            return
        num_rows = max(1, CHUNK_BYTES // self.row_bytes)
        for start in range(0, len(rows), num_rows):
            some = rows[start : start + num_rows]
            place = slice(start, start + len(some)) if positions is None else positions[start : start + num_rows]
            out[place] = self._checked(self.take(some), out.dtype, some)

    def is_plain(self, dtype: np.dtype[Any]) -> bool:
        """Whether rows are copied as they are to become rows of this type."""
        return self.order == "C" and self.dtype == dtype and self.dtype.isnative and self.dtype.kind != "b"

    def check(self) -> None:
        """Raise `CorruptFileError` if the file is not as it was when it was opened."""
        self._source.view()

    def has_in_memory(self, row: int) -> bool:
        """Whether a row need not be announced."""
        return self._source.has_in_memory(np.array([self._offset + row * self._step * self._item_bytes]))

    def take(self, rows: Int64Array) -> npt.NDArray[Any]:
        """A copy of some rows in their stored type."""
        if self.order == "F":
            return self._take_scattered(rows)
        values = np.empty((len(rows), *self.row_shape), self.dtype)
        if values.size:
            copy_items(self.items(), rows, as_items(values))
        return values

    def will_need(self, rows: Int64Array, lengths: Int64Array | int = 1) -> None:
        """Hint that rows, or runs of rows that begin there, will be read soon.

        In Fortran order each row is scattered over the whole file, and there is nothing to hint.
        """
        if self.order == "F" or len(rows) == 0:
            return
        with suppress(FastIOError, OSError):
            step_bytes = self._step * self._item_bytes
            offsets = self._offset + rows * step_bytes
            if not self._source.has_in_memory(sample(offsets)):
                start = address_of(self._source.view())
                announce(start + offsets, (lengths - 1) * step_bytes + self.row_bytes)

    def close(self) -> None:
        """Let go of the bytes; a later read gets them again."""
        self._source.close()

    def items(self) -> npt.NDArray[np.void]:
        """One item of bytes for each row; windows overlap."""
        step_bytes = self._step * self._item_bytes
        view = self._source.view()
        items: npt.NDArray[np.void] = np.ndarray(
            (self.num_rows,), f"V{self.row_bytes}", view, self._offset, (step_bytes,)
        )
        return items

    def _take_scattered(self, rows: Int64Array) -> npt.NDArray[Any]:
        stored = np.ndarray(self.shape, self.dtype, self._source.view(), self._offset, order="F")
        if self._window is not None:
            rows = (rows * self._step)[:, None] + np.arange(self._window)
        return np.ascontiguousarray(stored[rows])

    def _checked(self, values: npt.NDArray[Any], dtype: np.dtype[Any], rows: Int64Array) -> npt.NDArray[Any]:
        """Stored values in a form that assignment converts rightly."""
        if values.dtype.kind == "b":
            return values.view(np.uint8)  # Bytes other than 0 and 1 occur, and become 1.
        if values.dtype.kind == "u" and values.dtype.itemsize == 8 and dtype.kind == "i":
            largest = values.reshape(len(values), -1).max(axis=1)
            if (largest > np.iinfo(np.int64).max).any():
                row = int(rows[int(largest.argmax())])
                raise FormatError(
                    f"{self._source.path}, row {row}: {largest.max()} is too large for int64; "
                    "widen_unsigned=False delivers uint64"
                )
        return values


def as_items(rows: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """A contiguous array of rows as one item of bytes for each row, which NumPy moves in one piece."""
    items: npt.NDArray[np.void] = np.ndarray((len(rows),), f"V{rows.nbytes // len(rows)}", rows)
    return items


def copy_items(
    source: npt.NDArray[np.void], rows: Int64Array, out: npt.NDArray[np.void], positions: Int64Array | None = None
) -> None:
    """``out[positions] = source[rows]`` without a copy of the source, and without the interpreter's lock."""
    if positions is None:
        _gather(source, rows, out)
        return
    num_rows = max(1, CHUNK_BYTES // source.itemsize)
    some = np.empty(min(num_rows, len(rows)), out.dtype)
    for start in range(0, len(rows), num_rows):
        places = positions[start : start + num_rows]
        _gather(source, rows[start : start + num_rows], some[: len(places)])
        out[places] = some[: len(places)]


def _gather(source: npt.NDArray[np.void], rows: Int64Array, out: npt.NDArray[np.void]) -> None:
    if source.flags.c_contiguous:
        np.take(source, rows, out=out, mode="clip")  # With "raise", NumPy goes through a buffer of the size of `out`.
    elif source.itemsize > _LARGE_ITEM_BYTES:
        for place, row in enumerate(rows.tolist()):
            out[place : place + 1] = source[row : row + 1]
    else:
        # np.take would copy a whole source of overlapping items first, which torch sees as rows with any stride.
        torch.index_select(as_rows(source), 0, torch.from_numpy(rows), out=as_rows(out))


def sample(values: Int64Array) -> Int64Array:
    """A few of them, evenly spread."""
    return values[:: max(1, len(values) // _NUM_SAMPLES)][:_NUM_SAMPLES]


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
