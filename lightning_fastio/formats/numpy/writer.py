"""Writes rows as .npy: one file, an uncompressed .npz, or a folder with a file for each field.

Numbers of one shape are plain arrays. Text, bytes and rows of varying length lie end to end in one array, and
``NAME.offsets`` says where each begins. Rows are appended as they come; the header, which has the number of rows, is
filled in at the end.

An .npz is one file, so that only one array can grow in it: the largest goes there at once, the others are kept beside
it and packed when it is closed.
"""

from __future__ import annotations

import io
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from lightning_fastio.errors import ConfigError, SchemaError
from lightning_fastio.formats.numpy.fields import NOTES, OFFSETS, dump_notes
from lightning_fastio.formats.target import sync
from lightning_fastio.formats.writing import Column, FileWriter

_HEADER_BYTES = 192
"""Room for the header: enough for any shape, and a multiple of 64, so that the data is aligned."""
_PIECE_BYTES = 512 << 10
"""Bytes written at once: they stay in the processor's cache, and Linux takes long to find room for larger pieces."""
_CRC_POLYNOMIAL = 0xEDB88320


class NumpyWriter(FileWriter):
    """Appends batches to .npy files that appear when they are whole."""

    def __init__(self, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> None:
        """Set up; the first batch creates a temporary folder beside ``path``.

        Args:
            path: A .npy file (for one field of numbers), an .npz file, or a folder. What was there before is replaced
                when the new data is whole.
            metadata: Texts to store with the data; a .npy file has no room for them.

        Raises:
            ConfigError: Metadata is given for a .npy file, or a file is where a folder should be.
        """
        is_folder = not Path(path).suffix
        super().__init__(path, is_folder=is_folder)
        self._partial = self._target.partial
        if is_folder and self.path.exists() and any(self.path.iterdir()) and not (self.path / NOTES).exists():
            raise ConfigError(f"{self.path} holds files that no writer of this package made: choose another folder")
        self._metadata = {str(name): str(text) for name, text in (metadata or {}).items()}
        self._is_single = self.path.suffix.lower() == ".npy"
        if self._is_single and self._metadata:
            raise ConfigError(f"{self.path}: a .npy file has no room for metadata; write an .npz or a folder")
        self._archive: _Archive | None = None
        self._files: dict[str, _FieldFiles] = {}

    def _refusal(self, name: str, column: Column) -> str | None:
        if column.dtype == "bfloat16":
            return "NumPy has no bfloat16: write values.float() or values.half()"
        if self._is_single and column.kind != "tensor":
            return "a .npy file holds one field of numbers: write an .npz or a folder"
        # In a folder, names that end in a number are shards of one field, and hidden ones are passed over.
        is_unclear = re.compile(r"^$|^[._]|[-_.]\d+$") if not self.path.suffix else re.compile(r"^$|^\.")
        if "/" in name or name.endswith(OFFSETS) or is_unclear.search(name):
            return "this cannot be the name of a .npy file: rename the field"
        return None

    def _begin(self, rows: Mapping[str, Any]) -> None:
        if self._is_single and len(rows) > 1:
            raise SchemaError(f"{self.path}: a .npy file holds one field, not {list(rows)}; write an .npz or a folder")
        self._partial.mkdir()
        largest = max(rows, key=lambda name: _num_bytes(rows[name]))
        for name, column in self._columns.items():
            values = self._partial / f"{name}.npy"
            if self.path.suffix.lower() == ".npz" and name == largest:
                self._archive = _Archive(self._partial / self.path.name, values.name)
                self._files[name] = _FieldFiles(name, column, self._archive, self._partial)
            else:
                self._files[name] = _FieldFiles(name, column, _NpyFile(values), self._partial)

    def _append(self, rows: Mapping[str, Any]) -> None:
        for name, values in rows.items():
            self._files[name].append(values)

    def _finish(self) -> Path:
        for files in self._files.values():
            files.finish()
        notes = dump_notes({name: column.kind for name, column in self._columns.items()}, self._metadata)
        if self._is_single:
            return self._partial / f"{next(iter(self._files))}.npy"
        if self._archive is not None:
            arrays = [array for files in self._files.values() for array in files.all]
            return self._archive.pack([array.path for array in arrays if isinstance(array, _NpyFile)], notes)
        (self._partial / NOTES).write_text(notes, encoding="utf-8")
        for file in self._partial.iterdir():
            sync(file)
        return self._partial

    def _release(self) -> None:
        for files in self._files.values():
            files.close()
        if self._archive is not None:
            self._archive.close()


class _FieldFiles:
    """The arrays of one field."""

    def __init__(self, name: str, column: Column, values: _NpyFile | _Archive, folder: Path) -> None:
        self._column = column
        self.all: list[_NpyFile | _Archive] = [values]
        self._num_items = 0
        if column.kind != "tensor":
            self.all.append(_NpyFile(folder / f"{name}{OFFSETS}.npy"))
            self.all[1].write(np.zeros(1, np.int64).data)
            self._num_offsets = 1

    def append(self, rows: Any) -> None:
        if self._column.kind == "tensor":
            data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), _PIECE_BYTES):
                self.all[0].write(data[start : start + _PIECE_BYTES])
            self._num_items += len(rows)
            return
        if self._column.kind == "string":
            rows = [text.encode() for text in rows]
        lengths = [len(row) for row in rows]
        if self._column.kind == "ragged":
            for row in rows:
                self.all[0].write(np.ascontiguousarray(row).data)
        else:
            self.all[0].write(b"".join(rows))
        self.all[1].write((self._num_items + np.cumsum(lengths, dtype=np.int64)).data)
        self._num_items += sum(lengths)
        self._num_offsets += len(lengths)

    def finish(self) -> None:
        self.all[0].finish(np.dtype(self._column.dtype), (self._num_items, *self._column.shape))
        if self._column.kind != "tensor":
            self.all[1].finish(np.dtype(np.int64), (self._num_offsets,))

    def close(self) -> None:
        for array in self.all:
            array.close()


