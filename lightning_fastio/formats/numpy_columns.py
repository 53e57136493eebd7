"""Fields of .npy and .npz files: how stored arrays become tensors, text, bytes, rows of varying length, sparse rows.

Numbers keep their width, in native byte order; uint16, uint32 and uint64 are widened. ``U`` and ``S`` arrays become
str. Rows of varying length lie end to end in one array, with an array ``NAME.offsets`` that says where each begins; so
do text and bytes that this package wrote. SciPy's sparse matrices are one field.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import CorruptFileError, FormatError
from lightning_fastio.formats.base import FieldLayout
from lightning_fastio.formats.mapped import Int64Array
from lightning_fastio.formats.numpy_files import StoredArray, describe
from lightning_fastio.schema import FieldSpec, Kind

RaggedPolicy: TypeAlias = Literal["auto", "list", "pad", "error"]
Values: TypeAlias = "torch.Tensor | list[torch.Tensor] | list[str] | list[bytes]"

_SCAN_ROWS = 1 << 20
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
        self._rows = array.rows(window, stride)
        self.num_rows, self.nbytes = self._rows.num_rows, array.nbytes
        self.spec = FieldSpec(delivered_dtype(array.dtype, widen_unsigned=widen_unsigned), self._rows.row_shape)
        self._window = window

    def read(self, rows: Int64Array, out: torch.Tensor | None) -> torch.Tensor:
        """The rows in ``out``."""
        assert out is not None
        self._rows.read(rows, out.numpy())
        return out

    def read_into(self, rows: Int64Array, out: torch.Tensor, positions: Int64Array) -> None:
        """Row ``rows[i]`` at place ``positions[i]`` of ``out``."""
        self._rows.read(rows, out.numpy(), positions)

    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon."""
        self._rows.will_need(rows)

    def layout(self) -> FieldLayout:
        """How the field is stored and read."""
        path, hint = "memory map", ""
        if self._rows.order == "F":
            hint = (
                f"{self._array.path}: in Fortran order each row is scattered over the whole file; "
                "np.save(path, np.ascontiguousarray(array)) writes rows in one piece"
            )
        elif self._array.container.startswith("compressed"):
            path = "memory, decoded whole once in each process"
            if self.nbytes > _LARGE_BYTES:
                hint = (
                    f"{self._array.path}: {self.name!r} is compressed, and each process decodes its "
                    f"{self.nbytes / 1e6:.0f} MB whole; np.savez, or fastio convert, writes arrays that are mapped"
                )
        windows = f", windows of {self._window}" if self._window else ""
        return FieldLayout(self.name, describe(self._array), path + windows, hint)

    def close(self) -> None:
        """Let go of the bytes."""
        self._rows.close()


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
        return FieldLayout(self.name, describe(self._array), "memory map, to str")

    def close(self) -> None:
        """Let go of the bytes."""
        self._rows.close()


