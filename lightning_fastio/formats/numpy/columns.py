"""Fields of .npy and .npz files: how stored arrays become tensors and text, and which cannot.

Numbers keep their width, in native byte order; uint16, uint32 and uint64 are widened. ``U`` and ``S`` arrays become
str.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.base import FieldLayout
from lightning_fastio.formats.mapped import MappedArray
from lightning_fastio.formats.numpy.stored import StoredArray, describe
from lightning_fastio.formats.pages import Int64Array
from lightning_fastio.schema import FieldSpec

Values: TypeAlias = "torch.Tensor | list[torch.Tensor] | list[str] | list[bytes]"

_LARGE_BYTES = 16 << 20


class Column(ABC):
    """One field of one file or of files side by side. Thread-safe and picklable."""

    name: str
    spec: FieldSpec
    num_rows: int
    nbytes: int

    @abstractmethod
    def read(self, rows: Int64Array, out: torch.Tensor | None) -> Values:
        """The rows; those of one shape in the buffer ``out``."""

    @abstractmethod
    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon."""

    @abstractmethod
    def layout(self) -> FieldLayout:
        """How the field is stored and read."""

    @abstractmethod
    def close(self) -> None:
        """Let go of mapped and decoded bytes."""


class TensorColumn(Column):
    """Numbers of one shape in every row."""

    def __init__(
        self,
        name: str,
        array: StoredArray,
        *,
        widen_unsigned: bool = True,
        window: int | None = None,
        stride: int | None = None,
    ) -> None:
        self.name = name
        self._array = array
        self.rows: MappedArray = array.rows(window, stride)
        self.num_rows, self.nbytes = self.rows.num_rows, array.nbytes
        self.spec = FieldSpec(delivered_dtype(array.dtype, widen_unsigned=widen_unsigned), self.rows.row_shape)
        self._window = window

    def read(self, rows: Int64Array, out: torch.Tensor | None) -> torch.Tensor:
        """The rows in ``out``."""
        assert out is not None
        self.rows.read(rows, out.numpy())
        return out

    def read_into(self, rows: Int64Array, out: torch.Tensor, positions: Int64Array) -> None:
        """Row ``rows[i]`` at place ``positions[i]`` of ``out``."""
        self.rows.read(rows, out.numpy(), positions)

    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon."""
        self.rows.will_need(rows)

    def layout(self) -> FieldLayout:
        """How the field is stored and read."""
        hint = ""
        if self.rows.order == "F":
            hint = (
                f"{self._array.path}: in Fortran order each row is scattered over the whole file; "
                "np.save(path, np.ascontiguousarray(array)) writes rows in one piece"
            )
        elif self._array.container.startswith("compressed") and self.nbytes > _LARGE_BYTES:
            hint = (
                f"{self._array.path}: {self.name!r} is compressed, and each process decodes its "
                f"{self.nbytes / 1e6:.0f} MB whole; np.savez, or fastio convert, writes arrays that are mapped"
            )
        windows = f", windows of {self._window}" if self._window else ""
        return FieldLayout(self.name, describe(self._array), self._array.read_path + windows, hint)

    def close(self) -> None:
        """Let go of the bytes."""
        self.rows.close()


class TextColumn(Column):
    """Text of fixed width: arrays of ``U`` or, as UTF-8, ``S``."""

    def __init__(self, name: str, array: StoredArray) -> None:
        self.name = name
        self.spec = FieldSpec(None, kind="string")
        self._array, self._rows = array, array.rows()
        self.num_rows, self.nbytes = self._rows.num_rows, array.nbytes

    def read(self, rows: Int64Array, out: torch.Tensor | None) -> list[str]:
        """A str for each row, without the padding."""
        try:
            texts = self._rows.take(rows).tolist()
            return texts if self._array.dtype.kind == "U" else [text.decode() for text in texts]
        except ValueError as error:  # UnicodeDecodeError is one.
            raise FormatError(
                f"{self._array.path}: field {self.name!r} holds text that is not Unicode ({error}); "
                "store other bytes as an array of uint8"
            ) from error

    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon."""
        self._rows.will_need(rows)

    def layout(self) -> FieldLayout:
        """How the field is stored and read."""
        return FieldLayout(self.name, describe(self._array), f"{self._array.read_path}, to str")

    def close(self) -> None:
        """Let go of the bytes."""
        self._rows.close()


def delivered_dtype(stored: np.dtype[Any], *, widen_unsigned: bool) -> torch.dtype:
    """The torch type of stored numbers."""
    if stored.kind == "u" and stored.itemsize > 1 and widen_unsigned:
        return torch.int32 if stored.itemsize == 2 else torch.int64
    return torch.from_numpy(np.empty(0, stored.newbyteorder("="))).dtype


def why_not(array: StoredArray) -> str:
    """Why an array cannot be a field, and what to do about it; empty when it can."""
    dtype = array.dtype
    if dtype.hasobject:
        return "pickled Python objects, which could run code and are never loaded; save arrays of numbers or text"
    if not array.shape:
        return "a single value, without rows"
    if dtype.kind in "mM":
        return "times, for which torch has no type; save array.astype('int64')"
    if dtype.names is not None:
        return f"records; save each member as an array of its own: array[{dtype.names[0]!r}]"
    if dtype.kind in "SU":
        return (
            "" if len(array.shape) == 1 and dtype.itemsize else "text of several values in a row; one a row can be read"
        )
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return "wider than torch's floats; save array.astype('float64')"
    return "" if dtype.kind in "biufc" else f"of the type {dtype}, which torch has not; save array.view('uint8')"
