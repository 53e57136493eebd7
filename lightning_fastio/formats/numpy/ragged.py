"""Fields of .npy and .npz files whose rows lie end to end, with offsets: text, bytes, ragged and sparse rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import CorruptFileError, FormatError
from lightning_fastio.formats.base import FieldLayout
from lightning_fastio.formats.csr import csr_tensor
from lightning_fastio.formats.numpy.columns import Column, Values, delivered_dtype
from lightning_fastio.formats.numpy.stored import StoredArray, describe
from lightning_fastio.formats.pages import Int64Array
from lightning_fastio.schema import FieldSpec, Kind

_SCAN_ROWS = 1 << 20


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
        return FieldLayout(self.name, f"{describe(self._array)}, end to end, with offsets", self._array.read_path)

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
            return csr_tensor(row_starts, columns, values, (len(rows), self._num_columns))
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
            self.name, stored, self._values.read_path + (", to sparse CSR" if self.spec.kind == "sparse" else "")
        )

    def close(self) -> None:
        """Let go of the bytes."""
        for part in (self._data, self._indices, self._offsets):
            part.close()


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
