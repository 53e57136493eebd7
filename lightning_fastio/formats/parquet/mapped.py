"""Fixed-size binary columns in plain, uncompressed pages: rows copied straight out of the memory-mapped files.

Where a file has a page index, the place of each page is known from its footer, and since all values are equally wide,
so is the place of each row. Nothing is decoded and nothing is kept. Each page is compared with its header and its
checksum before its first row is read in a process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lightning_fastio.errors import CorruptFileError, FastIOError
from lightning_fastio.formats.mapped import MappedFile, as_items, copy_items, sample
from lightning_fastio.formats.pages import Int64Array, address_of, announce, items_between
from lightning_fastio.formats.parquet.fields import Field
from lightning_fastio.formats.parquet.files import Files
from lightning_fastio.formats.parquet.footer import page_header, page_locations

_UNCOMPRESSED = 0


class Pages(NamedTuple):
    """All pages of a column, in the order of their rows. Arrays have one entry for each page."""

    files: Int64Array
    """Number of the file."""
    offsets: Int64Array
    """Where the page, header first, begins in it."""
    num_bytes: Int64Array
    """Bytes of the page with its header."""
    first_rows: Int64Array
    """Number of its first row, counted over all files."""
    num_rows: Int64Array


class MappedColumn:
    """Rows of one column. Thread-safe and picklable."""

    def __init__(self, name: str, files: Sequence[MappedFile], pages: Pages, row_bytes: int) -> None:
        """Set up; see `map_column`."""
        self._name = name
        self._files = list(files)
        self._pages = pages
        self._row_bytes = row_bytes
        # Levels that tell about nulls stand between the header and the values; these end the page.
        self._starts = pages.offsets + pages.num_bytes - pages.num_rows * row_bytes
        self._views: dict[int, _Views] = {}
        self._is_verified = np.zeros(len(pages.files), np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}, "_is_verified": np.zeros_like(self._is_verified)}

    def read(self, rows: Int64Array, out: torch.Tensor) -> None:
        """Copy checked rows into a contiguous buffer.

        Raises:
            CorruptFileError: A file is not as it was when it was opened, or a page is damaged.
        """
        if len(rows) == 0:
            return
        views = self._mapped()
        pages = np.searchsorted(self._pages.first_rows, rows, side="right") - 1
        for number in np.unique(self._pages.files[pages]).tolist():
            self._files[number].view()
        if not self._is_verified[pages].all():
            self._verify(views, np.unique(pages))
        target = as_items(out.view(len(rows), -1).view(torch.uint8).numpy())
        copy_items(views.items, views.rows[pages] + rows * self._row_bytes, target)

    def will_need(self, starts: Int64Array, stops: Int64Array) -> None:
        """Let the kernel read the pages of runs of rows in the background; never fails."""
        with suppress(FastIOError, OSError):
            views = self._mapped()
            firsts = np.searchsorted(self._pages.first_rows, starts, side="right") - 1
            lasts = np.searchsorted(self._pages.first_rows, stops - 1, side="right") - 1
            pages = np.unique(
                np.concatenate([np.arange(*run) for run in zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)])
            )
            files, offsets = self._pages.files[pages], self._pages.offsets[pages]
            for number in np.unique(files).tolist():
                inside = files == number
                if not self._files[number].has_in_memory(sample(offsets[inside])):
                    start = address_of(views.maps[number])
                    announce(start + offsets[inside], self._pages.num_bytes[pages[inside]])

    def close(self) -> None:
        """Let go of all maps; a later read maps again."""
        self._views.pop(os.getpid(), None)
        for file in self._files:
            file.close()

    def _mapped(self) -> _Views:
        found = self._views.get(os.getpid())
        if found is None:
            found = self._views.setdefault(os.getpid(), self._map())
        return found

    def _map(self) -> _Views:
        maps = [file.view() for file in self._files]
        addresses = np.array([address_of(view) for view in maps])
        origin = int(addresses.min())
        end = max(address + len(view) for address, view in zip(addresses.tolist(), maps, strict=True))
        starts = addresses[self._pages.files] - origin + self._starts
        return _Views(
            maps, items_between(origin, end, self._row_bytes), starts - self._pages.first_rows * self._row_bytes
        )

    def _verify(self, views: _Views, pages: Int64Array) -> None:
        for page in pages[~self._is_verified[pages]].tolist():
            self._verify_page(views, page)
            self._is_verified[page] = True

    def _verify_page(self, views: _Views, page: int) -> None:
        number, offset = int(self._pages.files[page]), int(self._pages.offsets[page])
        num_bytes, num_rows = int(self._pages.num_bytes[page]), int(self._pages.num_rows[page])
        self._files[number].view()
        stored = views.maps[number][offset : offset + num_bytes]
        header = page_header(bytes(stored[: 16 << 10]))
        problem = ""
        if header is None or header.num_values != num_rows or header.num_bytes + header.stored_bytes != num_bytes:
            problem = "its header contradicts the page index"
        elif header.value_bytes != header.stored_bytes or header.value_bytes < num_rows * self._row_bytes:
            problem = f"it holds {header.value_bytes} bytes, too few for {num_rows} rows"
        elif header.crc is not None and crc32(stored[header.num_bytes :].data) != header.crc:
            problem = "its checksum is wrong"
        if problem:
            first = int(self._pages.first_rows[page])
            raise CorruptFileError(
                f"{self._files[number].path}: column {self._name!r}, the page at byte {offset} (rows {first} to "
                f"{first + num_rows - 1}) is damaged: {problem}; write the file again"
            )


class _Views(NamedTuple):
    """Where pages are in the memory of this process."""

    maps: list[npt.NDArray[np.uint8]]
    """Keeps the files mapped."""
    items: npt.NDArray[np.void]
    """All memory from the lowest address to the highest, as rows that begin at every byte."""
    rows: Int64Array
    """Where row 0 would be if it stood in the same run of rows as those of a page; an index of ``items``."""


def map_column(field: Field, files: Files) -> MappedColumn | None:
    """The rows of a field as they lie in the files, or None if they must be decoded."""
    if field.is_stack or not _is_as_stored(field):
        return None
    name = field.columns[0].name
    found: list[Int64Array] = []
    first_row = 0
    for number, file in enumerate(files.files):
        chunks, leaf = files.chunks(number), file.columns[name].leaf
        if not _is_plain(chunks, leaf, nullable=file.columns[name].nullable):
            return None
        with file.path.open("rb") as stored:
            for group, num_rows in enumerate(file.group_rows.tolist()):
                if num_rows == 0:
                    continue
                index = os.pread(
                    stored.fileno(), int(chunks.index_bytes[group, leaf]), int(chunks.index_offsets[group, leaf])
                )
                pages = page_locations(index)
                if pages is None or not _is_sound(pages, num_rows, field.spec.nbytes, file.stamp[0]):
                    return None
                counts = np.diff(np.append(pages[:, 2], num_rows))
                found.append(np.column_stack([np.full(len(pages), number), pages, counts]))
                found[-1][:, 3] += first_row
                first_row += num_rows
    return MappedColumn(
        name, [MappedFile(file.path) for file in files.files], Pages(*np.concatenate(found).T.copy()), field.spec.nbytes
    )


def _is_as_stored(field: Field) -> bool:
    column, spec = field.columns[0], field.spec
    is_fixed = spec.kind == "tensor" and not column.lengths and pa.types.is_fixed_size_binary(column.stored.type)
    return (
        is_fixed
        and len(column.stored.path) == 1
        and column.stored.leaf >= 0
        and spec.dtype != torch.bool  # Bytes other than 0 and 1 occur, and become 1.
        and 0 < spec.nbytes == column.stored.type.byte_width  # Not widened.
    )


def _is_plain(chunks: Any, leaf: int, *, nullable: bool) -> bool:
    known = chunks.is_plain[:, leaf] & (chunks.codecs[:, leaf] == _UNCOMPRESSED) & (chunks.index_offsets[:, leaf] > 0)
    return bool(known.all()) and (not nullable or bool((chunks.num_nulls[:, leaf] == 0).all()))


def _is_sound(pages: Int64Array, num_rows: int, row_bytes: int, file_bytes: int) -> bool:
    """Whether pages follow each other, hold all rows, and lie in the file."""
    offsets, sizes, firsts = pages.T
    counts = np.diff(np.append(firsts, num_rows))
    ends = offsets + sizes
    return bool(
        len(pages)
        and firsts[0] == 0
        and (counts > 0).all()
        and (sizes > counts * row_bytes).all()
        and (offsets > 0).all()
        and (offsets[1:] >= ends[:-1]).all()
        and ends[-1] <= file_bytes
    )
