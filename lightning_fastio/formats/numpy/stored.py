"""Where the arrays of .npy and .npz files lie, from their headers alone.

An .npz is a zip of .npy members. A member that is stored uncompressed lies in the file as it is, so that its rows come
out of the map like those of a .npy. A compressed one is decoded whole, once in each process. Pickled objects are never
loaded.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from lightning_fastio.errors import CorruptFileError, FastIOError, FileAccessError, FormatError
from lightning_fastio.formats.mapped import ByteSource, MappedArray, MappedFile
from lightning_fastio.formats.pages import Bytes, Int64Array

logger = logging.getLogger("lightning_fastio")

_VERIFIED_BYTES = 64 << 20
"""Stored members up to this size are compared with their checksum when a field uses them, in some 50 ms at most."""

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class Checksum(NamedTuple):
    """The checksum of a stored member of a zip."""

    start: int
    """Where the member begins in the file."""
    num_bytes: int
    """Its length."""
    crc: int
    """CRC-32 of its bytes."""


@dataclass(frozen=True)
class StoredArray:
    """An array in a file."""

    name: str
    """Stem of the .npy file, or name of the member without ``.npy``."""
    source: ByteSource
    """Its bytes."""
    offset: int
    """Where its first element begins in them."""
    dtype: np.dtype[Any]
    """Stored type."""
    shape: tuple[int, ...]
    """Stored shape."""
    order: Literal["C", "F"]
    """``F`` when the first index runs fastest."""
    container: str = ""
    """How it lies in its file, for ``fastio inspect``."""
    checksum: Checksum | None = None
    """What its bytes are compared with when a field uses it."""

    @property
    def path(self) -> Path:
        """The file."""
        return self.source.path

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.dtype.itemsize * prod(self.shape)

    @property
    def read_path(self) -> str:
        """How its rows get out, for ``fastio inspect``."""
        return "memory map" if isinstance(self.source, MappedFile) else "memory, decoded whole once in each process"

    def rows(self, window: int | None = None, stride: int | None = None) -> MappedArray:
        """Its rows, or windows along its first axis."""
        return MappedArray(
            self.source, self.offset, self.dtype, self.shape, order=self.order, window=window, stride=stride
        )

    def verify(self) -> None:
        """Compare the bytes with their checksum, where there is one that was not compared yet.

        Raises:
            CorruptFileError: They differ.
        """
        if self.checksum is not None:
            data = self.source.view()[self.checksum.start : self.checksum.start + self.checksum.num_bytes]
            if zlib.crc32(data.data) != self.checksum.crc:
                raise CorruptFileError(
                    f"{self.path}: {self.name!r} is damaged, its checksum is wrong; write or copy the file again"
                )

    def whole(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A copy of all elements, for arrays that describe others."""
        view = self.source.view()[self.offset : self.offset + self.nbytes]
        return np.frombuffer(view.tobytes(), self.dtype).reshape(self.shape, order=self.order)


def read_npy(path: Path) -> StoredArray:
    """Find the array of a .npy file.

    Raises:
        FileAccessError: The file is missing or may not be read.
        CorruptFileError: It is incomplete or damaged.
    """
    source = MappedFile(path)
    with path.open("rb") as file:
        header = _read_header(file, str(path))
    array = StoredArray(path.stem, source, header.end, header.dtype, header.shape, header.order)
    if not header.dtype.hasobject:
        _check_size(str(path), array.nbytes, source.size - header.end)
    return array


def read_npz(path: Path, cache_bytes: int) -> dict[str, StoredArray]:
    """Find the arrays of an .npz file, by name.

    Args:
        path: The file.
        cache_bytes: Compressed members that are larger than this together are decoded to a temporary file instead of
            memory.

    Raises:
        FileAccessError: The file is missing or may not be read.
        CorruptFileError: It is incomplete or damaged.
        FormatError: It is a zip, but not one of arrays.
    """
    source = MappedFile(path)
    with zip_errors(path), zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist() if info.filename.endswith(".npy")}
        if any(name.endswith("data.pkl") for name in archive.namelist()):
            raise FormatError(f"{path} is a torch.save checkpoint, which is pickled; save its tensors with np.savez")
        if not members:
            raise FormatError(f"{path} is a zip file without .npy members, so not an .npz; unpack it first")
        decoded = sum(info.file_size for info in members.values() if info.compress_type != zipfile.ZIP_STORED)
        return {
            name.removesuffix(".npy"): _member(archive, info, source, spill=decoded > cache_bytes)
            for name, info in members.items()
        }


