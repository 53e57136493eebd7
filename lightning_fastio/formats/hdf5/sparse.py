"""Compressed sparse row matrices in HDF5 groups, as AnnData and 10x files hold them: one field each.

A group has ``data``, ``indices`` and ``indptr``, and its shape as an attribute or a dataset. 10x files store a matrix
of genes by cells in compressed columns, so that a row of the field is a cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import CorruptFileError, FormatError
from lightning_fastio.formats.csr import csr_tensor
from lightning_fastio.formats.hdf5.source import Source
from lightning_fastio.schema import Batch, FieldSpec

Int64Array = npt.NDArray[np.int64]


class SparseRows:
    """Rows of a sparse matrix, dense or as sparse CSR tensors."""

    def __init__(self, name: str, group: Any, open_column: Callable[[Any, str], Source], *, sparse: bool) -> None:
        """Read the row starts and find the ways to the values.

        Args:
            name: Field name.
            group: The open group.
            open_column: Makes the source of one of its datasets, whose only field has the given name.
            sparse: Deliver sparse CSR tensors.

        Raises:
            FormatError: The matrix is stored by columns, or its shape is unknown.
            CorruptFileError: The parts of the matrix do not fit together.
        """
        where = f"{group.file.filename}: sparse matrix {name!r}"
        self.num_rows, self.num_columns = _shape(group, where)
        self._where = where
        self._starts: Int64Array = np.asarray(group["indptr"][:], np.int64)
        num_stored = len(group["data"])
        if len(group["indices"]) != num_stored:
            raise CorruptFileError(f"{where} has {num_stored} values but {len(group['indices'])} column numbers")
        if self._starts[0] != 0 or (np.diff(self._starts) < 0).any() or self._starts[-1] > num_stored:
            raise CorruptFileError(f"{where}: its indptr does not rise from 0 to at most {num_stored}")
        self._values = open_column(group["data"], "data")
        self._columns = open_column(group["indices"], "indices")
        self.num_bytes = self._values.num_bytes + self._columns.num_bytes
        self._name = name
        self.spec = FieldSpec(
            self._values.fields["data"].dtype, (self.num_columns,), kind="sparse" if sparse else "tensor"
        )
        self.fields: dict[str, FieldSpec] = {name: self.spec}

    @property
    def bounds(self) -> Int64Array | None:
        """Rows whose values begin in the same block; None where values are mapped."""
        if self._values.bounds is None:
            return None
        cuts = np.searchsorted(self._starts[:-1], self._values.bounds[:-1])
        return np.unique(np.concatenate([[0], cuts[cuts < self.num_rows], [self.num_rows]]))

    def read(self, rows: Int64Array, out: Batch, positions: Int64Array | None = None) -> Batch:
        """Rows, dense into the buffer in ``out`` or as a new sparse tensor; see `Source.read`."""
        lengths = self._starts[rows + 1] - self._starts[rows]
        values, columns = self._entries(rows, lengths)
        if self.spec.kind == "sparse":
            row_starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
            size = (len(rows), self.num_columns)
            return {self._name: csr_tensor(row_starts, columns, values, size)}
        dense: torch.Tensor = out[self._name]  # type: ignore[assignment]
        targets = np.arange(len(rows)) if positions is None else positions
        dense[torch.from_numpy(targets)] = 0
        places = torch.from_numpy(np.repeat(targets * self.num_columns, lengths)) + columns
        # Entries for the same place add up, as they do in SciPy.
        dense.view(-1).index_add_(0, places, values)
        return {self._name: dense}

    def announce(self, rows: Int64Array) -> None:
        """Start the I/O or decoding of the values of rows."""
        entries = _ranges(self._starts[rows], self._starts[rows + 1] - self._starts[rows])
        self._values.announce(entries)
        self._columns.announce(entries)

    def close(self) -> None:
        """Close both columns."""
        self._values.close()
        self._columns.close()

    def _entries(self, rows: Int64Array, lengths: Int64Array) -> tuple[torch.Tensor, torch.Tensor]:
        entries = _ranges(self._starts[rows], lengths)
        batch: Batch = {
            "data": torch.empty(len(entries), dtype=self._values.fields["data"].dtype),
            "indices": torch.empty(len(entries), dtype=self._columns.fields["indices"].dtype),
        }
        self._values.read(entries, batch)
        self._columns.read(entries, batch)
        columns: torch.Tensor = batch["indices"].to(torch.int64)  # type: ignore[union-attr]
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < self.num_columns:
            raise CorruptFileError(f"{self._where} has a column number outside 0 to {self.num_columns - 1}")
        return batch["data"], columns  # type: ignore[return-value]


def _shape(group: Any, where: str) -> tuple[int, int]:
    """Rows and columns as delivered."""
    stored = group.attrs.get("shape", group.attrs.get("h5sparse_shape"))
    if stored is None and "shape" in group:
        stored = group["shape"][:]
    if stored is None or len(stored) != 2:
        raise FormatError(f"{where} has no 'shape' of two numbers as an attribute or a dataset")
    rows, columns = int(stored[0]), int(stored[1])
    encoding = str(group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", "")))
    num_starts = len(group["indptr"])
    if "csc" in encoding:
        raise FormatError(f"{where} is stored by columns (csc), so that rows cannot be read; save it as csr: X.tocsr()")
    if num_starts == rows + 1:
        return rows, columns
    if num_starts == columns + 1 and not encoding:  # 10x: genes by cells, in compressed columns.
        return columns, rows
    raise CorruptFileError(f"{where} has the shape {(rows, columns)}, but {num_starts} row starts")


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The numbers ``start`` to ``start + length - 1`` of all ranges, one after another."""
    ends = np.cumsum(lengths)
    numbers: Int64Array = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return numbers
