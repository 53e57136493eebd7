"""HDF5: rows of the datasets of a file, also NetCDF-4, MATLAB 7.3, AnnData and 10x.

A field is a dataset, by its path in the file (``images/train``); a member of a dataset of records
(``table.energy``); or a group that holds a sparse matrix. `types` says what each stored type becomes, and
`paths` how its rows get out. With ``fields=None`` all fields with the same number of rows are taken: of several
numbers, the one whose fields hold the most bytes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import ConfigError, CorruptFileError, FastIOError, FormatError, SchemaError
from lightning_fastio.formats.base import FieldLayout, Fields, Reader, Rows, check_rows
from lightning_fastio.formats.blocks import BlockCache
from lightning_fastio.formats.files import Source as Paths
from lightning_fastio.formats.files import fingerprint_of, resolve
from lightning_fastio.formats.hdf5.blocks import BlockDataset, Values, make_cache
from lightning_fastio.formats.hdf5.library import H5File
from lightning_fastio.formats.hdf5.mapped import ContiguousDataset
from lightning_fastio.formats.hdf5.paths import Path, PathOptions, choose_path
from lightning_fastio.formats.hdf5.sparse import SparseRows
from lightning_fastio.formats.hdf5.tree import find, walk
from lightning_fastio.formats.hdf5.types import Element, RaggedPolicy, elements_of
from lightning_fastio.formats.hdf5.writer import BLOCK_BYTES, FILE_ATTRIBUTE, HDF5Writer
from lightning_fastio.formats.joined import Concatenated
from lightning_fastio.formats.mapped import MappedArray
from lightning_fastio.formats.selection import Selection, stored_names, wanted_fields
from lightning_fastio.schema import Batch, FieldSpec, Schema

Int64Array = npt.NDArray[np.int64]
Cache = BlockCache[tuple[BlockDataset, int], Values]

_log = logging.getLogger("lightning_fastio")


def open_source(
    source: Paths,
    fields: Fields = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    sparse: bool = False,
    ragged: RaggedPolicy = "auto",
    cache_bytes: int = 1 << 30,
    widen_unsigned: bool = True,
    locking: bool | None = None,
) -> Reader:
    """Open a file, a folder, a glob, or a list of these, whose rows follow one another; see `HDF5Reader`."""
    paths = resolve(source, "hdf5")
    fields = _without_slashes(fields)
    wanted = wanted_fields(fields)
    names = None if wanted is None else stored_names(wanted)
    cache = make_cache(cache_bytes)

    def open_all(ragged: RaggedPolicy, names: list[str] | None) -> list[HDF5Reader]:
        readers: list[HDF5Reader] = []
        for path in paths:
            reader = HDF5Reader(
                path,
                list(readers[0].schema) if readers else names,
                window=window,
                stride=stride,
                sparse=sparse,
                ragged=ragged,
                cache=cache,
                widen_unsigned=widen_unsigned,
                locking=locking,
            )
            readers.append(reader)
        return [reader for reader in readers if len(reader)] or readers[:1]

    readers = open_all(ragged, names)
    if ragged == "auto" and any(reader.schema != readers[0].schema for reader in readers):
        readers = open_all("list", names)  # Rows have one length in each file, but not the same in all.
    joined = readers[0] if len(readers) == 1 else Concatenated(readers, [reader.path for reader in readers])
    if window is not None and not len(joined):
        raise SchemaError(f"{paths[0]}: no window of {window} fits into its data; use a shorter window")
    return Selection.of(joined, fields)


def open_target(
    path: str | FilePath,
    *,
    metadata: Mapping[str, str] | None = None,
    compression: str | Mapping[str, Any] | None = None,
    rows_per_block: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> HDF5Writer:
    """Create a file; see `HDF5Writer`."""
    return HDF5Writer(
        path, metadata=metadata, compression=compression, rows_per_block=rows_per_block, block_bytes=block_bytes
    )


class HDF5Reader:
    """Rows of one HDF5 file."""

    def __init__(
        self,
        path: str | FilePath,
        fields: Sequence[str] | None = None,
        *,
        window: int | None = None,
        stride: int | None = None,
        sparse: bool = False,
        ragged: RaggedPolicy = "auto",
        cache: Cache | None = None,
        widen_unsigned: bool = True,
        locking: bool | None = None,
    ) -> None:
        """Open a file and choose how each field is read.

        Args:
            path: The file.
            fields: Names of datasets, records' members or sparse groups, in the order of delivery. None takes all that
                can be loaded and that have the same number of rows, with a notice about the others.
            window: Rows of a window, if overlapping windows along the first axis are the samples.
            stride: Rows from the start of one window to that of the next; the window's length by default.
            sparse: Deliver sparse matrices as sparse CSR tensors instead of dense rows.
            ragged: Variable-length rows as a list of tensors (auto, list), as one tensor padded with zeros to the
                longest of the batch (pad), or refused (error).
            cache: Keeps decoded blocks; of 1 GiB by default. Several readers may share one.
            widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64.
            locking: Whether HDF5 locks the file. False opens files on file systems without locks.

        Raises:
            FileAccessError: The file is missing, locked, or may not be read.
            CorruptFileError: The file, or one that it refers to, is missing or incomplete.
            SchemaError: A field is unknown, or fields differ in their number of rows.
            FormatError: A field cannot be loaded, or none can.
            MissingDependencyError: A filter has to be installed.
            ConfigError: A window or stride is not positive.
        """
        if (window is not None and window < 1) or (stride is not None and stride < 1):
            raise ConfigError(f"window={window} and stride={stride} must be at least 1")
        if stride is not None and window is None:
            raise ConfigError(f"stride={stride} needs window=, the number of rows of a sample")
        self.path = str(path)
        self._file = H5File.at(path, locking=locking)
        self._cache = make_cache(1 << 30) if cache is None else cache
        self._options = PathOptions(window, stride or window or 1, self._cache, {})
        self._sparse, self._ragged, self._widen_unsigned = sparse, ragged, widen_unsigned
        try:
            with self._file.use() as file:
                paths = self._all_paths(file) if fields is None else self._named_paths(file, fields)
                self.metadata: dict[str, str] = _about(file).get("metadata", {})
                is_matlab = file.userblock_size and _is_matlab(self.path)
        finally:
            self._file.close()  # Mapped rows need no handle, and an open one keeps others from replacing the file.
        if is_matlab:
            _log.warning("%s: MATLAB stores arrays with their axes reversed: axis 0 here is its last", self.path)
        self._paths = paths
        specs = {name: spec for path in paths for name, spec in path.source.fields.items()}
        self.schema = Schema(specs if fields is None else {name: specs[name] for name in fields})
        self._num_rows = paths[0].source.num_rows
        self._note_unwritten()

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"HDF5Reader({self.path!r}, {len(self)} rows, {self.schema})"

    @property
    def blocks(self) -> Int64Array | None:
        """Blocks of the largest field that is decoded; None where such fields are small beside mapped ones."""
        cut = [path.source for path in self._paths if path.source.bounds is not None]
        if not cut:
            return None
        is_mixed = len(cut) < len(self._paths)
        if is_mixed and sum(source.num_bytes for source in cut) <= self._cache.max_bytes // 2:
            return None
        return max(cut, key=lambda source: source.num_bytes).bounds

    @property
    def cache_bytes(self) -> int:
        """Bytes of decoded blocks that are kept; 0 when everything is mapped."""
        return 0 if all(path.source.bounds is None for path in self._paths) else self._cache.max_bytes

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a decoded row, text and lists included."""
        return sum(path.source.num_bytes for path in self._paths) / max(1, len(self))

    @property
    def fingerprint(self) -> str:
        """Changes with the name and size of the file, its rows, and the schema."""
        return fingerprint_of([FilePath(self.path)], len(self), self.schema)

    def will_need(self, rows: Rows) -> None:
        """Start the I/O of mapped rows and the decoding of blocks."""
        try:
            checked = check_rows(rows, len(self))
            for path in self._paths:
                path.source.announce(checked)
        except (FastIOError, OSError):
            return  # The read of these rows has the same error.

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows; see `Reader.read`."""
        checked = check_rows(rows, len(self))
        buffers = self.schema.buffers(len(checked), out)
        found: Batch = {}
        for path in self._paths:
            found |= path.source.read(checked, buffers)
        if self._ragged == "pad":
            for name, spec in self.schema.items():
                if spec.kind == "ragged":
                    found[name] = _pad(found[name], spec)  # type: ignore[arg-type]
        return {name: found[name] for name in self.schema}

    def read_into(self, rows: Int64Array, batch: Batch, positions: Int64Array) -> None:
        """Put checked rows at their places in larger buffers, for the fields that the batch has."""
        for path in self._paths:
            if path.source.fields.keys() <= batch.keys():
                path.source.read(rows, batch, positions)

    def mapped_arrays(self) -> dict[str, MappedArray]:
        """The fields that lie in one piece of the file."""
        sources = (path.source for path in self._paths)
        return {name: each.array for each in sources if isinstance(each, ContiguousDataset) for name in each.fields}

    def layout(self) -> list[FieldLayout]:
        """How each field is stored and read."""
        rewrite = f": fastio convert {FilePath(self.path).name} fast.h5"
        by_name = {name: path for path in self._paths for name in path.source.fields}
        return [
            FieldLayout(name, path.stored, path.read_path, path.hint and path.hint + rewrite)
            for name, path in ((name, by_name[name]) for name in self.schema)
        ]

    def close(self) -> None:
        """Give back maps and handles, forget decoded blocks, end the decoding threads."""
        for path in self._paths:
            path.source.close()
        self._cache.close()
        self._file.close()

    def _named_paths(self, file: h5py.File, fields: Sequence[str]) -> list[Path]:
        wanted: dict[tuple[str, str], dict[str, Element]] = {}
        objects: dict[tuple[str, str], Any] = {}
        for name in fields:
            found, member = find(file, name)
            elements = self._elements(found)
            if not member and set(elements) != {""}:
                inside = ", ".join(repr(f"{name}.{each}") for each in elements)
                raise FormatError(f"{self.path}: {name!r} holds records; name their members: {inside}")
            if member not in elements:
                raise SchemaError(f"{self.path}: {name!r}: its records have {', '.join(map(repr, elements))}")
            element = elements[member]
            if isinstance(element, str):
                raise FormatError(f"{self.path}: field {name!r} cannot be loaded: {element}")
            key = (found.file.filename, found.name)
            objects[key] = found
            wanted.setdefault(key, {})[name] = element
        paths = [self._path(objects[key], elements) for key, elements in wanted.items()]
        lengths = {name: path.source.num_rows for path in paths for name in path.source.fields}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise SchemaError(f"{self.path}: the fields differ in their number of rows: {listed}")
        return paths

    def _all_paths(self, file: h5py.File) -> list[Path]:
        tree = walk(file)
        left_out = dict(tree.unreachable)
        paths: list[Path] = []
        order = {name: position for position, name in enumerate(_about(file).get("fields", []))}
        for name, found in sorted(tree.found.items(), key=lambda item: order.get(item[0], len(order))):
            elements = self._elements(found)
            left_out |= {_join(name, member): each for member, each in elements.items() if isinstance(each, str)}
            usable = {_join(name, member): each for member, each in elements.items() if isinstance(each, Element)}
            if usable:
                try:
                    paths.append(self._path(found, usable))
                except CorruptFileError:
                    raise
                except FastIOError as error:
                    left_out |= dict.fromkeys(usable, str(error).removeprefix(f"{self._file.path}: "))
        if not paths:
            reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
            raise FormatError(f"{self.path}: no field can be loaded: {reasons or 'it holds no dataset'}")
        num_rows = _most_bytes(paths)
        for path in paths:
            if path.source.num_rows != num_rows:
                left_out |= dict.fromkeys(path.source.fields, f"it has {path.source.num_rows} rows, not {num_rows}")
        taken = [path for path in paths if path.source.num_rows == num_rows]
        if left_out:
            names = [name for path in taken for name in path.source.fields]
            reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
            _log.warning("%s: left out %s. Taken: fields=%s", self.path, reasons, names)
        return taken

    def _elements(self, found: Any) -> Mapping[str, Element | str]:
        """What the rows of an object become, or why not."""
        if isinstance(found, h5py.Group):
            return {"": Element(FieldSpec(None, kind="sparse"), np.dtype("V"))}
        if found.shape is None:
            return {"": "it is empty: it has a type but no values"}
        if found.shape == ():
            return {"": "it is a single value without rows"}
        return elements_of(found, ragged=self._ragged, widen_unsigned=self._widen_unsigned)

    def _path(self, found: Any, elements: Mapping[str, Element]) -> Path:
        if isinstance(found, h5py.Dataset):
            return choose_path(found, elements, self._file, self._options)
        if self._options.window is not None:
            raise FormatError(f"{self.path}: window= takes rows of arrays, but {found.name!r} is a sparse matrix")
        plain = replace(self._options, window=None)
        columns: list[Path] = []

        def open_column(dataset: Any, name: str) -> Any:
            element = elements_of(dataset, ragged="error", widen_unsigned=True)[""]
            if isinstance(element, str):
                raise FormatError(f"{self.path}: {dataset.name!r}: {element}")
            columns.append(choose_path(dataset, {name: element}, self._file, plain))
            return columns[-1].source

        rows = SparseRows(next(iter(elements)), found, open_column, sparse=self._sparse)
        return replace(columns[0], source=rows, stored=f"sparse rows of {columns[0].stored}")

    def _note_unwritten(self) -> None:
        for path in self._paths:
            if path.never_written:
                names = " and ".join(map(repr, path.source.fields))
                _log.warning(
                    "%s: %s of %s were never written and read as the fill value", self.path, path.never_written, names
                )


def _without_slashes(fields: Fields) -> Fields:
    """``/images/train`` is ``images/train``."""
    if isinstance(fields, Mapping):
        return {
            name: stored.strip("/") if isinstance(stored, str) else [each.strip("/") for each in stored]
            for name, stored in fields.items()
        }
    return fields if fields is None or isinstance(fields, str) else [name.strip("/") for name in fields]


def _about(file: h5py.File) -> dict[str, Any]:
    """What this package's writer stored about the file; empty for files of others."""
    about = file.attrs.get(FILE_ATTRIBUTE)
    return dict(json.loads(about)) if isinstance(about, str) else {}


def _join(name: str, member: str) -> str:
    return f"{name}.{member}" if member else name


def _most_bytes(paths: Sequence[Path]) -> int:
    """The number of rows whose fields hold the most bytes."""
    sizes: Counter[int] = Counter()
    for path in paths:
        sizes[path.source.num_rows] += 1 + path.source.num_bytes
    return max(sizes, key=lambda num_rows: (sizes[num_rows], num_rows))


def _is_matlab(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(10) == b"MATLAB 7.3"


def _pad(rows: Sequence[torch.Tensor], spec: FieldSpec) -> torch.Tensor:
    """Rows of varying length as one tensor, with zeros after the shorter ones."""
    out = torch.zeros((len(rows), max(map(len, rows), default=0), *spec.shape), dtype=spec.dtype)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out