class Offsets:
    """Where the rows of varying length begin and end in the array that holds them end to end."""

    def __init__(self, array: StoredArray, num_items: int) -> None:
        """Check all offsets; they are not kept in memory.

        Raises:
            CorruptFileError: They do not rise from 0 to the number of items.
        """
        if array.dtype.kind not in "iu" or len(array.shape) != 1 or array.shape[0] == 0:
            raise CorruptFileError(f"{array.path}: {array.name!r} is {array.dtype} {array.shape}, no list of offsets")
        self._rows = array.rows()
        self._where = f"{array.path}: {array.name!r}"
        self._num_items = num_items
        self.num_rows = array.shape[0] - 1
        self.shortest = self.longest = 0
        """Lengths of rows."""
        self._survey()

    def _survey(self) -> None:
        shortest, longest, end = self._num_items, 0, 0
        for first in range(0, self.num_rows, _SCAN_ROWS):
            starts, lengths = self.of(np.arange(first, min(first + _SCAN_ROWS, self.num_rows)))
            if starts[0] != end or (starts[1:] != (starts + lengths)[:-1]).any():
                raise CorruptFileError(f"{self._where} does not rise from 0")
            shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
            end = int(starts[-1] + lengths[-1])
        if end != self._num_items:
            raise CorruptFileError(f"{self._where} ends at {end}, but there are {self._num_items} items")
        self.shortest, self.longest = min(shortest, longest), longest

    def of(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """First item and number of items of each row."""
        starts, ends = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        self._rows.read(rows, starts)
        self._rows.read(rows + 1, ends)
        if len(rows) and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= self._num_items):
            raise CorruptFileError(f"{self._where} has rows that end before they begin or outside the array")
        return starts, ends - starts

    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon."""
        self._rows.will_need(rows)

    def close(self) -> None:
        """Let go of the bytes."""
        self._rows.close()


class RaggedColumn(Column):
    """Rows of varying length: tensors, text or bytes."""

    def __init__(
        self,
        name: str,
        array: StoredArray,
        offsets: Offsets,
        kind: Kind,
        *,
        pad: bool = False,
        widen_unsigned: bool = True,
    ) -> None:
        self.name = name
        self.num_rows, self.nbytes = offsets.num_rows, array.nbytes
        dtype = delivered_dtype(array.dtype, widen_unsigned=widen_unsigned)
        self.spec = FieldSpec(dtype, array.shape[1:], "ragged") if kind == "ragged" else FieldSpec(None, kind=kind)
        self._array, self._items, self._offsets = array, array.rows(), offsets
        self._dtype, self._pad = dtype, pad

    def read(self, rows: Int64Array, out: torch.Tensor | None) -> Values:
        """A tensor, str or bytes object for each row; or one padded tensor."""
        starts, lengths = self._offsets.of(rows)
        items = torch.empty((int(lengths.sum()), *self._array.shape[1:]), dtype=self._dtype)
        self._items.read(ranges(starts, lengths), items.numpy())
        if self.spec.kind == "ragged":
            return (
                padded(items, lengths) if self._pad else [row.clone() for row in torch.split(items, lengths.tolist())]
            )
        data, ends = items.numpy().tobytes(), np.cumsum(lengths)
        pieces = [data[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
        if self.spec.kind == "bytes":
            return pieces
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{self._array.path}: field {self.name!r} holds text that is not UTF-8") from error

    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon; where they begin is looked up at once."""
        starts, lengths = self._offsets.of(rows)
        self._items.will_need(starts, lengths)

    def layout(self) -> FieldLayout:
        """How the field is stored and read."""
        return FieldLayout(self.name, f"{describe(self._array)}, end to end, with offsets", "memory map")

    def close(self) -> None:
        """Let go of the bytes."""
        self._items.close()
        self._offsets.close()


