"""What becomes of each Parquet column: its field in a batch, and its values.

| stored | delivered |
|---|---|
| numbers, bool | the same; unsigned ones of 16 to 64 bits as ``widen_unsigned`` says |
| decimal | float64, the nearest |
| date, time, timestamp, duration | int64 in the stored unit (days for dates; microseconds for INT96); UTC if zoned |
| fixed-size binary with ``fastio.dtype`` and ``fastio.shape`` in its field metadata | a tensor, without a copy |
| fixed-size binary without | uint8 of that length |
| ``arrow.fixed_shape_tensor`` | a tensor of its logical shape: a permutation is applied |
| fixed-size lists, lists of equal length, nested too | a tensor |
| lists of varying length | a list of tensors, or what ``ragged`` says |
| dictionary of strings (a pandas categorical) | int64 codes into ``FieldSpec.categories``, the same for all files;
  sorted, unless the dictionary is ordered |
| strings, binary | list of str, list of bytes |
| struct | one field for each member, named ``struct.member`` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.parquet.elements import element_of, element_values, logical_rows, storage
from lightning_fastio.formats.parquet.schema import StoredColumn, is_binary, is_list, is_string, storage_type
from lightning_fastio.formats.parquet.values import Dense, Ragged, Text, Values, offsets_of
from lightning_fastio.schema import FieldSpec

Place = Callable[[int], str]
"""Position in a decoded column to words such as ``row 17 of train.parquet``."""


@dataclass(frozen=True)
class Column:
    """How one stored column becomes the values of one field."""

    stored: StoredColumn
    spec: FieldSpec
    """What is delivered; complete once the lengths of lists are known."""
    lengths: tuple[int | None, ...] = ()
    """Length of each level of lists, outermost first; None where it varies or is not measured yet."""
    fill: Any = None
    """What nulls become; None refuses them."""

    @property
    def name(self) -> str:
        """Name as stored; members of structs as ``struct.member``."""
        return self.stored.name

    def measured(self, lengths: tuple[int | None, ...]) -> Column:
        """The column, now that the lengths of its lists are known.

        Raises:
            FormatError: Inner lists vary in length.
        """
        if None in lengths[1:]:
            raise FormatError(
                f"field {self.name!r} is {self.stored.type}, and its inner lists vary in length, which fits no tensor; "
                "pad or flatten them when writing"
            )
        ragged = lengths[0] is None
        fixed = tuple(length for length in lengths if length is not None)
        spec = replace(self.spec, kind="ragged" if ragged else "tensor", shape=(*fixed, *self.spec.shape))
        return replace(self, spec=spec, lengths=lengths)

    @property
    def is_categorical(self) -> bool:
        """Whether it holds codes into a dictionary of strings."""
        return bool(pa.types.is_dictionary(self.stored.type)) and is_string(self.stored.type.value_type)

    def with_vocabulary(self, names: Sequence[str]) -> Column:
        """The column, now that the dictionaries of all files are known. A name as ``fill`` becomes its code."""
        fill = self.fill
        if isinstance(fill, str):
            names = list(dict.fromkeys([*names, fill]))
            fill = names.index(fill)
        return replace(self, spec=replace(self.spec, categories=tuple(names)), fill=fill)

    def decode(self, table: pa.Table, place: Place) -> Values:
        """Values of this column in a table with one row for each row of the result."""
        array = extract(table, self.stored)
        if self.spec.kind in ("string", "bytes"):
            return Text(pc.fill_null(array, self._filling(array, place)) if array.null_count else array, place(0))
        if self.spec.kind == "ragged":
            return self._ragged(array, place)
        rows = self._dense(array, self.lengths, place)
        if isinstance(self.stored.field.type, pa.FixedShapeTensorType):
            rows = logical_rows(rows, self.stored.field.type)
        return Dense(np.ascontiguousarray(rows))

    def _ragged(self, array: pa.Array, place: Place) -> Ragged:
        lengths = array.value_lengths()
        if array.null_count:
            self._filling(array, place)
            lengths = pc.fill_null(lengths, 0)
        offsets = offsets_of(lengths.to_numpy(zero_copy_only=False))
        elements = self._dense(
            array.flatten(),
            self.lengths[1:],
            lambda index: place(int(np.searchsorted(offsets, index, side="right")) - 1),
        )
        return Ragged(elements, offsets)

    def _dense(self, array: pa.Array, lengths: tuple[int | None, ...], place: Place) -> npt.NDArray[Any]:
        """Values of shape ``(len(array), *sample_shape)``; a null is filled at the level where it stands."""
        array = storage(array)
        if array.null_count:
            fill = self._filling(array, place)
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            where = np.flatnonzero(valid)
            present = self._dense(array.drop_null(), lengths, lambda index: place(int(where[index])))
            rows = np.full((len(array), *present.shape[1:]), fill, present.dtype)
            rows[valid] = present
            return rows
        if not lengths:
            return self._elements(array, place)
        length = lengths[0] or 0
        if not pa.types.is_fixed_size_list(array.type):
            self._check_lengths(array, length, place)
        inner = self._dense(array.flatten(), lengths[1:], lambda index: place(index // length))
        return inner.reshape(len(array), length, *inner.shape[1:])

    def _check_lengths(self, array: pa.Array, length: int, place: Place) -> None:
        found = array.value_lengths().to_numpy()
        different = np.flatnonzero(found != length)
        if len(different):
            row = int(different[0])
            raise FormatError(
                f"field {self.name!r}, {place(row)}: a list of {found[row]} values, but others have {length}; "
                "pass ragged='list' for a list of tensors, or ragged='pad'"
            )

    def _elements(self, array: pa.Array, place: Place) -> npt.NDArray[Any]:
        if self.is_categorical:
            code_of = {name: code for code, name in enumerate(self.spec.categories)}
            codes = np.array([code_of[name] for name in array.dictionary.to_pylist()], np.int64)
            return np.asarray(codes[array.indices.to_numpy()])
        return element_values(array, self.stored, self.spec.dtype, lambda row: f"field {self.name!r}, {place(row)}")

    def _filling(self, array: pa.Array, place: Place) -> Any:
        """What the nulls of an array become, or an error that counts null and NaN apart."""
        if self.fill is not None:
            return self.fill
        first_null = pc.index(array.is_null(), pa.scalar(True)).as_py()
        num_nans = pc.sum(pc.is_nan(array)).as_py() if pa.types.is_floating(array.type) else 0
        raise FormatError(
            f"field {self.name!r} has {array.null_count} null among {len(array)} values ({num_nans or 0} are NaN, "
            f"which is a value), the first in {place(first_null)}; pass null_fill={{{self.name!r}: VALUE}}, or "
            "filters=... to leave such rows out"
        )


def plan_column(stored: StoredColumn, *, widen_unsigned: bool, fill: Any) -> Column:
    """How a stored column is delivered, as far as its type tells.

    Args:
        stored: The column.
        widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64.
        fill: What nulls become; None refuses them.

    Raises:
        FormatError: Nothing in a batch can hold this type.
    """
    if stored.problem:
        raise FormatError(f"field {stored.name!r} cannot be loaded: {stored.problem}")
    type_, lengths = stored.type, []
    if is_string(type_):
        return Column(stored, FieldSpec(None, kind="string"), fill=fill)
    if is_binary(type_):
        return Column(stored, FieldSpec(None, kind="bytes"), fill=fill)
    while is_list(type_):
        lengths.append(type_.list_size if pa.types.is_fixed_size_list(type_) else None)
        type_ = storage_type(type_.value_type)
    if lengths and pa.types.is_dictionary(type_) and is_string(type_.value_type):
        type_ = type_.value_type
    dtype, shape = element_of(stored, type_, widen_unsigned=widen_unsigned)
    column = Column(stored, FieldSpec(dtype, shape), tuple(lengths), fill)
    if None in lengths or not lengths:
        return column
    column = column.measured(tuple(lengths))
    if isinstance(stored.field.type, pa.FixedShapeTensorType):
        shape = logical_rows(np.empty((0, *column.spec.shape)), stored.field.type).shape[1:]
        column = replace(column, spec=replace(column.spec, shape=shape))
    return column


def extract(table: pa.Table, stored: StoredColumn) -> pa.Array:
    """One column of a table as one array, nulls of the structs around it included."""
    column = table.column(stored.path[0])
    for member in stored.path[1:]:
        column = pc.struct_field(column, member)
    if str(column.type) in ("string_view", "binary_view"):  # Few of Arrow's functions take them.
        column = column.cast(pa.string() if is_string(column.type) else pa.binary())
    if column.num_chunks == 1:
        return storage(column.chunk(0))
    if column.num_chunks == 0:
        return storage(pa.array([], column.type))
    if is_string(column.type) or is_binary(column.type):
        # Several chunks may hold more than the 2 GiB that fit behind offsets of 32 bits.
        column = column.cast(pa.large_string() if is_string(column.type) else pa.large_binary())
    return pa.concat_arrays([storage(chunk) for chunk in column.unify_dictionaries().chunks])


def fits(fill: Any, column: Column) -> bool:
    """Whether a value can stand for a null without being changed."""
    dtype = column.spec.dtype
    if column.spec.kind == "bytes":
        return isinstance(fill, bytes)
    if dtype is None or (pa.types.is_dictionary(column.stored.type) and isinstance(fill, str)):
        return isinstance(fill, str)
    if dtype == torch.bool:
        return isinstance(fill, bool)
    if not isinstance(fill, (int, float)):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return True
    limits = torch.iinfo(dtype)
    return fill == int(fill) and limits.min <= fill <= limits.max
