"""What all writers do alike: batches become columns that fit the first, and the file appears when it is whole."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self

from lightning_fastio.errors import FastIOError, FileAccessError, SchemaError
from lightning_fastio.formats.target import Target
from lightning_fastio.schema import Kind


@dataclass(frozen=True)
class Column:
    """What a file stores of one field, fixed by the first batch."""

    kind: Kind
    dtype: str
    """NumPy's name of the element type, or ``bfloat16``; ``uint8`` for text and bytes."""
    shape: tuple[int, ...] = ()
    """Shape of a row; of a ragged row without its first axis."""

    def __str__(self) -> str:
        return f"{self.kind} of {self.dtype} {list(self.shape)}" if self.kind in ("tensor", "ragged") else self.kind


class FileWriter(ABC):
    """Appends batches to a temporary file or folder that is renamed into place when it is whole; see `Writer`."""

    def __init__(self, path: str | Path, *, is_folder: bool = False) -> None:
        """Set up; the first batch creates a temporary sibling of ``path``."""
        self._target = Target(path, is_folder=is_folder)
        self.path = self._target.path
        self._columns: dict[str, Column] = {}
        self._is_done = False

    @abstractmethod
    def _refusal(self, name: str, column: Column) -> str | None:
        """Why this format cannot store a field; None if it can."""

    @abstractmethod
    def _begin(self, rows: Mapping[str, Any]) -> None:
        """Create the file for the fields in ``_columns``, of which these are the first rows."""

    @abstractmethod
    def _append(self, rows: Mapping[str, Any]) -> None:
        """Append rows of each field, as `column_of` returns them. They are the caller's, who may overwrite them."""

    @abstractmethod
    def _finish(self) -> Path:
        """Write what is left, and return what is to be renamed to ``path``."""

    @abstractmethod
    def _release(self) -> None:
        """Close all handles of a file that will be removed."""

    def write(self, batch: Mapping[str, Any]) -> None:
        """Append rows; see `Writer.write`.

        Raises:
            SchemaError: Fields differ in length, or from the first batch, or cannot be stored.
            FileAccessError: Nothing can be written there, or the disk is full; nothing is left of the file.
        """
        if self._is_done:
            raise SchemaError(f"{self.path}: the writer is closed; open a new one")
        if self._columns and sorted(batch) != sorted(self._columns):
            raise SchemaError(
                f"{self.path}: a batch has the fields {list(batch)}, but the first one had {list(self._columns)}"
            )
        found = {name: column_of(name, values) for name, values in batch.items()}
        lengths = {name: len(rows) for name, (_, rows) in found.items()}
        if len(set(lengths.values())) != 1:
            raise SchemaError(f"{self.path}: the fields of a batch have one length, but these have {lengths}")
        columns = {name: column for name, (column, _) in found.items() if column is not None}
        if len(columns) < len(found):
            return  # An empty list has no rows, and does not say of what.
        rows = {name: found[name][1] for name in self._columns or found}
        if not self._columns:
            self._create(columns, rows)
        if any(lengths.values()):
            self._check(columns)
            with self._undone_on_error():
                self._append(rows)

    def close(self) -> None:
        """Finish, sync, and rename into place.

        Raises:
            SchemaError: Nothing was written.
            FileAccessError: The disk is full; nothing is left of the file, and an older one stays.
        """
        if self._is_done:
            return
        if not self._columns:
            self._is_done = True
            raise SchemaError(f"{self.path}: nothing was written; write at least one batch before close")
        with self._undone_on_error():
            self._target.publish(self._finish())
        self._is_done = True

    def abort(self) -> None:
        """Remove what was written; older data at the target stays."""
        if not self._is_done:
            self._is_done = True
            if self._columns:
                self._release()
            self._target.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.abort()

    def _create(self, columns: dict[str, Column], rows: Mapping[str, Any]) -> None:
        for name, column in columns.items():
            if (reason := self._refusal(name, column)) is not None:
                raise SchemaError(f"{self.path}: field {name!r} is {column}; {reason}")
        self._target.begin()
        self._columns = columns
        with self._undone_on_error():
            self._begin(rows)

    def _check(self, columns: Mapping[str, Column]) -> None:
        for name, first in self._columns.items():
            if columns[name] != first:
                raise SchemaError(
                    f"{self.path}: field {name!r} began as {first}, but a later batch has {columns[name]}"
                )

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """After a failure there is no file: fields of different lengths must never become data."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError) and not isinstance(error, FastIOError):
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise FileAccessError(f"{self.path} cannot be written: {reason}") from error
            raise


def column_of(name: str, values: Any) -> tuple[Column | None, Any]:
    """A field of a batch as its column and its rows.

    Args:
        name: Field.
        values: Array, tensor, or a sequence of numbers, str, bytes or arrays; one entry a row.

    Returns:
        The column, None for an empty list. And its rows: an array in native byte order, with bfloat16 as int16; or a
        list of str, bytes or arrays. Arrays may be views of ``values``.

    Raises:
        SchemaError: It is neither numbers nor text nor bytes by row, or rows differ in what all have to share.
    """
    if isinstance(values, torch.Tensor):
        return _numbers(name, *_unpacked(values))
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        values = np.asarray(values)
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "SUTO":
            return _numbers(name, values)
        is_bytes = values.dtype.kind == "S"
        values = [text.decode() for text in values.tolist()] if is_bytes else values.tolist()
    if not len(values):
        return None, values
    first = values[0]
    if isinstance(first, str):
        _check_alike(name, values, str)
        return Column("string", "uint8"), list(values)
    if isinstance(first, bytes | bytearray | memoryview):
        _check_alike(name, values, bytes, bytearray, memoryview)
        return Column("bytes", "uint8"), [bytes(value) for value in values]
    if isinstance(first, np.ndarray | torch.Tensor) and np.ndim(first) > 0:
        return _ragged(name, values)
    try:
        return _numbers(name, np.asarray(values))
    except ValueError as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(
            f"field {name!r}: its rows differ in length; give each as an array, such as np.array(row)"
        ) from error


def _unpacked(tensor: torch.Tensor) -> tuple[npt.NDArray[Any], str]:
    """The values of a tensor, and the name of their type."""
    on_cpu = tensor.detach().cpu()
    if on_cpu.dtype == torch.bfloat16:
        return on_cpu.contiguous().view(torch.int16).numpy(), "bfloat16"
    return on_cpu.numpy(), str(on_cpu.dtype).removeprefix("torch.")


def _numbers(name: str, values: npt.NDArray[Any], dtype: str | None = None) -> tuple[Column, npt.NDArray[Any]]:
    if values.dtype.kind not in "biufc" or values.ndim == 0:
        raise SchemaError(f"field {name!r} is {values.dtype} {list(values.shape)}; numbers, text or bytes by row fit")
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return Column("tensor", dtype or native.dtype.name, native.shape[1:]), native


def _ragged(name: str, rows: Sequence[Any]) -> tuple[Column, list[npt.NDArray[Any]]]:
    pairs = [_unpacked(row) if isinstance(row, torch.Tensor) else (np.asarray(row), "") for row in rows]
    found = [_numbers(name, values, dtype or None) for values, dtype in pairs]
    first = found[0][0]
    for number, (column, _) in enumerate(found):
        if column != first:
            raise SchemaError(
                f"field {name!r}: row {number} of this batch is {_row_text(column, rows[number])}, but row 0 is "
                f"{_row_text(first, rows[0])}; only the length of the first axis may differ"
            )
    return Column("ragged", first.dtype, first.shape), [values for _, values in found]


def _row_text(column: Column, row: Any) -> str:
    return f"{column.dtype} {list(np.shape(row))}"


def _check_alike(name: str, values: Sequence[Any], *kinds: type) -> None:
    for row, value in enumerate(values):
        if not isinstance(value, kinds):
            raise SchemaError(
                f"field {name!r}: row {row} of this batch is {value!r}, but row 0 is {type(values[0]).__name__}; all "
                "rows of a field are of one type, and nothing stands for a missing text: write '' instead"
            )
