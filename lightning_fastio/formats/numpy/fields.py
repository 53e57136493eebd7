"""Which arrays of files become fields, and which are left out and why."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar

from typing_extensions import Self

from lightning_fastio.errors import ConfigError, FormatError, SchemaError
from lightning_fastio.formats.numpy.columns import Column, TensorColumn, TextColumn, why_not
from lightning_fastio.formats.numpy.ragged import Offsets, RaggedColumn, SparseColumn
from lightning_fastio.formats.numpy.stored import StoredArray, read_npy, read_npz, zip_errors
from lightning_fastio.formats.selection import unknown_field
from lightning_fastio.schema import Kind

logger = logging.getLogger("lightning_fastio")

RaggedPolicy: TypeAlias = Literal["auto", "list", "pad", "error"]

NOTES = "metadata.json"
"""File of a folder, or member of an .npz, in which the writer notes order and kinds of the fields, and metadata."""

OFFSETS = ".offsets"
"""Added to the name of a field whose rows differ in length: the array that says where each begins."""

_SHARD = re.compile(r"^(?:(.*?)[-_.])?(\d+)(?:[-_.]?of[-_.]?\d+)?$")
_SPARSE_PARTS = {"format", "shape", "data", "indices", "indptr"}
_MOST_NOTES_BYTES = 16 << 20


@dataclass(frozen=True)
class FieldOptions:
    """How fields are delivered; see `open_source`."""

    window: int | None = None
    stride: int | None = None
    sparse: bool = False
    ragged: RaggedPolicy = "auto"
    widen_unsigned: bool = True
    cache_bytes: int = 1 << 30

    def checked(self) -> Self:
        """The options, if they are possible.

        Raises:
            ConfigError: They are not.
        """
        if (self.window is not None and self.window < 1) or (self.stride is not None and self.stride < 1):
            raise ConfigError(f"window={self.window} and stride={self.stride} must be at least 1")
        if self.stride is not None and self.window is None:
            raise ConfigError(f"stride={self.stride} needs window=, the number of items of a row")
        if self.ragged not in ("auto", "list", "pad", "error"):
            raise ConfigError(f"ragged={self.ragged!r} is none of 'auto', 'list', 'pad', 'error'")
        return self


@dataclass(frozen=True)
class Contents:
    """Arrays that lie side by side in one archive or in several files, and what their writer noted."""

    where: str
    """The archive, or the folder."""
    arrays: dict[str, StoredArray]
    """All arrays by name."""
    paths: list[Path]
    """Their files."""
    stem: str = ""
    """What a sparse matrix is called, whose parts have no name of their own."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Kinds of the fields, in order, as far as noted."""
    metadata: dict[str, str] = field(default_factory=dict)
    """What the writer stored with the data."""

    @classmethod
    def of_archive(cls, path: Path, stem: str, cache_bytes: int = 0) -> Self:
        """Arrays of an .npz; a sparse matrix of SciPy is called ``stem``."""
        arrays = read_npz(path, cache_bytes)
        with zip_errors(path), zipfile.ZipFile(path) as archive:
            notes = archive.read(NOTES) if NOTES in archive.namelist() else b""
        return cls(str(path), arrays, [path], stem, *_parse_notes(notes))

    @classmethod
    def of_files(cls, paths: Mapping[str, Path]) -> Self:
        """Arrays of .npy files by field name."""
        first = next(iter(paths.values()))
        arrays = {name: replace(read_npy(path), name=name) for name, path in paths.items()}
        notes_path = first.with_name(NOTES)
        is_noted = notes_path.is_file() and notes_path.stat().st_size <= _MOST_NOTES_BYTES
        where = str(first.parent if len(paths) > 1 else first)
        return cls(where, arrays, list(paths.values()), "", *_parse_notes(notes_path.read_bytes() if is_noted else b""))

    @property
    def is_sparse(self) -> bool:
        """Whether these are the parts of a sparse matrix."""
        return set(self.arrays) >= _SPARSE_PARTS

    @property
    def names(self) -> list[str]:
        """Fields, loadable or not, in the order of the notes, then of the files."""
        if self.is_sparse:
            return [self.stem]
        companions = {name + OFFSETS for name in self.arrays}
        fields = [name for name in self.arrays if name not in companions]
        noted = [name for name in self.kinds if name in fields]
        return noted + [name for name in fields if name not in noted]


