"""From the values of a batch to Arrow arrays: how each field is stored in Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lightning_fastio.errors import FormatError, SchemaError
from lightning_fastio.formats.base import check_rows_alike
from lightning_fastio.formats.parquet.elements import DTYPE_KEY, SHAPE_KEY, TENSOR_DTYPES
from lightning_fastio.formats.parquet.values import offsets_of


@dataclass(frozen=True)
class StoredField:
    """How a field is stored, fixed by the first batch."""

    name: str
    kind: str
    """``scalar``, ``tensor``, ``ragged``, ``string`` or ``bytes``."""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.dtype, str(list(self.shape)) if self.shape else "") if part)

    @property
    def arrow(self) -> pa.Field:
        """Name, type and, for tensors, element type and shape."""
        if self.kind == "string":
            return pa.field(self.name, pa.string(), nullable=False)
        if self.kind == "bytes":
            return pa.field(self.name, pa.binary(), nullable=False)
        if self.kind == "tensor":
            width = TENSOR_DTYPES[self.dtype].itemsize * prod(self.shape)
            metadata = {DTYPE_KEY: self.dtype.encode(), SHAPE_KEY: json.dumps(self.shape).encode()}
            return pa.field(self.name, pa.binary(width), nullable=False, metadata=metadata)
        type_ = pa.from_numpy_dtype(np.dtype(self.dtype))
        if self.kind == "ragged":
            for size in reversed(self.shape):
                type_ = pa.list_(pa.field("element", type_, nullable=False), size)
            type_ = pa.list_(pa.field("element", type_, nullable=False))
        return pa.field(self.name, type_, nullable=False)

    def array(self, values: Any) -> pa.Array:
        """Values that `describe` has returned, as Arrow stores them."""
        if self.kind in ("string", "bytes"):
            return pa.array(values, self.arrow.type)
        if self.kind == "scalar":
            return pa.array(values, self.arrow.type)
        if self.kind == "tensor":
            return pa.FixedSizeBinaryArray.from_buffers(self.arrow.type, len(values), [None, pa.py_buffer(values)])
        offsets = offsets_of(np.array([len(row) for row in values], np.int64))
        elements = np.concatenate([*values, np.empty((0, *self.shape), self.dtype)])
        array, type_ = pa.array(elements.reshape(-1)), self.arrow.type.value_type
        for size in reversed(self.shape):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array.cast(type_)).cast(self.arrow.type)


def describe(name: str, values: Any) -> tuple[StoredField, Any]:
    """How values will be stored, and a private copy of them: a contiguous array, or a list.

    Args:
        name: Field.
        values: Array, tensor, list of str, list of bytes, list of arrays, or list of numbers; one entry a row.

    Raises:
        FormatError: The values fit no Parquet column.
        SchemaError: Ragged rows differ in dtype or in the part of their shape that has to be equal.
    """
    if isinstance(values, torch.Tensor):
        tensor = values.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _stored(name, dtype, (tensor.view(torch.int16) if dtype == "bfloat16" else tensor).numpy().copy())
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUS":
        native = np.array(values, values.dtype.newbyteorder("="), order="C")
        return _stored(name, native.dtype.name, native)
    rows = list(values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind in "US" else values)
    if rows and isinstance(rows[0], str):
        check_rows_alike(name, rows, str)
        return StoredField(name, "string"), rows
    if rows and isinstance(rows[0], bytes):
        check_rows_alike(name, rows, bytes)
        return StoredField(name, "bytes"), rows
    if rows and isinstance(rows[0], (np.ndarray, torch.Tensor)) and rows[0].ndim:
        return _ragged(name, rows)
    numbers = np.asarray(rows)
    if numbers.dtype.kind not in "biufc":
        raise FormatError(f"field {name!r} holds {type(rows[0]).__name__}, which fits no Parquet column")
    return _stored(name, numbers.dtype.name, numbers)


def _stored(name: str, dtype: str, values: npt.NDArray[Any]) -> tuple[StoredField, npt.NDArray[Any]]:
    if dtype not in TENSOR_DTYPES:
        raise FormatError(f"field {name!r} has dtype {dtype}; expected one of {', '.join(TENSOR_DTYPES)}")
    if values.ndim == 0:
        raise SchemaError(f"field {name!r} is a single value; expected one entry for each row")
    shape = values.shape[1:]
    if not prod(shape):
        raise FormatError(f"field {name!r} has samples of shape {list(shape)}, which hold no element")
    is_scalar = shape == () and dtype != "bfloat16" and values.dtype.kind in "biuf"
    return StoredField(name, "scalar" if is_scalar else "tensor", dtype, shape), values


def _ragged(name: str, rows: Sequence[Any]) -> tuple[StoredField, list[npt.NDArray[Any]]]:
    arrays = [np.array(row.detach().cpu() if isinstance(row, torch.Tensor) else row, order="C") for row in rows]
    first = arrays[0]
    for number, array in enumerate(arrays):
        if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
            raise SchemaError(
                f"field {name!r}, row {number} of the batch is {array.dtype} {list(array.shape)}, but the first row is "
                f"{first.dtype} {list(first.shape)}; only the first size may differ"
            )
    if first.dtype.kind not in "biuf":
        raise FormatError(f"field {name!r} has rows of {first.dtype}, which no Parquet list holds")
    return StoredField(name, "ragged", first.dtype.name, first.shape[1:]), arrays
