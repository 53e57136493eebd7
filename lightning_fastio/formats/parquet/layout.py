"""How a field lies in its Parquet files, in words."""

from __future__ import annotations

from lightning_fastio.formats.base import FieldLayout
from lightning_fastio.formats.parquet.fields import Field
from lightning_fastio.formats.parquet.files import Files
from lightning_fastio.formats.parquet.footer import CODECS
from lightning_fastio.formats.parquet.groups import RowGroups


def describe_field(field: Field, files: Files, groups: RowGroups, *, is_mapped: bool) -> FieldLayout:
    """Type, row groups and codec of the first column of a field, and how it is read."""
    column = field.columns[0]
    codec = "Hive partition"
    if column.stored.leaf >= 0:
        first = next(index for index, file in enumerate(files.files) if len(file.group_rows))
        codec = CODECS[files.chunks(first).codecs[0, files.files[first].columns[column.name].leaf]]
    stacked = f"{len(field.columns)} columns of " if field.is_stack else ""
    rows = groups.num_rows // groups.num_groups
    stored = f"{stacked}{column.stored.field.type}, {groups.num_groups} row groups of {rows} rows, {codec}"
    if is_mapped:
        return FieldLayout(field.name, stored, "memory map, rows copied out of plain pages")
    if field.spec.kind in ("string", "bytes"):
        return FieldLayout(field.name, stored, "row group decoded whole, a Python object for each row")
    if not column.lengths:
        return FieldLayout(field.name, stored, "row group decoded whole, rows copied out of it")
    if field.spec.kind == "ragged":
        return FieldLayout(field.name, stored, "row group decoded whole, lists of different lengths cut out of it")
    hint = "lists decode value by value; fastio convert stores tensors as fixed-size binary, which decodes by copying"
    return FieldLayout(field.name, stored, "row group decoded whole, lists flattened", hint)
