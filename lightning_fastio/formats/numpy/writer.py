"""Writes rows as .npy: one file, an uncompressed .npz, or a folder with a file for each field.

Numbers of one shape are plain arrays. Text, bytes and rows of varying length lie end to end in one array, and
``NAME.offsets`` says where each begins. Rows are appended to the files as they come; the header, which has the number
of rows, is filled in at the end. An .npz is put together from these files when it is closed.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy_format
from typing_extensions import Self

from lightning_fastio.errors import ConfigError, FileAccessError, SchemaError
from lightning_fastio.formats.base import check_rows_alike
from lightning_fastio.formats.numpy.fields import NOTES, OFFSETS, dump_notes
from lightning_fastio.formats.target import Target, sync
from lightning_fastio.schema import Kind

_HEADER_BYTES = 192
"""Room for the header: enough for any shape, and a multiple of 64, so that the data is aligned."""


class NumpyWriter:
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
        self._target = Target(path, is_folder=is_folder)
        self.path = self._target.path
        self._partial = self._target.partial
        if is_folder and self.path.exists() and any(self.path.iterdir()) and not (self.path / NOTES).exists():
            raise ConfigError(f"{self.path} holds files that no writer of this package made: choose another folder")
        self._metadata = {str(name): str(text) for name, text in (metadata or {}).items()}
        self._is_single = self.path.suffix.lower() == ".npy"
        if self._is_single and self._metadata:
            raise ConfigError(f"{self.path}: a .npy file has no room for metadata; write an .npz or a folder")
        self._columns: dict[str, _Column] = {}
        self._is_done = False

    def write(self, batch: Mapping[str, Any]) -> None:
        """Append rows; see `Writer.write`.

        Raises:
            SchemaError: Fields differ in length, or from the first batch, or cannot be stored.
        """
        if self._is_done:
            raise SchemaError(f"{self.path}: the writer is closed; open a new one")
        rows = {name: as_rows(name, values) for name, values in batch.items()}
        lengths = {name: len(values) for name, (_, values) in rows.items()}
        if len(set(lengths.values())) != 1:
            raise SchemaError(f"{self.path}: the fields of a batch have one length, but these have {lengths}")
        if not self._columns:
            self._create(rows)
        if sorted(rows) != sorted(self._columns):
            raise SchemaError(
                f"{self.path}: a batch has the fields {list(rows)}, but the first had {list(self._columns)}"
            )
        for name, (kind, values) in rows.items():
            self._columns[name].check(kind, values)
        try:
            for name, (_, values) in rows.items():
                self._columns[name].append(values)
        except BaseException:
            # Fields of different lengths must not become data, not even if the caller goes on.
            self.abort()
            raise

    def close(self) -> None:
        """Finish the files, sync, and rename into place.

        Raises:
            SchemaError: Nothing was written.
        """
        if self._is_done:
            return
        if not self._columns:
            self._is_done = True
            raise SchemaError(f"{self.path}: nothing was written; write at least one batch before close")
        try:
            for column in self._columns.values():
                column.finish()
            notes = dump_notes({name: column.kind for name, column in self._columns.items()}, self._metadata)
            if self._is_single:
                whole = self._partial / f"{next(iter(self._columns))}.npy"
            elif self.path.suffix:
                whole = self._pack(notes)
            else:
                whole = self._partial
                (self._partial / NOTES).write_text(notes, encoding="utf-8")
                sync(self._partial / NOTES)
            self._target.publish(whole)
        except BaseException:
            self.abort()
            raise
        self._is_done = True

    def abort(self) -> None:
        """Remove what was written; older data at the target stays."""
        if not self._is_done:
            self._is_done = True
            for column in self._columns.values():
                column.close()
            self._target.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _create(self, rows: Mapping[str, tuple[Kind, Any]]) -> None:
        kinds = {name: kind for name, (kind, _) in rows.items()}
        if self._is_single and list(kinds.values()) != ["tensor"]:
            raise SchemaError(
                f"{self.path}: a .npy file holds one field of numbers, not {kinds}; write .npz or a folder"
            )
        # In a folder, names that end in a number are shards of one field, and hidden ones are passed over.
        is_unclear = re.compile(r"^$|^[._]|[-_.]\d+$") if not self.path.suffix else re.compile(r"^$|^\.")
        for name in rows:
            if "/" in name or name.endswith(OFFSETS) or is_unclear.search(name):
                raise SchemaError(f"{self.path}: {name!r} cannot be the name of a .npy file; rename the field")
        elements = {name: _element(name, kind, values) for name, (kind, values) in rows.items()}
        self._target.begin()
        try:
            self._partial.mkdir()
        except OSError as error:
            raise FileAccessError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self._columns = {name: _Column(name, kinds[name], *elements[name], self._partial) for name in rows}

    def _pack(self, notes: str) -> Path:
        """All files in one .npz, as they are; each is removed once it is in, to save room."""
        packed = self._partial / self.path.name
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for file in [file for column in self._columns.values() for file in column.paths]:
                info = zipfile.ZipInfo(file.name)
                info.file_size = file.stat().st_size
                with file.open("rb") as source, archive.open(info, "w") as member:
                    shutil.copyfileobj(source, member, 1 << 20)
                file.unlink()
            archive.writestr(zipfile.ZipInfo(NOTES), notes)
        return packed


class _Column:
    """The files of one field."""

    def __init__(self, name: str, kind: Kind, dtype: np.dtype[Any], shape: tuple[int, ...], folder: Path) -> None:
        self.name, self.kind = name, kind
        self.dtype, self.shape = dtype, shape
        self.paths = [folder / f"{name}.npy"]
        if kind != "tensor":
            self.paths.append(folder / f"{name}{OFFSETS}.npy")
        self._files: list[IO[bytes]] = [path.open("wb") for path in self.paths]
        for file in self._files:
            file.write(bytes(_HEADER_BYTES))
        self._num_items = 0
        if kind != "tensor":
            self._files[1].write(np.zeros(1, np.int64).tobytes())
            self._num_offsets = 1

    def check(self, kind: Kind, rows: Any) -> None:
        if len(rows) and (kind, *_element(self.name, kind, rows)) != (self.kind, self.dtype, self.shape):
            dtype, shape = _element(self.name, kind, rows)
            raise SchemaError(
                f"field {self.name!r} began as {self.kind} of {self.dtype} {list(self.shape)}, but a later batch has "
                f"{kind} of {dtype} {list(shape)}"
            )

    def append(self, rows: Any) -> None:
        if self.kind == "tensor":
            self._files[0].write(np.ascontiguousarray(rows).data)
            self._num_items += len(rows)
        elif len(rows):
            lengths = [len(row) for row in rows]
            for row in rows:
                self._files[0].write(np.ascontiguousarray(row).data)
            self._files[1].write((self._num_items + np.cumsum(lengths, dtype=np.int64)).tobytes())
            self._num_items += sum(lengths)
            self._num_offsets += len(lengths)

    def finish(self) -> None:
        self._write_header(self._files[0], self.dtype, (self._num_items, *self.shape))
        if self.kind != "tensor":
            self._write_header(self._files[1], np.dtype(np.int64), (self._num_offsets,))
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    @staticmethod
    def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        stream = io.BytesIO()
        header = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(stream, header)
        text = stream.getvalue()
        # The header of an .npy is padded with spaces before its newline.
        body = text[10:].rstrip(b" \n")
        file.seek(0)
        file.write(text[:8] + (_HEADER_BYTES - 10).to_bytes(2, "little") + body.ljust(_HEADER_BYTES - 11) + b"\n")


def as_rows(name: str, values: Any) -> tuple[Kind, Any]:
    """A field of a batch as its kind and its rows: an array, or a list of arrays.

    Raises:
        SchemaError: It cannot be stored.
    """
    if isinstance(values, torch.Tensor):
        if values.dtype == torch.bfloat16:
            raise SchemaError(f"field {name!r} is bfloat16, which NumPy has not; write values.float() or values.half()")
        return "tensor", values.detach().cpu().numpy()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes) and len(values):
        if isinstance(values[0], str):
            check_rows_alike(name, values, str)
            return "string", [np.frombuffer(value.encode(), np.uint8) for value in values]
        if isinstance(values[0], bytes | bytearray | memoryview):
            check_rows_alike(name, values, bytes, bytearray, memoryview)
            return "bytes", [np.frombuffer(value, np.uint8) for value in values]
        if isinstance(values[0], torch.Tensor | np.ndarray) and np.ndim(values[0]) > 0:
            return "ragged", [np.asarray(value) for value in values]
    array = np.asarray(values)
    if array.dtype.kind in "SUT" and array.ndim == 1:
        texts = [text.decode() if isinstance(text, bytes) else text for text in array.tolist()]
        return "string", [np.frombuffer(text.encode(), np.uint8) for text in texts]
    if array.dtype.kind not in "biufc" or array.ndim == 0:
        raise SchemaError(f"field {name!r} is {array.dtype} of shape {array.shape}; numbers, text or bytes by row fit")
    return "tensor", array.astype(array.dtype.newbyteorder("="), copy=False)


def _element(name: str, kind: Kind, rows: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape of one row, after the varying axis where there is one."""
    if kind == "tensor":
        return rows.dtype, rows.shape[1:]
    if not len(rows):
        return np.dtype(np.uint8), ()
    found = {(row.dtype, row.shape[1:]) for row in rows}
    if len(found) > 1:
        raise SchemaError(f"field {name!r}: rows have one type and one shape after the first axis, not {found}")
    return next(iter(found))