class Sized(Protocol):
    """What decides whether a field is taken."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        ...

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        ...


Field = TypeVar("Field", bound=Sized)


def is_archive(path: Path) -> bool:
    """Whether a NumPy file is an .npz rather than an .npy."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def group_shards(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Field names and their files: those that differ in a trailing number only are shards of one field.

    ``x-000.npy`` is one even when it is alone, ``scores-2020.npy`` is not. Files that are named by numbers only are
    shards of a field named after their folder.
    """
    bases: dict[str, list[Path]] = {}
    for path in paths:
        found = _SHARD.match(path.stem)
        base = (found[1] or path.absolute().parent.name) if found else path.stem
        bases.setdefault(base, []).append(path)
    groups: dict[str, list[Path]] = {}
    for base, members in bases.items():
        found = _SHARD.match(members[0].stem)
        is_alone = len(members) == 1 and (found is None or int(found[2]) > 0)
        groups[members[0].stem if is_alone else base] = members
    return groups


def open_columns(contents: Contents, names: list[str] | None, options: FieldOptions) -> list[Column]:
    """The fields that are wanted, or all that can be loaded.

    Raises:
        FormatError: A field that was named cannot be loaded, or none can.
        SchemaError: A field is unknown, or fields that were named differ in their number of rows.
    """
    wanted = contents.names if names is None else [name for name in names if name in contents.names]
    found = {name: or_reason(partial(_open_column, contents, name, options)) for name in wanted}
    return list(choose(found, names, contents.names, contents.where).values())


def or_reason(open_field: Callable[[], Field]) -> Field | str:
    """A field, or the reason why it cannot be loaded."""
    try:
        return open_field()
    except FormatError as error:
        return str(error)


def _open_column(contents: Contents, name: str, options: FieldOptions) -> Column:
    if contents.is_sparse:
        if options.window is not None:
            raise FormatError("a sparse matrix, which has no windows")
        for array in contents.arrays.values():
            array.verify()
        return SparseColumn(name, contents.arrays, sparse=options.sparse, widen_unsigned=options.widen_unsigned)
    array, offsets = contents.arrays[name], contents.arrays.get(name + OFFSETS)
    reason = why_not(array)
    if reason:
        raise FormatError(f"{array.dtype} {array.shape}: {reason}")
    array.verify()
    if offsets is None and array.dtype.kind not in "SU":
        widen, window, stride = options.widen_unsigned, options.window, options.stride
        return TensorColumn(name, array, widen_unsigned=widen, window=window, stride=stride)
    if options.window is not None:
        raise FormatError("text or rows of varying length, which have no windows")
    if offsets is None:
        return TextColumn(name, array)
    offsets.verify()
    return _open_ragged(name, array, Offsets(offsets, array.shape[0]), contents.kinds.get(name, "ragged"), options)


def _open_ragged(name: str, array: StoredArray, offsets: Offsets, kind: Kind, options: FieldOptions) -> Column:
    is_equal = offsets.shortest == offsets.longest and array.rows().order == "C"
    if kind == "ragged" and is_equal and options.ragged in ("auto", "error"):
        shape = (offsets.num_rows, offsets.longest, *array.shape[1:])
        return TensorColumn(name, replace(array, shape=shape), widen_unsigned=options.widen_unsigned)
    if kind == "ragged" and options.ragged == "error":
        raise FormatError(
            f"rows of {offsets.shortest} to {offsets.longest} items; ragged='list' or 'pad' delivers such rows"
        )
    pad, widen = options.ragged == "pad", options.widen_unsigned
    return RaggedColumn(name, array, offsets, kind, pad=pad, widen_unsigned=widen)


def choose(found: Mapping[str, Field | str], names: list[str] | None, known: list[str], where: str) -> dict[str, Field]:
    """The fields to take, of those that were found loadable and those that were not.

    Args:
        found: Something with ``num_rows`` and ``nbytes`` by name, or the reason why a field cannot be loaded.
        names: Fields that were asked for; None takes all with the number of rows under which the most bytes lie, and
            says which are left out.
        known: All names.
        where: File or folder.
    """
    loadable = {name: each for name, each in found.items() if not isinstance(each, str)}
    if names is not None:
        for name in names:
            if name not in known:
                raise unknown_field(name, known, where)
            if name not in loadable:
                raise FormatError(f"{where}: field {name!r} cannot be loaded: {found[name]}")
            if loadable[name].num_rows != loadable[names[0]].num_rows:
                raise SchemaError(
                    f"{where}: field {names[0]!r} has {loadable[names[0]].num_rows} rows, but {name!r} has "
                    f"{loadable[name].num_rows}; fields of one source have equally many"
                )
        return {name: loadable[name] for name in names}
    if not loadable:
        raise FormatError(f"{where} holds nothing that can be loaded: {_listed(found)}")
    sizes: Counter[int] = Counter()
    for each in loadable.values():
        sizes[each.num_rows] += 1 + each.nbytes
    num_rows = sizes.most_common(1)[0][0]
    taken = {name: each for name, each in loadable.items() if each.num_rows == num_rows}
    left_out = {
        name: each if isinstance(each, str) else f"{each.num_rows} rows instead of {num_rows}"
        for name, each in found.items()
        if name not in taken
    }
    if left_out:
        logger.warning(
            "%s: left out %s. fields=%s says that these are the ones you want", where, _listed(left_out), list(taken)
        )
    return taken


def _listed(reasons: Mapping[str, object]) -> str:
    return "; ".join(f"{name!r} ({reason})" for name, reason in reasons.items())


def dump_notes(kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> str:
    """What `Contents` reads back."""
    return json.dumps({"fastio": {"fields": kinds, "metadata": metadata}}, indent=2, ensure_ascii=False)


def _parse_notes(text: bytes) -> tuple[dict[str, Kind], dict[str, str]]:
    """Kinds and metadata; nothing where a JSON file of somebody else lies."""
    try:
        notes = json.loads(text)["fastio"]
        return dict(notes["fields"]), dict(notes["metadata"])
    except (ValueError, KeyError, TypeError):
        return {}, {}