class SparseColumn(Column):
    """Rows of a SciPy CSR matrix, dense or as sparse CSR tensors."""

    def __init__(
        self, name: str, arrays: Mapping[str, StoredArray], *, sparse: bool, widen_unsigned: bool = True
    ) -> None:
        """Check the parts that ``scipy.sparse.save_npz`` writes.

        Raises:
            FormatError: The matrix is stored otherwise than by rows.
            CorruptFileError: The parts do not fit together.
        """
        data, indices = arrays["data"], arrays["indices"]
        self._where = f"{data.path}: sparse matrix"
        stored = str(arrays["format"].whole().astype("U"))
        if stored != "csr":
            raise FormatError(
                f"{self._where} is {stored!r}, so that rows cannot be read; save_npz(path, matrix.tocsr())"
            )
        num_rows, self._num_columns = map(int, arrays["shape"].whole())
        self._offsets = Offsets(arrays["indptr"], indices.shape[0])
        if self._offsets.num_rows != num_rows or data.shape != indices.shape:
            raise CorruptFileError(f"{self._where}: its data, indices, indptr and shape do not fit together")
        self.name, self.num_rows, self.nbytes = name, num_rows, data.nbytes
        kind: Kind = "sparse" if sparse else "tensor"
        self.spec = FieldSpec(delivered_dtype(data.dtype, widen_unsigned=widen_unsigned), (self._num_columns,), kind)
        self._data, self._indices, self._values = data.rows(), indices.rows(), data

    def read(self, rows: Int64Array, out: torch.Tensor | None) -> torch.Tensor:
        """The rows, dense in ``out`` or as a new sparse tensor."""
        starts, lengths = self._offsets.of(rows)
        entries = ranges(starts, lengths)
        values, columns = torch.empty(len(entries), dtype=self.spec.dtype), torch.empty(len(entries), dtype=torch.int64)
        self._data.read(entries, values.numpy())
        self._indices.read(entries, columns.numpy())
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < self._num_columns:
            raise CorruptFileError(f"{self._where} has a column number outside 0 to {self._num_columns - 1}")
        if self.spec.kind == "sparse":
            row_starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
            return torch.sparse_csr_tensor(row_starts, columns, values, (len(rows), self._num_columns))
        assert out is not None
        places = torch.from_numpy(np.repeat(np.arange(len(rows)) * self._num_columns, lengths)) + columns
        # Entries for the same place add up, as they do in SciPy.
        out.zero_().view(-1).index_put_((places,), values, accumulate=True)
        return out

    def will_need(self, rows: Int64Array) -> None:
        """Hint that rows will be read soon."""
        starts, lengths = self._offsets.of(rows)
        self._data.will_need(starts, lengths)
        self._indices.will_need(starts, lengths)

    def layout(self) -> FieldLayout:
        """How the field is stored and read."""
        stored = f"{self._values.dtype} ({self.num_rows}, {self._num_columns}), SciPy CSR"
        return FieldLayout(
            self.name, stored, "memory map, to sparse CSR" if self.spec.kind == "sparse" else "memory map"
        )

    def close(self) -> None:
        """Let go of the bytes."""
        for part in (self._data, self._indices, self._offsets):
            part.close()


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


def ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The numbers ``start`` to ``start + length - 1`` of all ranges, one after another."""
    ends = np.cumsum(lengths)
    numbers: Int64Array = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def padded(items: torch.Tensor, lengths: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows of varying length that lie end to end, as one tensor with zeros behind their ends."""
    longest = int(lengths.max()) if len(lengths) else 0
    out = torch.zeros((len(lengths), longest, *items.shape[1:]), dtype=items.dtype)
    places = ranges(np.arange(len(lengths), dtype=np.int64) * longest, lengths)
    out.view(-1, *items.shape[1:])[torch.from_numpy(places)] = items
    return out


def open_column(
    name: str,
    arrays: Mapping[str, StoredArray],
    kind: Kind | None,
    *,
    ragged: RaggedPolicy,
    widen_unsigned: bool,
    window: int | None,
    stride: int | None,
) -> Column:
    """The column of a field that `why_not` finds nothing against.

    Args:
        name: Name of the array.
        arrays: All arrays of its file or folder, among them maybe ``NAME.offsets``.
        kind: What the writer noted.
        ragged: What rows of varying length become.
        widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64.
        window: Items of a window, if windows are rows.
        stride: Items from one window to the next.

    Raises:
        FormatError: The field has no windows, or its rows differ in length and that is to be refused.
        CorruptFileError: Its offsets are wrong.
    """
    array, offsets = arrays[name], arrays.get(f"{name}.offsets")
    if offsets is None and array.dtype.kind not in "SU":
        return TensorColumn(name, array, widen_unsigned=widen_unsigned, window=window, stride=stride)
    if window is not None:
        raise FormatError("text or rows of varying length, which have no windows")
    if offsets is None:
        return TextColumn(name, array)
    found = Offsets(offsets, array.shape[0])
    kind = kind or "ragged"
    if kind == "ragged" and found.shortest == found.longest and ragged in ("auto", "error"):
        shape = (found.num_rows, found.longest, *array.shape[1:])
        equal = StoredArray(name, array.source, array.offset, array.dtype, shape, array.order, array.container)
        return TensorColumn(name, equal, widen_unsigned=widen_unsigned)
    if kind == "ragged" and ragged == "error":
        raise FormatError(
            f"rows of {found.shortest} to {found.longest} items; ragged='list' or 'pad' delivers such rows"
        )
    return RaggedColumn(name, array, found, kind, pad=ragged == "pad", widen_unsigned=widen_unsigned)
