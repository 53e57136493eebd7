"""The way from an HDF5 dataset to its rows: which read path it takes, and why.

    contiguous                                        memory map
    chunks along the first axis, no filter            memory map of chunks
    other chunks, no filter or filters with decoders  raw chunks, decoded in threads
    everything else                                   h5py

What HDF5 cannot be trusted to locate, and types that need conversion, go through h5py: right before fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import CorruptFileError, FileAccessError, MissingDependencyError
from lightning_fastio.formats.blocks import BlockCache
from lightning_fastio.formats.hdf5.blocks import BlockDataset, ChunkRows, LibraryRows, Values, rows_per_block
from lightning_fastio.formats.hdf5.chunks import ChunkIndex, Filter, decoders_for, filters_of, index_chunks
from lightning_fastio.formats.hdf5.library import H5File
from lightning_fastio.formats.hdf5.mapped import ContiguousDataset, MappedChunks
from lightning_fastio.formats.hdf5.source import Source, WindowedDataset
from lightning_fastio.formats.hdf5.types import Element, is_raw
from lightning_fastio.formats.mapped import MappedFile

Int64Array = npt.NDArray[np.int64]

FILTER_NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
FILTER_NAMES |= {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}

LARGE_CHUNK_BYTES = 16 << 20
"""Chunks above this size are slow to shuffle: each costs a decode for the few rows that a window takes from it."""

NUM_SAMPLES = 16
"""Rows that are read to estimate the size of rows of varying length."""

OBJECT_BYTES = 64
"""What a Python object takes besides its content."""


@dataclass(frozen=True)
class Path:
    """How the rows of a dataset get out of its file."""

    source: Source
    stored: str
    """Type, shape and layout on disk."""
    read_path: str
    hint: str = ""
    """Why the layout is slow; empty when there is nothing to gain."""
    never_written: str = ""
    """How much was never written and reads as the fill value; empty when everything was."""


@dataclass(frozen=True)
class PathOptions:
    """What the user chose."""

    window: int | None
    stride: int
    cache: BlockCache[tuple[BlockDataset, int], Values]
    maps: dict[str, MappedFile]
    """One map for each file."""


def choose_path(dataset: Any, elements: Mapping[str, Element], file: H5File, options: PathOptions) -> Path:
    """The fastest path that is right for a dataset.

    Args:
        dataset: The open dataset.
        elements: Field name to what a row becomes.
        file: The file that the reader was opened on.
        options: What the user chose.

    Raises:
        MissingDependencyError: A filter is not installed.
        FileAccessError: The source of a virtual dataset, or external raw data, is missing.
        CorruptFileError: The dataset reaches beyond the end of the file.
        FormatError: A row is too large, or windows were asked of rows without one shape.
    """
    if os.path.abspath(dataset.file.filename) != file.path:  # Behind an external link.
        file = H5File.at(dataset.file.filename, locking=file.locking)
    filters = filters_of(dataset)
    check_filters(filters, file.path, dataset.name)
    check_other_files(dataset, file.path)
    path = _fastest_path(dataset, elements, file, options, describe(dataset, filters))
    return replace(path, never_written=never_written(dataset))


def _fastest_path(
    dataset: Any, elements: Mapping[str, Element], file: H5File, options: PathOptions, stored: str
) -> Path:
    if not is_raw(dataset):
        return _library_path(dataset, elements, file, options, stored)
    if dataset.chunks is None:
        found = _contiguous_path(dataset, elements, file, options, stored)
        return found or _library_path(dataset, elements, file, options, stored)
    index = "the file has a user block" if dataset.file.userblock_size else index_chunks(dataset, file.size)
    if isinstance(index, str):
        return _library_path(dataset, elements, file, options, stored, reason=index)
    if not index.filters:
        _check_sizes(index, file.path, dataset.name)
        found = _mapped_chunks_path(dataset, elements, index, file, options, stored)
        if found is not None:
            return found
    return _raw_chunks_path(dataset, elements, index, file, options, stored)


def _contiguous_path(
    dataset: Any, elements: Mapping[str, Element], file: H5File, options: PathOptions, stored: str
) -> Path | None:
    name, element = next(iter(elements.items()))
    # In a file with a user block, HDF5 makes up an offset for values that were never written.
    offset = dataset.id.get_offset() if dataset.id.get_storage_size() else None
    if offset is None or element.members or dataset.size == 0:
        return None
    if offset + dataset.size * dataset.dtype.itemsize > file.size:
        raise CorruptFileError(f"{file.path}: {dataset.name!r} reaches beyond the end of the file; it is incomplete")
    stride = None if options.window is None else options.stride
    mapped = _map_of(file, options)
    source = ContiguousDataset(name, element, mapped, offset, len(dataset), window=options.window, stride=stride)
    return Path(source, stored, "memory map")


def _mapped_chunks_path(
    dataset: Any, elements: Mapping[str, Element], index: ChunkIndex, file: H5File, options: PathOptions, stored: str
) -> Path | None:
    name, element = next(iter(elements.items()))
    if not index.covers_sample or element.members or index.chunk_bytes == 0:
        return None
    mapped = MappedChunks(name, element, _map_of(file, options), index, fill_value(dataset))
    return Path(_windowed(mapped, options), stored, "memory map of chunks")


def _raw_chunks_path(
    dataset: Any, elements: Mapping[str, Element], index: ChunkIndex, file: H5File, options: PathOptions, stored: str
) -> Path:
    pieces, hint = index.offsets.shape[1], ""
    if pieces > 1:
        hint = f"each row is spread over {pieces} chunks"
    elif index.chunk_bytes > LARGE_CHUNK_BYTES:
        hint = f"chunks of {index.chunk_bytes >> 20} MiB decode whole, which makes shuffling coarse"
    if decoders_for(index.filters) is None:
        names = " + ".join(_name(each) for each in index.filters)
        hint = hint or f"{names} is decoded by one thread at a time"
        return replace(_library_path(dataset, elements, file, options, stored), hint=hint)
    row_bytes = index.dtype.itemsize * prod(index.shape[1:])
    source = BlockDataset(
        dataset.name,
        elements,
        ChunkRows(file, dataset.name, index, fill_value(dataset)),
        len(dataset),
        rows_per_block(len(dataset), row_bytes, index.chunk[0]),
        row_bytes,
        options.cache,
    )
    read_path = "raw chunks decoded in threads" if index.filters else "raw chunks assembled in threads"
    return Path(_windowed(source, options), stored, read_path, hint)


def _library_path(
    dataset: Any, elements: Mapping[str, Element], file: H5File, options: PathOptions, stored: str, reason: str = ""
) -> Path:
    varies = any(element.spec.kind != "tensor" for element in elements.values())
    row_bytes = _sampled_row_bytes(dataset, elements) if varies else dataset.dtype.itemsize * prod(dataset.shape[1:])
    # Rows of varying length lie outside their chunk, each by itself.
    band_rows = 1 if varies else dataset.chunks and dataset.chunks[0]
    block_rows = rows_per_block(len(dataset), row_bytes, band_rows)
    rows = LibraryRows(file, dataset.name)
    source = BlockDataset(dataset.name, elements, rows, len(dataset), block_rows, row_bytes, options.cache)
    hint = "" if varies or block_rows >= len(dataset) else "one thread at a time reads through the HDF5 library"
    return Path(_windowed(source, options), stored, f"h5py ({reason})" if reason else "h5py", hint)


def _sampled_row_bytes(dataset: Any, elements: Mapping[str, Element]) -> int:
    """Delivered bytes of a row, from a few rows where they vary in length; what Python adds to each included."""
    num_rows = len(dataset)
    if num_rows == 0:
        return 1
    sizes = []
    for row in range(0, num_rows, max(1, num_rows // NUM_SAMPLES)):
        values = [element.stored_in(dataset[row : row + 1])[0] for element in elements.values()]
        sizes.append(sum(value.nbytes if hasattr(value, "nbytes") else len(value) for value in values))
    return OBJECT_BYTES * len(elements) + sum(sizes) // len(sizes)


def _check_sizes(index: ChunkIndex, file: str, name: str) -> None:
    if not (index.sizes[index.offsets >= 0] == index.chunk_bytes).all():
        raise CorruptFileError(f"{file}: {name!r} has unfiltered chunks of a wrong size")


def check_filters(filters: tuple[Filter, ...], file: str, path: str) -> None:
    """Check that the library can undo all filters of a dataset.

    Raises:
        MissingDependencyError: A plugin has to be installed.
    """
    missing = [each for each in filters if not h5py.h5z.filter_avail(each.number)]
    if missing:
        with suppress(ImportError):
            import hdf5plugin  # noqa: F401 - registers its filters
        missing = [each for each in missing if not h5py.h5z.filter_avail(each.number)]
    if missing:
        raise MissingDependencyError(
            f"{file}: dataset {path!r} is compressed with filter {missing[0].number} ({_name(missing[0])}), which is "
            "not installed: pip install hdf5plugin"
        )


def check_other_files(dataset: Any, file: str) -> None:
    """Check that the files which hold a virtual or external dataset's values are there.

    Raises:
        FileAccessError: One is missing, which HDF5 would answer with fill values.
    """
    folder = os.path.dirname(file)
    plist = dataset.id.get_create_plist()
    names = [os.fsdecode(plist.get_external(number)[0]) for number in range(plist.get_external_count())]
    if dataset.is_virtual:
        names += [each.file_name for each in dataset.virtual_sources() if "%b" not in each.file_name]
    kind = "virtual" if dataset.is_virtual else "external"
    for name in dict.fromkeys(names):
        candidates = (name, os.path.join(folder, name), os.path.join(folder, os.path.basename(name)))
        if name != "." and not any(os.path.exists(each) for each in candidates):
            raise FileAccessError(
                f"{file}: the values of the {kind} dataset {dataset.name!r} are in {name!r}, a file that is missing"
            )


def never_written(dataset: Any) -> str:
    """How much of a dataset was never written, which HDF5 answers with its fill value; empty if nothing is known."""
    if dataset.chunks is not None:
        num_chunks = prod(-(-length // size) for length, size in zip(dataset.shape, dataset.chunks, strict=True))
        num_missing = num_chunks - dataset.id.get_num_chunks()
        return f"{num_missing} of {num_chunks} chunks" if num_missing > 0 else ""
    is_elsewhere = dataset.is_virtual or dataset.external is not None
    return "all values" if dataset.size and not dataset.id.get_storage_size() and not is_elsewhere else ""


def fill_value(dataset: Any) -> npt.NDArray[Any]:
    """The stored value of elements that were never written; zeros where none is defined."""
    try:
        value = dataset.fillvalue
    except (RuntimeError, ValueError, TypeError):
        value = None
    out = np.zeros((), dataset.dtype.base)
    if value is not None:
        out[...] = value
    return out


def describe(dataset: Any, filters: tuple[Filter, ...]) -> str:
    """Type, shape and layout on disk, in a few words."""
    dtype = dataset.dtype
    words = [f"{_type_name(dtype)} {tuple(dataset.shape)}"]
    if dataset.chunks:
        words.append(f"chunks {tuple(dataset.chunks)}")
    if filters:
        words.append(" + ".join(_name(each) for each in filters))
    if dataset.is_virtual:
        words.append("virtual")
    elif dataset.external:
        words.append("external")
    return ", ".join(words)


def _type_name(dtype: np.dtype[Any]) -> str:
    if h5py.check_string_dtype(dtype) is not None:
        return "text"
    if (base := h5py.check_vlen_dtype(dtype)) is not None:
        return f"rows of varying length of {base}"
    return "records" if dtype.names else dtype.name


def _name(filter_: Filter) -> str:
    return FILTER_NAMES.get(filter_.number) or filter_.name or str(filter_.number)


def _map_of(file: H5File, options: PathOptions) -> MappedFile:
    if file.path not in options.maps:
        options.maps[file.path] = MappedFile(file.path)
    return options.maps[file.path]


def _windowed(source: Source, options: PathOptions) -> Source:
    return source if options.window is None else WindowedDataset(source, options.window, options.stride)
