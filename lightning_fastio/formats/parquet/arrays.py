"""From the rows of a batch to Arrow arrays: how each field is stored in Parquet."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_fastio.formats.parquet.elements import DTYPE_KEY, SHAPE_KEY, TENSOR_DTYPES
from lightning_fastio.formats.parquet.values import offsets_of
from lightning_fastio.formats.writing import Column


def refusal(column: Column) -> str | None:
    """Why Parquet cannot store a field; None if it can."""
    if column.dtype not in TENSOR_DTYPES:
        return f"Parquet stores {', '.join(TENSOR_DTYPES)}"
    if not prod(column.shape):
        return "its rows hold no element"
    if column.kind == "ragged" and np.dtype(column.dtype).kind not in "biuf":
        return "no Parquet list holds them"
    return None


def is_scalar(column: Column) -> bool:
    """Whether a field is an ordinary column of numbers, not one of tensors as bytes."""
    return column.kind == "tensor" and not column.shape and not column.dtype.startswith(("bfloat", "complex"))


def arrow_field(name: str, column: Column) -> pa.Field:
    """Name, type and, for tensors, element type and shape."""
    metadata = None
    if column.kind == "string":
        type_ = pa.string()
    elif column.kind == "bytes":
        type_ = pa.binary()
    elif column.kind == "ragged":
        type_ = pa.from_numpy_dtype(np.dtype(column.dtype))
        for size in reversed(column.shape):
            type_ = pa.list_(pa.field("element", type_, nullable=False), size)
        type_ = pa.list_(pa.field("element", type_, nullable=False))
    elif is_scalar(column):
        type_ = pa.from_numpy_dtype(np.dtype(column.dtype))
    else:
        type_ = pa.binary(TENSOR_DTYPES[column.dtype].itemsize * prod(column.shape))
        metadata = {DTYPE_KEY: column.dtype.encode(), SHAPE_KEY: json.dumps(column.shape).encode()}
    return pa.field(name, type_, nullable=False, metadata=metadata)


def arrow_array(column: Column, type_: pa.DataType, rows: Any) -> pa.Array:
    """Rows as Arrow stores them; tensors are views of theirs."""
    if column.kind in ("string", "bytes") or is_scalar(column):
        return pa.array(rows, type_)
    if column.kind == "tensor":
        return pa.FixedSizeBinaryArray.from_buffers(type_, len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))])
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    elements = np.concatenate([*rows, np.empty((0, *column.shape), column.dtype)])
    array, element = pa.array(elements.reshape(-1)), type_.value_type
    for size in reversed(column.shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array.cast(element)).cast(type_)
