"""HDF5 types: what a stored element becomes in a batch, and which types are refused.

Stored integers, floats and complex numbers keep their width, in native byte order; uint16, uint32 and uint64 are
widened. Booleans, also enums of ``false`` and ``true`` in any case, become bool; other enums give their codes, with the
names as categories. Text becomes str. Variable-length rows become one tensor each, unless the writer noted that all
have one length: only a read of all rows would tell. Members of a compound type are fields of their own, named
``dataset.member``. References, opaque data, times and extended floats are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.base import Rows
from lightning_fastio.schema import FieldSpec

RaggedPolicy: TypeAlias = Literal["auto", "list", "pad", "error"]

KIND_ATTRIBUTE = "fastio_kind"
"""Attribute with which the writer tells ``bytes`` from ``ragged`` uint8 rows."""
SHAPE_ATTRIBUTE = "fastio_shape"
"""Attribute with the shape after the varying axis of ``ragged`` rows, which HDF5 stores flat."""
LENGTH_ATTRIBUTE = "fastio_length"
"""Attribute with the length of ``ragged`` rows, where the writer saw that all have the same."""

MAX_CATEGORIES = 1 << 16


@dataclass(frozen=True)
class Element:
    """How one stored value, or one member of a stored record, becomes one row of a field."""

    spec: FieldSpec
    """The field as delivered."""
    stored: np.dtype[Any]
    """NumPy type of the stored value, without a sub-array's shape."""
    members: tuple[str, ...] = ()
    """Path to the member of a record; empty for the value itself."""
    strips_spaces: bool = False
    """Whether text is padded with spaces."""
    is_stacked: bool = False
    """Whether variable-length rows, which all have one length, become one tensor."""

    def stored_in(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """This member of stored records, or the stored values themselves."""
        for member in self.members:
            values = values[member]
        return values

    def deliver(self, values: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any] | list[Any]:
        """Stored values as delivered: an array, or a list of str, bytes or arrays.

        Args:
            values: Stored values of some rows, shape ``(num_rows, ...)``.
            rows: Their row numbers, for error messages.

        Raises:
            FormatError: A uint64 is too large for int64, or text is not UTF-8; the message has the row.
        """
        values = self.stored_in(values)
        if self.is_stacked:
            return self._stack([self._row(value, row) for value, row in zip(values, rows, strict=True)], rows)
        if self.spec.kind == "tensor":
            if is_as_delivered(values.dtype, self.spec) and values.flags.c_contiguous:
                return values.reshape(len(values), *self.spec.shape)
            out = np.empty((len(values), *self.spec.shape), numpy_dtype(self.spec))
            deliver_into(values.reshape(out.shape), out, rows)
            return out
        if self.spec.kind == "string":
            return [self._text(value, row) for value, row in zip(values.tolist(), rows, strict=True)]
        if self.spec.kind == "bytes":
            return [np.asarray(value, np.uint8).tobytes() for value in values]
        return [self._row(value, row) for value, row in zip(values, rows, strict=True)]

    def _text(self, value: Any, row: int) -> str:
        if isinstance(value, str):
            return value
        try:
            text = bytes(value).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"row {row}: {bytes(value)[:40]!r} is not UTF-8 text ({error.reason})") from error
        return text.rstrip(" ") if self.strips_spaces else text

    def _row(self, value: npt.NDArray[Any], row: int) -> npt.NDArray[Any]:
        if not self.stored.isnative and _keeps_byte_order():
            value = value.view(self.stored)
        inner = self.spec.shape[1:] if self.is_stacked else self.spec.shape
        source = np.asarray(value, self.stored).reshape(-1, *inner)
        out = np.empty(source.shape, numpy_dtype(self.spec))
        deliver_into(source, out, [row] * len(source))
        return out

    def _stack(self, values: list[npt.NDArray[Any]], rows: Rows) -> npt.NDArray[Any]:
        out = np.empty((len(values), *self.spec.shape), numpy_dtype(self.spec))
        for target, value, row in zip(out, values, rows, strict=True):
            if len(value) != self.spec.shape[0]:
                raise FormatError(f"row {row} has length {len(value)}, not {self.spec.shape[0]}; use ragged='list'")
            target[...] = value
        return out


def deliver_into(values: npt.NDArray[Any], out: npt.NDArray[Any], rows: Rows) -> None:
    """Copy stored numbers of some rows into an array of the delivered type.

    Raises:
        FormatError: A uint64 is too large for int64; the message has the row.
    """
    if values.dtype.kind == "u" and values.dtype.itemsize == 8 and out.dtype.kind == "i" and values.size:
        largest = int(values.max())
        if largest > np.iinfo(np.int64).max:
            index = int(np.argwhere(values == largest)[0][0])
            raise FormatError(f"row {rows[index]}: {largest} is too large for int64; widen_unsigned=False keeps uint64")
    if values.dtype.kind == "b":
        values = np.ascontiguousarray(values).view(np.uint8)  # Stored bytes may differ from 0 and 1.
    np.copyto(out, values, casting="unsafe")


def is_as_delivered(stored: np.dtype[Any], spec: FieldSpec) -> bool:
    """Whether stored values need no conversion. Stored booleans may be other bytes than 0 and 1."""
    return stored == numpy_dtype(spec) and stored.isnative and stored.kind != "b"


def numpy_dtype(spec: FieldSpec) -> np.dtype[Any]:
    """NumPy's name of a field's delivered type."""
    return torch.empty(0, dtype=spec.dtype).numpy().dtype


