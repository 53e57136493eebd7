"""From ``fields`` to columns: what is taken, and what has to be known of all files before the first row is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import torch

from lightning_fastio.errors import ConfigError, FormatError, SchemaError
from lightning_fastio.formats.base import Fields
from lightning_fastio.formats.parquet.columns import Column, Place, fits, plan_column
from lightning_fastio.formats.parquet.files import DataFile, Files
from lightning_fastio.formats.parquet.schema import class_names, index_columns
from lightning_fastio.formats.parquet.survey import RaggedPolicy, check_footers, measure_lengths, read_vocabulary
from lightning_fastio.formats.parquet.values import Dense, Values
from lightning_fastio.formats.selection import unknown_field, wanted_fields
from lightning_fastio.schema import FieldSpec, common_dtype

_TRANSPOSED_ROWS = 4096

_log = logging.getLogger("lightning_fastio")


@dataclass(frozen=True)
class Field:
    """One field of a batch: a column, or several that are stacked into a matrix."""

    name: str
    columns: tuple[Column, ...]
    spec: FieldSpec
    is_stack: bool = False

    def decode(self, table: pa.Table, place: Place) -> Values:
        """Values of all rows of a table."""
        if not self.is_stack:
            return self.columns[0].decode(table, place)
        columns = []
        for column in self.columns:
            values = column.decode(table, place)
            assert isinstance(values, Dense)
            columns.append(values.rows)
        return Dense(_interleave(columns, torch.empty((table.num_rows, *self.spec.shape), dtype=self.spec.dtype)))


def _interleave(columns: Sequence[npt.NDArray[Any]], out: torch.Tensor) -> npt.NDArray[Any]:
    """Columns side by side along the last axis of ``out``.

    Writing one column after another would touch every cache line of ``out`` once per column. Instead a piece of all
    columns is gathered that fits into the processor's cache, and transposed from there by torch's blocked copy.
    """
    matrix = out.view(-1, len(columns))
    flat = [column.reshape(-1) for column in columns]
    for start in range(0, len(matrix), _TRANSPOSED_ROWS):
        piece = matrix[start : start + _TRANSPOSED_ROWS]
        transposed = torch.empty((len(columns), len(piece)), dtype=out.dtype)
        rows = transposed.numpy()
        for position, column in enumerate(flat):
            rows[position] = column[start : start + len(piece)]
        piece.copy_(transposed.t())
    return out.numpy()


@dataclass(frozen=True)
class FieldOptions:
    """What the caller wants of columns that are not plain numbers."""

    ragged: RaggedPolicy
    widen_unsigned: bool
    null_fill: Any
    has_filters: bool
    """Rows may be left out, so that statistics say nothing about those that stay."""


def plan_fields(files: Files, fields: Fields, options: FieldOptions) -> list[Field]:
    """Fields to deliver, checked over all files.

    Raises:
        ConfigError: ``null_fill`` does not suit a field.
        SchemaError: A field is unknown, the files differ in a column that is used, or stacked columns differ in shape.
        FormatError: A named field cannot be loaded, no field can, or there are nulls without ``null_fill``.
    """
    planner = _Planner(files, options)
    wanted = wanted_fields(fields)
    if wanted is None:
        return planner.all_fields()
    stacks = fields if isinstance(fields, Mapping) else {}
    return [
        planner.field(name, stored, is_stack=not isinstance(stacks.get(name, ""), str))
        for name, stored in wanted.items()
    ]


class _Planner:
    def __init__(self, files: Files, options: FieldOptions) -> None:
        self._files, self._options = files, options
        self._first = files.files[0]
        if isinstance(options.null_fill, Mapping):
            self._check_names(options.null_fill)

    def all_fields(self) -> list[Field]:
        """Every column that can be loaded; one notice tells about the others."""
        taken, reasons = [], {}
        index = index_columns(self._first.schema)
        for column in self._first.columns.values():
            if column.is_struct:
                continue
            if column.name in index:
                _log.info("left out %r, the index of a pandas frame; name it in fields to take it", column.name)
                continue
            try:
                taken.append(self.field(column.name, [column.name]))
            except FormatError as error:
                reasons[column.name] = str(error)
        if not taken:
            listed = "; ".join(reasons.values()) or "it has no columns"
            raise FormatError(f"{self._first.path} has no field that can be loaded: {listed}")
        if reasons:
            names = [field.name for field in taken]
            _log.warning("%s: left out: %s. Use fields=%s", self._first.path, "; ".join(reasons.values()), names)
        return taken

    def field(self, name: str, stored: Sequence[str], *, is_stack: bool = False) -> Field:
        """One field out of one column, or out of several that are stacked."""
        columns = tuple(self._column(each) for each in stored)
        if not is_stack:
            return Field(name, columns, columns[0].spec)
        shapes = {column.spec.shape for column in columns}
        if len(shapes) > 1 or any(column.spec.kind != "tensor" for column in columns):
            described = ", ".join(f"{column.name}: {column.spec}" for column in columns)
            raise SchemaError(f"field {name!r} stacks columns of different shapes or kinds: {described}")
        dtype = common_dtype(column.spec.dtype for column in columns if column.spec.dtype is not None)
        return Field(name, columns, FieldSpec(dtype, (*columns[0].spec.shape, len(columns))), is_stack=True)

    def _column(self, name: str) -> Column:
        self._check_names([name])
        stored = self._first.columns[name]
        for file in self._files.files[1:]:
            if file.columns is not self._first.columns:
                _check_same(name, self._first, file)
        fill = self._options.null_fill
        is_own = isinstance(fill, Mapping)
        fill = fill.get(name) if is_own else fill
        column = plan_column(stored, widen_unsigned=self._options.widen_unsigned, fill=fill)
        if fill is not None and not fits(fill, column):
            if is_own:
                raise ConfigError(f"null_fill={{{name!r}: {fill!r}}} is no value of this field, which is {column.spec}")
            column = replace(column, fill=None)
        if None in column.lengths:
            column = column.measured(measure_lengths(self._files, column, self._options.ragged))
        if column.is_categorical:
            column = column.with_vocabulary(read_vocabulary(self._files, column))
        elif pa.types.is_integer(stored.type):
            column = replace(column, spec=replace(column.spec, categories=class_names(self._first.schema, name)))
        check_footers(self._files, column, may_have_nulls=fill is not None or self._options.has_filters)
        return column

    def _check_names(self, names: Sequence[str] | Mapping[str, Any]) -> None:
        for name in names:
            if name not in self._first.columns:
                raise unknown_field(name, self._first.columns, self._first.path)


def _check_same(name: str, first: DataFile, other: DataFile) -> None:
    if name not in other.columns:
        raise SchemaError(f"{other.path} has no field {name!r}, but {first.path} has; all files need the same fields")
    expected, found = first.columns[name], other.columns[name]
    if found.problem or found.comparable != expected.comparable:
        raise SchemaError(
            f"field {name!r} is {found.problem or found.field.type} in {other.path}, but {expected.field.type} in "
            f"{first.path}; write the files with one schema, or leave the field out with fields=[...]"
        )
