"""JSON records as columns, with types that come from all records and not from the first ones.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_fastio.convert.source import RowBatch
from lightning_fastio.errors import ConfigError

ColumnType: TypeAlias = Literal["bool", "int", "float", "string", "list", "json"]

_EXACT_FLOAT = 1 << 53


@dataclass(frozen=True)
class Column:
    """One key of the records."""

    type: ColumnType
    """``list`` holds numbers; ``json`` is anything else, kept as JSON text."""
    dtype: str = ""
    """NumPy dtype of numbers."""
    missing: Any = None
    """What rows without a value get."""


class ColumnTypes:
    """Finds the types of all keys over all records."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}
        self._present: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        self._num_records = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a record into account."""
        self._num_records += 1
        for key, value in record.items():
            seen = self._seen.setdefault(key, set())
            if value is not None:
                seen.add(_type_of(value))
                self._present[key] = self._present.get(key, 0) + 1
                if type(value) is int:
                    self._largest[key] = max(self._largest.get(key, 0), abs(value))

    def columns(self, null_fill: Any = None) -> dict[str, Column]:
        """The columns in the order of their first appearance.

        Text that is missing becomes empty, numbers become NaN (whole numbers float64 then), lists empty.

        Args:
            null_fill: Another value in place of missing ones, for all keys or by key.

        Raises:
            ConfigError: A value is missing that nothing stands for.
        """
        return {key: self._column(key, seen, null_fill) for key, seen in self._seen.items()}

    def _column(self, key: str, seen: set[str], null_fill: Any) -> Column:
        fill = null_fill.get(key) if isinstance(null_fill, Mapping) else null_fill
        missing = self._num_records - self._present.get(key, 0)
        if seen <= {"int", "float"} and seen:
            too_large = self._largest.get(key, 0) > _EXACT_FLOAT
            if seen == {"int"} and (not missing or isinstance(fill, int)):
                return Column("int", "int64", fill)
            if "int" in seen and too_large:
                raise ConfigError(
                    f"key {key!r}: whole numbers as large as {self._largest[key]} would be rounded as floats, which "
                    f"{missing} missing values or fractions ask for; give null_fill={{{key!r}: 0}}"
                )
            return Column("float", "float64", float("nan") if fill is None else float(fill))
        if seen == {"bool"}:
            if missing and fill is None:
                raise ConfigError(
                    f"key {key!r}: {missing} of {self._num_records} records have no truth value; give null_fill="
                )
            return Column("bool", "bool", fill)
        if seen <= {"ints", "floats", "empty"} and seen:
            return Column("list", "float64" if "floats" in seen else "int64", [])
        if seen <= {"string"}:
            return Column("string", missing="" if fill is None else str(fill))
        return Column("json", missing="")


def to_columns(records: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> RowBatch:
    """Records as one batch of the given columns."""
    if not records:
        return {}
    return {key: _values([record.get(key) for record in records], column) for key, column in columns.items()}


def _values(values: list[Any], column: Column) -> Any:
    filled = [column.missing if value is None else value for value in values]
    if column.type == "string":
        return filled
    if column.type == "json":
        return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in filled]
    if column.type == "list":
        return [np.array(value, column.dtype) for value in filled]
    return np.array(filled, column.dtype)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float, str)):
        return {int: "int", float: "float", str: "string"}[type(value)]
    if isinstance(value, list):
        kinds = {type(entry) for entry in value}
        if not kinds:
            return "empty"
        if kinds <= {int, float}:
            return "floats" if float in kinds else "ints"
    return "json"