class _NpyFile:
    """An array in the making, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER_BYTES))

    def write(self, data: Any) -> None:
        self._file.write(data)

    def finish(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._file.seek(0)
        self._file.write(_header(dtype, shape))
        self._file.close()

    def close(self) -> None:
        with suppress(OSError):  # What is left in its buffer may find no room.
            self._file.close()


class _Archive:
    """An .npz in the making, whose first array grows in it."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._file = path.open("wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        self._info = zipfile.ZipInfo(name)
        self._member = self._zip.open(self._info, "w", force_zip64=True)
        self._start = self._file.tell()
        self._member.write(bytes(_HEADER_BYTES))

    def write(self, data: Any) -> None:
        self._member.write(data)

    def finish(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """End the first array."""
        self._member.close()
        header = _header(dtype, shape)
        self._file.seek(self._start)
        self._file.write(header)
        # A checksum is linear: what the new header changes in it does not depend on the data after it.
        change = zlib.crc32(header) ^ zlib.crc32(bytes(_HEADER_BYTES))
        self._info.CRC ^= _crc_before_zeros(change, self._info.file_size - _HEADER_BYTES)
        self._file.seek(self._info.header_offset)
        self._file.write(self._info.FileHeader(zip64=True))

    def pack(self, others: list[Path], notes: str) -> Path:
        """Add the other arrays, and close it."""
        for path in others:
            info = zipfile.ZipInfo(path.name)
            info.file_size = path.stat().st_size
            with path.open("rb") as source, self._zip.open(info, "w") as member:
                shutil.copyfileobj(source, member, 1 << 20)
            path.unlink()  # To save room.
        self._zip.writestr(zipfile.ZipInfo(NOTES), notes)
        self._zip.close()
        self._file.close()
        return self._path

    def close(self) -> None:
        for part in (self._member, self._zip, self._file):
            with suppress(OSError):
                part.close()


def _num_bytes(rows: Any) -> int:
    return rows.nbytes if isinstance(rows, np.ndarray) else sum(getattr(row, "nbytes", len(row)) for row in rows)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header of an .npy, padded to its length with spaces before its newline."""
    stream = io.BytesIO()
    entries = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(stream, entries)
    text = stream.getvalue()
    body = text[10:].rstrip(b" \n")
    return text[:8] + (_HEADER_BYTES - 10).to_bytes(2, "little") + body.ljust(_HEADER_BYTES - 11) + b"\n"


def _crc_before_zeros(crc: int, num_bytes: int) -> int:
    """What a difference in the CRC-32 of a beginning makes in that of the whole, ``num_bytes`` later.

    As in ``crc32_combine`` of zlib: the product of two polynomials over GF(2), one of them ``x ** (8 * num_bytes)``.
    """
    power, square = 1 << 31, 1 << 23  # 1 and x ** 8; the highest bit is the lowest power.
    while num_bytes:
        if num_bytes & 1:
            power = _product(power, square)
        square, num_bytes = _product(square, square), num_bytes >> 1
    return _product(power, crc)


def _product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_CRC_POLYNOMIAL if b & 1 else 0)
    return product
