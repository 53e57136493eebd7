"""Which columns a Parquet file has, by the names that ``fields`` may use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa


@dataclass(frozen=True)
class StoredColumn:
    """A top-level column, or a member of a struct."""

    name: str
    """Top-level name, or ``struct.member``."""
    path: tuple[str, ...]
    """Name of the top-level column, then of struct members."""
    field: pa.Field
    leaf: int
    """Number of its first Parquet leaf column; negative for the columns of a partition."""
    nullable: bool
    """Whether it or a struct around it may be null."""
    problem: str = ""
    """Why it cannot be loaded, whatever its type; empty when it can."""

    @property
    def type(self) -> pa.DataType:
        """Arrow type, an extension type replaced by its storage."""
        return storage_type(self.field.type)

    @property
    def is_struct(self) -> bool:
        """Whether its members are the fields."""
        return bool(pa.types.is_struct(self.type))

    @property
    def comparable(self) -> tuple[Any, ...]:
        """What has to be equal in all files: type and tensor layout, but not the width of offsets or codes."""
        metadata = self.field.metadata or {}
        layout = sorted((key, value) for key, value in metadata.items() if key.startswith(b"fastio."))
        extension = str(self.field.type) if isinstance(self.field.type, pa.BaseExtensionType) else ""
        return _without_offsets(self.type), extension, layout


def stored_columns(schema: pa.Schema, *, num_stored: int) -> dict[str, StoredColumn]:
    """Columns by name, in the order of the file. A top-level name wins over a struct member of the same name.

    Args:
        schema: Schema of the file, columns of its partition at the end.
        num_stored: Top-level columns that are really in the file.
    """
    counts = Counter(schema.names)
    columns: dict[str, StoredColumn] = {}
    leaf = 0
    for number, field in enumerate(schema):
        for column in _expand(field, (field.name,), leaf if number < num_stored else -1, field.nullable):
            if counts[field.name] > 1:
                column = replace(column, problem=f"{counts[field.name]} columns have this name")
            elif not field.name:
                column = replace(column, problem="its name is empty")
            if len(column.path) == 1 or column.name not in counts:
                columns[column.name] = column
        leaf += _num_leaves(field.type)
    return columns


def index_columns(schema: pa.Schema) -> set[str]:
    """Columns that pandas stored to hold the index of the frame."""
    index = _notes(schema, b"pandas").get("index_columns")
    return {name for name in index if isinstance(name, str)} if isinstance(index, list) else set()


def class_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """Names of the codes in a column that Hugging Face datasets wrote as class labels; empty for others."""
    info = _notes(schema, b"huggingface").get("info")
    features = info.get("features") if isinstance(info, dict) else None
    feature = features.get(column) if isinstance(features, dict) else None
    names = feature.get("names") if isinstance(feature, dict) else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _notes(schema: pa.Schema, key: bytes) -> dict[str, Any]:
    """What another library stored as JSON in the metadata of a schema."""
    try:
        notes = json.loads((schema.metadata or {}).get(key, b"{}"))
    except ValueError:  # Foreign writers put what they like there.
        return {}
    return notes if isinstance(notes, dict) else {}


def storage_type(type_: pa.DataType) -> pa.DataType:
    """The type without its extension."""
    return type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_


def is_list(type_: pa.DataType) -> bool:
    """Whether the type is a list of any kind, fixed size included."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _expand(field: pa.Field, path: tuple[str, ...], leaf: int, nullable: bool) -> Iterator[StoredColumn]:
    column = StoredColumn(".".join(path), path, field, leaf, nullable)
    if not pa.types.is_struct(storage_type(field.type)):
        yield column
        return
    names = [f"{column.name}.{member.name}" for member in column.type]
    yield replace(column, problem=f"it is a struct; take its members: {', '.join(map(repr, names))}")
    for member in column.type:
        yield from _expand(member, (*path, member.name), leaf, nullable or member.nullable)
        leaf += _num_leaves(member.type)


def _num_leaves(type_: pa.DataType) -> int:
    type_ = storage_type(type_)
    if pa.types.is_nested(type_):
        return sum(_num_leaves(type_.field(index).type) for index in range(type_.num_fields))
    return 1


def _without_offsets(type_: pa.DataType) -> Any:
    type_ = storage_type(type_)
    if pa.types.is_dictionary(type_):
        return "dictionary", _without_offsets(type_.value_type)
    if pa.types.is_fixed_size_list(type_):
        return "list", type_.list_size, _without_offsets(type_.value_type)
    if is_list(type_):
        return "list", _without_offsets(type_.value_type)
    if is_string(type_):
        return "string"
    if is_binary(type_):
        return "binary"
    return type_


def is_string(type_: pa.DataType) -> bool:
    """Whether the type is text, with offsets of any width or as views."""
    return str(type_) in ("string", "large_string", "string_view")


def is_binary(type_: pa.DataType) -> bool:
    """Whether the type is byte strings of varying length, with offsets of any width or as views."""
    return str(type_) in ("binary", "large_binary", "binary_view")