def elements_of(dataset: Any, *, ragged: RaggedPolicy, widen_unsigned: bool) -> dict[str, Element | str]:
    """What the rows of a dataset become: one element under ``""``, or one for each member of a record under its name.

    A text in place of an element is the reason why it cannot be loaded.
    """
    try:
        dtype = dataset.dtype
    except TypeError as error:
        return {"": f"its HDF5 type cannot be read by h5py ({error})"}
    if dtype.names is None:
        return {"": _element_or_reason((), dtype, dataset, ragged, widen_unsigned)}
    return {
        ".".join(path): _element_or_reason(path, member, dataset, ragged, widen_unsigned)
        for path, member in _leaves(dtype)
    }


def is_raw(dataset: Any) -> bool:
    """Whether the bytes on disk are values of the NumPy type that h5py reports, so that they need no conversion."""
    dtype = dataset.dtype
    if dtype.hasobject or dtype.kind == "S":
        return False
    try:
        return bool(dataset.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))
    except TypeError:
        return False


@cache
def _keeps_byte_order() -> bool:
    """Whether h5py gives variable-length rows in the byte order of the file under a native type, as 3.16 does."""
    with h5py.File("probe", "w", driver="core", backing_store=False) as file:
        file.create_dataset("rows", (1,), h5py.vlen_dtype(np.dtype(">i4")))[0] = np.array([1], ">i4")
        return int(file["rows"][0][0]) != 1


def _leaves(dtype: np.dtype[Any]) -> Iterator[tuple[tuple[str, ...], np.dtype[Any]]]:
    for name in dtype.names or ():
        member = dtype[name]
        if member.names is not None:
            for path, leaf in _leaves(member):
                yield (name, *path), leaf
        else:
            yield (name,), member


def _element_or_reason(
    members: tuple[str, ...], dtype: np.dtype[Any], dataset: Any, ragged: RaggedPolicy, widen_unsigned: bool
) -> Element | str:
    try:
        return _element(members, dtype, dataset, ragged, widen_unsigned)
    except FormatError as error:
        return str(error)


def _element(
    members: tuple[str, ...], dtype: np.dtype[Any], dataset: Any, ragged: RaggedPolicy, widen_unsigned: bool
) -> Element:
    shape = dataset.shape[1:]
    text = h5py.check_string_dtype(dtype)
    if text is not None:
        if shape:
            raise FormatError(f"text of shape {list(shape)} in each row; one text a row can be loaded")
        pads = not members and text.length is not None and dataset.id.get_type().get_strpad() == h5py.h5t.STR_SPACEPAD
        return Element(FieldSpec(None, kind="string"), dtype, members, strips_spaces=pads)
    if (base := h5py.check_vlen_dtype(dtype)) is not None:
        return _ragged_element(members, base, dataset, ragged, widen_unsigned)
    if h5py.check_ref_dtype(dtype) is not None:
        raise FormatError("HDF5 references point to other objects and hold no numbers")
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = (*shape, *inner)
    names = h5py.check_enum_dtype(dtype)
    if names is not None and {name.lower(): code for name, code in names.items()} == {"false": 0, "true": 1}:
        return Element(FieldSpec(torch.bool, shape), dtype, members)
    delivered = _delivered(dtype, widen_unsigned=widen_unsigned)
    return Element(FieldSpec(delivered, shape, categories=_categories(names)), dtype, members)


def _ragged_element(
    members: tuple[str, ...], base: np.dtype[Any], dataset: Any, ragged: RaggedPolicy, widen_unsigned: bool
) -> Element:
    if dataset.shape[1:]:
        raise FormatError(
            f"variable-length values of shape {list(dataset.shape[1:])} in each row; one a row can be loaded"
        )
    if base.hasobject or base.names is not None:
        raise FormatError("variable-length rows that are no numbers")
    if not members and dataset.attrs.get(KIND_ATTRIBUTE) == "bytes":
        return Element(FieldSpec(None, kind="bytes"), base)
    length = None if members or ragged in ("list", "pad") else dataset.attrs.get(LENGTH_ATTRIBUTE)
    if ragged == "error" and length is None:
        raise FormatError("rows differ in length, and ragged='error' refuses them; use 'list' or 'pad'")
    inner = () if members else tuple(int(length) for length in dataset.attrs.get(SHAPE_ATTRIBUTE, ()))
    delivered = _delivered(base, widen_unsigned=widen_unsigned)
    if length is not None:
        return Element(FieldSpec(delivered, (int(length), *inner)), base, members, is_stacked=True)
    return Element(FieldSpec(delivered, inner, kind="ragged"), base, members)


def _delivered(dtype: np.dtype[Any], *, widen_unsigned: bool) -> torch.dtype:
    """The torch type of a stored number.

    Raises:
        FormatError: torch has none; the message says what the type is.
    """
    if dtype.kind == "u" and dtype.itemsize > 1 and widen_unsigned:
        return torch.int32 if dtype.itemsize == 2 else torch.int64
    if dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    if dtype.kind in "fc":
        raise FormatError(
            f"{dtype.itemsize * 8}-bit {'floats' if dtype.kind == 'f' else 'complex numbers'}: torch has none"
        )
    if dtype.kind in "mM":
        raise FormatError(f"times ({dtype}) have no torch type; store them as int64")
    if dtype.kind == "V":
        raise FormatError(f"opaque data of {dtype.itemsize} bytes has no meaning to a model; store it as uint8")
    raise FormatError(f"{dtype} has no torch type")


def _categories(names: dict[str, int] | None) -> tuple[str, ...]:
    """Enum names by code; gaps are empty, and codes that are no indices give none."""
    if not names or min(names.values()) < 0 or max(names.values()) >= MAX_CATEGORIES:
        return ()
    found = [""] * (max(names.values()) + 1)
    for name, code in names.items():
        found[code] = name
    return tuple(found)
