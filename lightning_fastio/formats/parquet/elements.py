"""What stands inside all lists of a column: its torch dtype and shape, and its values as NumPy arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.parquet.schema import StoredColumn, is_string

DTYPE_KEY, SHAPE_KEY = b"fastio.dtype", b"fastio.shape"
"""Field metadata of a tensor column: element type such as ``float32`` (little-endian) and shape such as ``[3, 4]``."""

TENSOR_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
"""Element types of tensor columns; all but bfloat16 have the same name in NumPy."""

_INT64_MAX = np.iinfo(np.int64).max
_WIDENED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def element_of(
    stored: StoredColumn, type_: pa.DataType, *, widen_unsigned: bool
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape as delivered.

    Args:
        stored: The column.
        type_: Its type inside all lists.
        widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64.

    Raises:
        FormatError: No tensor holds this type.
    """
    dtype, shape = _stored_element(stored, type_)
    return (_WIDENED.get(dtype, dtype) if widen_unsigned else dtype), shape


def element_values(
    array: pa.Array, stored: StoredColumn, dtype: torch.dtype | None, place: Callable[[int], str]
) -> npt.NDArray[Any]:
    """Values of an array without nulls, as views where their bytes are what they should be.

    Args:
        array: Elements.
        stored: The column that they belong to.
        dtype: Type to deliver; bfloat16 is held as uint16.
        place: Position to words for messages.

    Raises:
        FormatError: A uint64 does not fit in int64.
    """
    values = _numbers(array, stored)
    if dtype == torch.bfloat16:
        return values
    target = torch.empty(0, dtype=dtype).numpy().dtype
    if values.dtype == np.uint64 and target == np.int64 and values.max(initial=0) > _INT64_MAX:
        row = int(np.argmax((values > _INT64_MAX).reshape(len(values), -1).any(axis=1)))
        raise FormatError(
            f"{place(row)}: {values.max()} does not fit in int64; pass widen_unsigned=False to get torch.uint64"
        )
    return values.astype(target, copy=False)


def tensor_layout(name: str, metadata: Mapping[bytes, bytes]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Element type and sample shape out of the field metadata of a tensor column."""
    try:
        dtype = TENSOR_DTYPES[metadata[DTYPE_KEY].decode()]
        shape = tuple(int(size) for size in json.loads(metadata[SHAPE_KEY]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"field {name!r} has metadata without a valid fastio.dtype and fastio.shape: {error}"
        ) from error
    if min(shape, default=1) < 1:
        raise FormatError(f"field {name!r} has fastio.shape {list(shape)}; sizes must be positive")
    return dtype, shape


def logical_rows(rows: npt.NDArray[Any], type_: pa.FixedShapeTensorType) -> npt.NDArray[Any]:
    """Rows of shape ``(n, num_elements)`` in the shape of a fixed-shape tensor, its permutation applied."""
    rows = rows.reshape(len(rows), *type_.shape)
    return rows if type_.permutation is None else rows.transpose(0, *(1 + axis for axis in type_.permutation))


def storage(array: pa.Array) -> pa.Array:
    """The array without its extension type."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _stored_element(stored: StoredColumn, type_: pa.DataType) -> tuple[torch.dtype, tuple[int, ...]]:

    metadata = stored.field.metadata or {}
    if pa.types.is_fixed_size_binary(type_):
        if DTYPE_KEY not in metadata:
            return torch.uint8, (type_.byte_width,)
        dtype, shape = tensor_layout(stored.name, metadata)
        if dtype.itemsize * prod(shape) != type_.byte_width:
            raise FormatError(
                f"field {stored.name!r} says that it holds {dtype} {shape}, {dtype.itemsize * prod(shape)} bytes, "
                f"but it is stored in {type_.byte_width}"
            )
        return dtype, shape
    if pa.types.is_decimal(type_):
        return torch.float64, ()
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        return torch.int64, ()
    if pa.types.is_dictionary(type_):
        if is_string(type_.value_type):
            return torch.int64, ()
        return _stored_element(stored, type_.value_type)
    if pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return torch.from_numpy(np.empty(0, type_.to_pandas_dtype())).dtype, ()
    raise FormatError(f"field {stored.name!r} cannot be loaded: {stored.type} fits no tensor")


def _numbers(array: pa.Array, stored: StoredColumn) -> npt.NDArray[Any]:
    """Elements of an array without nulls, without a copy where their bytes are what they should be."""
    type_ = array.type
    if pa.types.is_dictionary(type_):
        return _numbers(array.dictionary_decode(), stored)
    if pa.types.is_fixed_size_binary(type_):
        return _fixed_size_binary(array, stored)
    if pa.types.is_decimal(type_):
        array = array.cast(pa.float64())
    elif pa.types.is_temporal(type_):
        array = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _fixed_size_binary(array: pa.Array, stored: StoredColumn) -> npt.NDArray[Any]:
    width = array.type.byte_width
    start = array.offset * width
    raw = np.frombuffer(array.buffers()[1] or b"", np.uint8)[start : start + len(array) * width]
    metadata = stored.field.metadata or {}
    if DTYPE_KEY not in metadata:
        return raw.reshape(len(array), width)
    dtype, shape = tensor_layout(stored.name, metadata)
    if dtype == torch.bool:
        values = raw.view(np.bool_) if raw.max(initial=0) <= 1 else raw != 0
    else:
        values = raw.view(np.dtype("<u2" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")))
    return values.reshape(len(array), *shape)