class DecodedMember:
    """The bytes of a compressed member, decoded when they are first used in a process. Thread-safe and picklable."""

    def __init__(self, path: Path, member: str, num_bytes: int, *, spill: bool) -> None:
        """Set up; nothing is decoded yet.

        Args:
            path: The .npz file.
            member: Name in the zip.
            num_bytes: Size once decoded.
            spill: Decode to a temporary file that is mapped, instead of to memory.
        """
        self.path = path
        self._file = MappedFile(path)
        self._member, self._num_bytes, self._spill = member, num_bytes, spill
        # By process: what a parent decoded, or is about to decode while it forks, is not for its child.
        self._decoded: dict[int, Bytes] = {}
        self._locks: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoded": {}, "_locks": {}}

    def view(self) -> Bytes:
        """All bytes of the member."""
        process = os.getpid()
        found = self._decoded.get(process)
        if found is None:
            with self._locks.setdefault(process, threading.Lock()):
                found = self._decoded.get(process)
                if found is None:
                    self._file.view()  # Notices a file that is not the one whose headers were read.
                    found = self._decoded[process] = self._decode()
        return found

    def has_in_memory(self, offsets: Int64Array) -> bool:
        """True: all is decoded at the first read."""
        return True

    def close(self) -> None:
        """Forget the bytes."""
        self._decoded.pop(os.getpid(), None)
        self._file.close()

    def _decode(self) -> Bytes:
        where = "a temporary file" if self._spill else "memory"
        log = logger.warning if self._spill else logger.info
        log(
            "%s: member %s is compressed; its %.1f MB are decoded to %s, once in each process. np.savez without "
            "compression, or fastio convert, writes files that are read as they are",
            *(self.path, self._member, self._num_bytes / 1e6, where),
        )
        with zip_errors(self.path), zipfile.ZipFile(self.path) as archive, archive.open(self._member) as member:
            if not self._spill:
                whole = np.empty(self._num_bytes, np.uint8)
                _fill(member, memoryview(whole.data), f"{self.path}: {self._member}")
                return whole
            with tempfile.NamedTemporaryFile(prefix="fastio-", suffix=".npy") as file:
                while piece := member.read(1 << 20):
                    file.write(piece)
                file.flush()
                return MappedFile(file.name).view()


@dataclass(frozen=True)
class _Header:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    end: int
    """Bytes of magic, version and header."""


def _read_header(file: IO[bytes], where: str) -> _Header:
    """Read the header at the start of a stream."""
    try:
        version = npy_format.read_magic(file)
        # Version 3 differs from 2 in the encoding of field names only, and records are not loaded.
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except OSError:
        raise
    except Exception as error:  # Damaged headers make NumPy raise anything from SyntaxError to MemoryError.
        raise CorruptFileError(f"{where} is incomplete or damaged: its .npy header cannot be read ({error})") from error
    if any(length < 0 for length in shape):
        raise CorruptFileError(f"{where} is damaged: its header has the shape {shape}")
    return _Header(dtype, shape, "F" if is_fortran else "C", file.tell())


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, source: MappedFile, *, spill: bool) -> StoredArray:
    where = f"{source.path}: {info.filename}"
    with archive.open(info) as file:
        header = _read_header(file, where)
    name = info.filename.removesuffix(".npy")
    kind = (header.dtype, header.shape, header.order)
    if info.compress_type == zipfile.ZIP_STORED:
        start = _data_start(source, info)
        if start + info.file_size > source.size or info.compress_size != info.file_size:
            raise CorruptFileError(f"{where} is incomplete; write or copy the file again")
        is_small = info.file_size <= _VERIFIED_BYTES
        checksum = Checksum(start, info.file_size, info.CRC) if is_small else None
        array = StoredArray(name, source, start + header.end, *kind, "in an uncompressed .npz", checksum)
    else:
        member = DecodedMember(source.path, info.filename, info.file_size, spill=spill)
        array = StoredArray(name, member, header.end, *kind, "compressed in an .npz")
    if not header.dtype.hasobject:
        _check_size(where, array.nbytes, info.file_size - header.end)
    return array


def _data_start(source: MappedFile, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin: after its local header, whose lengths differ from the central one."""
    head = source.view()[info.header_offset : info.header_offset + _LOCAL_HEADER.size].tobytes()
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(head)
    return int(info.header_offset + _LOCAL_HEADER.size + name_length + extra_length)


def _check_size(where: str, expected: int, found: int) -> None:
    if found < expected:
        raise CorruptFileError(
            f"{where} is incomplete: its header promises {expected} bytes, but {max(found, 0)} follow; write or copy "
            "it again"
        )
    if found > expected:
        raise CorruptFileError(
            f"{where} has {found - expected} bytes more than its header says; it is damaged, or several arrays were "
            "saved into one file, of which only the first would be read"
        )


def _fill(file: IO[bytes], target: memoryview, where: str) -> None:
    filled = 0
    while piece := file.read(1 << 20):
        if filled + len(piece) > len(target):
            break
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    if piece or filled != len(target):
        raise CorruptFileError(f"{where} is damaged: it does not decode to the {len(target)} bytes that it should")


@contextmanager
def zip_errors(path: Path) -> Iterator[None]:
    """Errors of `zipfile` as errors of this package that name the file."""
    try:
        yield
    except FastIOError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise FileAccessError(f"{path} cannot be opened: {error.strerror or error}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CorruptFileError(f"{path} cannot be read: {error.strerror or error}") from error
        raise FileAccessError(
            f"{path}: there is no room to decode it in {tempfile.gettempdir()}; set TMPDIR to another folder, or store"
            " the arrays uncompressed (np.savez)"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, struct.error) as error:
        raise CorruptFileError(
            f"{path} is an incomplete or damaged zip file ({error}); write or copy it again"
        ) from error
    except (RuntimeError, NotImplementedError) as error:  # Encrypted, or an unusual compression.
        raise FormatError(f"{path} cannot be unpacked: {error}; save it with np.savez") from error


def describe(array: StoredArray) -> str:
    """Type, shape and place, for ``fastio inspect``."""
    order = ", Fortran order" if array.rows().order == "F" else ""
    container = f", {array.container}" if array.container else ""
    return f"{array.dtype} {array.shape}{order}{container}"
