"""Sources of .npy and .npz files, and the reader of their rows.

- A .npy file is one field, named after the file. In a folder, and in a glob, each name is a field.
- Files whose names differ in a trailing number only (``x-000.npy``, ``x-001.npy``) are shards of one field, whose rows
  follow one another in natural order. So are the files of a list.
- Each array of an .npz is a field; rows of several archives follow one another.
- With ``fields=None`` all arrays with the same number of rows are taken: of several numbers, the one whose arrays hold
  the most bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from lightning_fastio.errors import ConfigError, FastIOError, SchemaError
from lightning_fastio.formats.base import FieldLayout, Fields, Reader, Rows, check_rows
from lightning_fastio.formats.files import Source, fingerprint_of, items_of, resolve
from lightning_fastio.formats.joined import Concatenated, SideBySide
from lightning_fastio.formats.mapped import MappedArray
from lightning_fastio.formats.numpy.columns import Column, TensorColumn
from lightning_fastio.formats.numpy.fields import (
    OFFSETS,
    Contents,
    FieldOptions,
    RaggedPolicy,
    choose,
    group_shards,
    is_archive,
    open_columns,
    or_reason,
)
from lightning_fastio.formats.numpy.writer import NumpyWriter
from lightning_fastio.formats.pages import Int64Array
from lightning_fastio.formats.selection import Selection, stored_names, unknown_field, wanted_fields
from lightning_fastio.schema import Batch, Schema

logger = logging.getLogger("lightning_fastio")


def open_source(
    source: Source,
    fields: Fields = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    sparse: bool = False,
    ragged: RaggedPolicy = "auto",
    widen_unsigned: bool = True,
    cache_bytes: int = 1 << 30,
) -> Reader:
    """Open .npy files, a folder of them, or .npz archives.

    Args:
        source: A file, a folder, a glob, or a list of these.
        fields: Fields to deliver; all that can be loaded and have equally many rows by default.
        window: Items along the first axis that are one row; windows never reach from one file into the next.
        stride: Items from the start of a window to the start of the next; ``window`` by default.
        sparse: Deliver SciPy's sparse matrices as sparse CSR tensors instead of dense rows.
        ragged: Rows of varying length: tensors if they turn out equal, else a list (auto), a list (list), one tensor
            padded with zeros to the longest of the batch (pad), or refused (error).
        widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64.
        cache_bytes: Compressed members of an .npz above this size are decoded to a temporary file instead of memory.

    Raises:
        FormatError: A field that was named cannot be loaded, or none can.
        SchemaError: A field is unknown, files do not fit together, or there is no row.
        CorruptFileError: A file is incomplete or damaged.
        ConfigError: A window or stride is not positive, or a list holds files of different names.
    """
    options = FieldOptions(window, stride, sparse, ragged, widen_unsigned, cache_bytes).checked()
    wanted = wanted_fields(fields)
    names = None if wanted is None else stored_names(wanted)
    reader = _open(source, names, options)
    for layout in reader.layout():
        if layout.hint:
            logger.warning("%s", layout.hint)
    return Selection.of(reader, fields)


def open_field(source: Source, name: str, **options: Any) -> Reader:
    """Open one field of a mapping: all files of the source are its shards, whatever their names."""
    paths = resolve(source, "numpy")
    if not is_archive(paths[0]):
        return _open_shards(paths, name, FieldOptions(**options).checked()).reader
    names = Contents.of_archive(paths[0], next(iter(group_shards(paths)))).names
    stored = name if name in names or len(names) > 1 else names[0]
    return open_source(source, {name: stored}, **options)


def open_target(path: str | Path, *, metadata: Mapping[str, str] | None = None) -> NumpyWriter:
    """Create a .npy file, an .npz archive, or a folder of .npy files; see `NumpyWriter`."""
    return NumpyWriter(path, metadata=metadata)


class NumpyReader:
    """Rows of arrays that lie in one file, or in files side by side."""

    def __init__(self, columns: Sequence[Column], paths: Iterable[Path], metadata: Mapping[str, str]) -> None:
        """Set up.

        Args:
            columns: Fields, all with the same number of rows.
            paths: Files that they come from.
            metadata: What the writer stored.
        """
        self._columns = list(columns)
        self._num_rows = columns[0].num_rows
        self._schema = Schema({column.name: column.spec for column in columns})
        self._metadata = dict(metadata)
        self._fingerprint = fingerprint_of(paths, self._num_rows, self._schema)

    @property
    def schema(self) -> Schema:
        """The fields of a row."""
        return self._schema

    @property
    def blocks(self) -> None:
        """None: every row costs the same."""
        return None

    @property
    def cache_bytes(self) -> int:
        """0: nothing is decoded by blocks."""
        return 0

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the writer stored with the data."""
        return self._metadata

    @property
    def fingerprint(self) -> str:
        """Changes with the names and sizes of the files, their rows, and the schema."""
        return self._fingerprint

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"NumpyReader({len(self)} rows, {self.schema})"

    def will_need(self, rows: Rows) -> None:
        """Let the kernel read the pages of these rows in the background."""
        with suppress(FastIOError, OSError):  # The read of these rows meets the same error.
            checked = check_rows(rows, len(self))
            for column in self._columns:
                column.will_need(checked)

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows; see `Reader.read`."""
        checked = check_rows(rows, len(self))
        buffers = self.schema.buffers(len(checked), out)
        return {column.name: column.read(checked, _tensor(buffers, column.name)) for column in self._columns}

    def read_into(self, rows: Int64Array, batch: Batch, positions: Int64Array) -> None:
        """Put checked rows at their places in larger buffers, for the fields that the batch has."""
        for column in self._columns:
            if column.name not in batch:
                continue
            target = batch[column.name]
            if isinstance(column, TensorColumn):
                column.read_into(rows, cast(torch.Tensor, target), positions)
                continue
            buffer = (
                torch.empty((len(rows), *column.spec.shape), dtype=column.spec.dtype) if column.spec.dtype else None
            )
            values = column.read(rows, buffer)
            if isinstance(target, torch.Tensor):
                target[torch.from_numpy(positions)] = cast(torch.Tensor, values)
                continue
            for position, value in zip(positions.tolist(), values, strict=True):
                target[position] = value

    def mapped_arrays(self) -> dict[str, MappedArray]:
        """The fields that are rows of mapped bytes."""
        return {column.name: column.rows for column in self._columns if isinstance(column, TensorColumn)}

    def layout(self) -> list[FieldLayout]:
        """How each field is stored and read."""
        return [column.layout() for column in self._columns]

    def close(self) -> None:
        """Let go of all maps; a later read maps again."""
        for column in self._columns:
            column.close()


def _open(source: Source, names: list[str] | None, options: FieldOptions) -> Reader:
    items = list(items_of(source))
    if len(items) > 1 and any(item.is_dir() for item in items):
        readers: list[Reader] = []
        for item in items:
            readers.append(_open(item, names, options))
            names = list(readers[0].schema)
        return _joined(readers, items)
    paths = resolve(source, "numpy")
    archives = [path for path in paths if is_archive(path)]
    if archives and len(archives) < len(paths):
        array = next(path for path in paths if path not in archives)
        raise ConfigError(
            f"{array} and {archives[0]} are of two kinds, .npy and .npz; say what belongs together: "
            f"{{{array.stem!r}: {array.name!r}, 'y': {archives[0].name!r}}}"
        )
    if archives:
        return _open_archives(archives, names, options)
    return _open_arrays(paths, names, options, is_list=not isinstance(source, str | Path))


def _open_archives(paths: Sequence[Path], names: list[str] | None, options: FieldOptions) -> Reader:
    readers: list[NumpyReader] = []
    stem = next(iter(group_shards(paths)))
    for path in paths:
        readers.append(_reader(Contents.of_archive(path, stem, options.cache_bytes), names, options))
        names = list(readers[0].schema)
    return _joined(readers, paths)


def _open_arrays(paths: list[Path], names: list[str] | None, options: FieldOptions, *, is_list: bool) -> Reader:
    groups = group_shards(paths)
    if is_list and len(groups) > 1:
        first, second, *_ = groups
        raise ConfigError(
            f"a list of files joins rows of one field, but the names {first!r} and {second!r} differ; "
            f"{{'x': [...]}} joins their rows, {{{first!r}: ..., {second!r}: ...}} puts fields side by side"
        )
    if names is not None:
        for name in names:
            if name not in groups:
                raise unknown_field(name, groups, paths[0].parent)
        # Other files are not even looked into; they may be damaged.
        groups = {name: group for name, group in groups.items() if name.removesuffix(OFFSETS) in names}
    if all(len(group) == 1 for group in groups.values()):
        contents = Contents.of_files({name: group[0] for name, group in groups.items()})
        return _joined([_reader(contents, names, options)], contents.paths)
    wanted = groups if names is None else names
    found = {name: or_reason(partial(_open_shards, groups[name], name, options)) for name in wanted}
    chosen = choose(found, names, list(groups), str(paths[0].parent))
    return SideBySide({name: shards.reader for name, shards in chosen.items()})


class _Shards(NamedTuple):
    """One field in many files."""

    reader: Reader

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return len(self.reader)

    @property
    def nbytes(self) -> int:
        """Bytes as delivered."""
        return len(self.reader) * self.reader.schema.row_bytes


def _open_shards(paths: Sequence[Path], name: str, options: FieldOptions) -> _Shards:
    return _Shards(_joined([_reader(Contents.of_files({name: path}), [name], options) for path in paths], paths))


def _reader(contents: Contents, names: list[str] | None, options: FieldOptions) -> NumpyReader:
    return NumpyReader(open_columns(contents, names, options), contents.paths, contents.metadata)


def _joined(readers: Sequence[Reader], paths: Sequence[Path]) -> Reader:
    """One reader for the rows of all; those without rows are left out.

    Raises:
        SchemaError: None has rows, or two differ in their fields.
    """
    with_rows = [(reader, path) for reader, path in zip(readers, paths, strict=False) if len(reader)]
    if not with_rows:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        raise SchemaError(f"{paths[0]}{more}: no row; there are fewer items than one row or one window takes")
    if len(with_rows) < len(readers):
        empty = [str(path) for reader, path in zip(readers, paths, strict=False) if not len(reader)]
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        logger.warning("left out, since there is no row in it: %s%s", ", ".join(empty[:5]), more)
    if len(with_rows) == 1:
        return with_rows[0][0]
    return Concatenated([reader for reader, _ in with_rows], [path for _, path in with_rows])


def _tensor(batch: Batch, name: str) -> torch.Tensor | None:
    values = batch.get(name)
    return values if isinstance(values, torch.Tensor) else None
