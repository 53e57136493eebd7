"""Facts about column chunks and pages out of a Parquet footer, page indexes and page headers.

pyarrow has them too, but ends the whole process when it is asked about a chunk whose statistics do not fit the type of
the column, as in a damaged footer, and has nothing about pages. So these structs in Thrift's compact protocol are read
here as nested values. The numbers of the fields are those of ``parquet.thrift``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import CorruptFileError

UNKNOWN = -1

CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")

_ROW_GROUPS, _COLUMNS, _CHUNK, _INDEX_OFFSET, _INDEX_BYTES = 4, 1, 3, 4, 5
_ENCODINGS, _CODEC, _NUM_VALUES, _NUM_BYTES, _DICTIONARY, _STATISTICS = 2, 4, 5, 6, 11, 12
_NULL_COUNT = 3
_PLAIN, _RLE = 0, 3
_LOCATIONS, _OFFSET, _PAGE_BYTES, _FIRST_ROW = 1, 1, 2, 3
_VALUE_BYTES, _STORED_BYTES, _CRC, _DATA, _DATA_V2, _PAGE_VALUES = 2, 3, 4, 5, 8, 1

_MOST_HEADER_BYTES = 16 << 10
"""Bytes of a page header that are looked at; statistics of wide values are in it."""

_ODD = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What a damaged struct ends in."""


@dataclass(frozen=True)
class Chunks:
    """What a footer says about column chunks; each array has the shape ``(num_groups, num_leaves)``."""

    num_values: npt.NDArray[np.int64]
    """Values, elements of lists counted one by one; a null and an empty list count as one."""
    num_bytes: npt.NDArray[np.int64]
    """Bytes before compression."""
    num_nulls: npt.NDArray[np.int64]
    """Nulls and empty lists; `UNKNOWN` without statistics."""
    codecs: npt.NDArray[np.int64]
    """Compression, as a position in `CODECS`."""
    is_plain: npt.NDArray[np.int64]
    """1 where values lie in the pages as they are, 0 where a dictionary or another encoding is used."""
    index_offsets: npt.NDArray[np.int64]
    """Where in the file the locations of the pages are; `UNKNOWN` where they are not."""
    index_bytes: npt.NDArray[np.int64]
    """Bytes of these locations."""


@dataclass(frozen=True)
class PageHeader:
    """What stands before the data of a page."""

    num_bytes: int
    """Bytes of the header."""
    num_values: int
    """Values in the page; `UNKNOWN` if it is no data page."""
    value_bytes: int
    """Bytes of its data when decompressed, those of the levels of a version 1 page included."""
    stored_bytes: int
    """Bytes of its data in the file."""
    crc: int | None
    """CRC-32 of the stored data, where the writer computed one."""


def read_chunks(path: Path, num_groups: int, num_leaves: int) -> Chunks:
    """Read a footer that pyarrow has accepted.

    Raises:
        CorruptFileError: It cannot be read, or describes other row groups or columns.
    """
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, os.SEEK_END)
        footer = file.read(size)
    try:
        groups = _struct(footer, 0)[0].get(_ROW_GROUPS, [])
        facts = [_facts(column) for group in groups for column in group[_COLUMNS]]
        table = np.array(facts, np.int64).reshape(num_groups, num_leaves, 7)
    except _ODD as error:
        raise CorruptFileError(f"{path}: its footer cannot be read ({error!r}); write the file again") from error
    return Chunks(*np.moveaxis(table, 2, 0))


def _facts(column: dict[int, Any]) -> tuple[int, ...]:
    chunk = column[_CHUNK]
    is_plain = _DICTIONARY not in chunk and {_PLAIN} <= set(chunk[_ENCODINGS]) <= {_PLAIN, _RLE}
    return (
        chunk[_NUM_VALUES],
        chunk[_NUM_BYTES],
        chunk.get(_STATISTICS, {}).get(_NULL_COUNT, UNKNOWN),
        chunk[_CODEC],
        is_plain,
        column.get(_INDEX_OFFSET, UNKNOWN),
        column.get(_INDEX_BYTES, 0),
    )


def page_locations(index: bytes) -> npt.NDArray[np.int64] | None:
    """Pages of a column chunk: byte offset, bytes with the header, and first row in the row group.

    Shape ``(num_pages, 3)``; None if these are no locations.
    """
    try:
        pages = [(page[_OFFSET], page[_PAGE_BYTES], page[_FIRST_ROW]) for page in _struct(index, 0)[0][_LOCATIONS]]
        return np.array(pages, np.int64).reshape(-1, 3)
    except _ODD:
        return None


def page_header(page: bytes) -> PageHeader | None:
    """The header at the start of a page; None if it is none."""
    try:
        header, num_bytes = _struct(page[:_MOST_HEADER_BYTES], 0)
        data = header.get(_DATA) or header.get(_DATA_V2) or {}
        crc = header.get(_CRC)
        return PageHeader(
            num_bytes,
            data.get(_PAGE_VALUES, UNKNOWN),
            header[_VALUE_BYTES],
            header[_STORED_BYTES],
            None if crc is None else crc & 0xFFFFFFFF,
        )
    except _ODD:
        return None


def _struct(data: bytes, position: int) -> tuple[dict[int, Any], int]:
    """A struct in the compact protocol as a dict by field number, and where it ends."""
    values: dict[int, Any] = {}
    number = 0
    while head := data[position]:
        position += 1
        kind = head & 15
        if head >= 16:
            number += head >> 4
        else:
            number, position = _integer(data, position)
        if kind <= 2:
            values[number] = kind == 1  # The value of a bool is its type.
        elif kind == 8 and data[position] < 128:  # A short string: the most frequent value by far.
            position += 1 + data[position]
        else:
            values[number], position = _READERS[kind](data, position)
    return values, position + 1


def _list(data: bytes, position: int) -> tuple[list[Any], int]:
    size, kind = divmod(data[position], 16)
    position += 1
    if size == 15:
        size, position = _varint(data, position)
    read = _READERS[kind]
    values = []
    for _ in range(size):
        value, position = read(data, position)
        values.append(value)
    return values, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[position]) >= 128:
        value |= (byte & 127) << shift
        shift += 7
        position += 1
    return value | byte << shift, position + 1


def _integer(data: bytes, position: int) -> tuple[int, int]:
    value, position = _varint(data, position)
    return value >> 1 ^ -(value & 1), position


def _string(data: bytes, position: int) -> tuple[None, int]:
    """Skips a string: none is needed."""
    size, position = _varint(data, position)
    return None, position + size


_READERS: dict[int, Callable[[bytes, int], tuple[Any, int]]] = {
    1: lambda data, position: (data[position], position + 1),
    2: lambda data, position: (data[position], position + 1),
    3: lambda data, position: (data[position], position + 1),
    4: _integer,
    5: _integer,
    6: _integer,
    7: lambda data, position: (None, position + 8),
    8: _string,
    9: _list,
    10: _list,
    12: _struct,
}
