"""Rows of one HDF5 dataset or sparse group: what each way of reading offers, and windows over any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import FormatError
from lightning_fastio.schema import Batch, FieldSpec

Int64Array: TypeAlias = npt.NDArray[np.int64]


class Source(Protocol):
    """Rows of one dataset, which gives one field or several."""

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The fields that the dataset gives."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in memory, estimated where rows vary in length."""
        ...

    @property
    def bounds(self) -> Int64Array | None:
        """Row boundaries of the blocks that decode whole; None when every row costs the same."""
        ...

    def read(self, rows: Int64Array, out: Batch, positions: Int64Array | None = None) -> Batch:
        """Checked rows of all fields.

        Args:
            rows: Row numbers.
            out: A buffer for each field that is a tensor; lists for the others too if ``positions`` are given.
            positions: Ascending places of the rows in larger buffers; one after another by default.
        """
        ...

    def announce(self, rows: Int64Array) -> None:
        """Start the I/O or decoding of rows."""
        ...

    def close(self) -> None:
        """Release maps, handles and decoded blocks."""
        ...


class WindowedDataset:
    """Overlapping windows of rows as rows."""

    def __init__(self, rows: Source, window: int, stride: int) -> None:
        """Set up.

        Args:
            rows: The single rows.
            window: Rows of a window.
            stride: Rows from the start of one window to the start of the next.

        Raises:
            FormatError: Rows differ in length, so that windows have no shape.
        """
        for name, spec in rows.fields.items():
            if spec.kind != "tensor":
                raise FormatError(f"window= takes rows of numbers of one shape, but {name!r} is {spec}")
        self._rows, self._window, self._stride = rows, window, stride
        self.fields = {name: replace(spec, shape=(window, *spec.shape)) for name, spec in rows.fields.items()}
        self.num_rows = max(0, (rows.num_rows - window) // stride + 1)
        self.num_bytes = rows.num_bytes
        self.bounds: Int64Array | None = None
        if rows.bounds is not None:  # A window belongs to the block of its first row.
            starts = np.unique(-(-rows.bounds[:-1] // stride))
            self.bounds = np.append(starts[starts < self.num_rows], self.num_rows)

    def read(self, rows: Int64Array, out: Batch, positions: Int64Array | None = None) -> Batch:
        """Windows into the buffers in ``out``; see `Source.read`."""
        flat: Batch = {name: out[name].flatten(0, 1) for name in self.fields}  # type: ignore[union-attr]
        places = (
            None if positions is None else (positions[:, None] * self._window + np.arange(self._window)).reshape(-1)
        )
        self._rows.read(self._single(rows), flat, places)
        return {name: out[name] for name in self.fields}

    def announce(self, rows: Int64Array) -> None:
        """Decode the blocks of windows ahead."""
        self._rows.announce(self._single(rows))

    def close(self) -> None:
        """Close the rows."""
        self._rows.close()

    def _single(self, windows: Int64Array) -> Int64Array:
        return (windows[:, None] * self._stride + np.arange(self._window)).reshape(-1)
