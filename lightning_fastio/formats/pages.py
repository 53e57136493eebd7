"""The kernel's side of memory-mapped files: maps, and hints about the pages that come next."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Int64Array: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

MAX_HINTS = 8192
"""Most page ranges that one hint announces."""

_HINT_PAGES = 32
"""Pages of one range: the kernel reads no more than the device's read-ahead for one call, 128 KiB by default."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# Called with the interpreter's lock held: it never waits, and giving the lock away costs more than the call.
_preadv2 = ctypes.PyDLL(None, use_errno=True).preadv2
_preadv2.restype = ctypes.c_ssize_t
_preadv2.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, size: int) -> Bytes:
    """The bytes of an open file, read-only; they stay mapped as long as an array refers to them.

    Python's ``mmap`` would keep a descriptor open for each map. A private map that is writable counts as memory of the
    process, so that the kernel refuses it for a file larger than the machine; a read-only one does not.

    Raises:
        OSError: The file system cannot map files, or the process has too many maps.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Reading around each touched page would fetch ten times what shuffled rows need.
    _libc.madvise(address, size, mmap.MADV_RANDOM)
    return np.asarray(_MappedMemory(address, size))


class _MappedMemory:
    """What NumPy keeps alive as the owner of mapped memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, True), "version": 3}
        self._range = (address, size)

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        munmap(*self._range)


class _Memory:
    """Bytes of memory that something else keeps, as NumPy takes them."""

    def __init__(self, start: int, num_bytes: int, *, read_only: bool) -> None:
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (start, read_only),
            "version": 3,
        }


def items_between(start: int, stop: int, item_bytes: int) -> npt.NDArray[np.void]:
    """Items of ``item_bytes`` bytes at any place between two addresses, for indexing where memory is mapped."""
    memory = np.asarray(_Memory(start, stop - start, read_only=True))
    items: npt.NDArray[np.void] = np.ndarray((stop - start - item_bytes + 1,), f"V{item_bytes}", memory, 0, (1,))
    return items


def as_rows(items: npt.NDArray[np.void]) -> torch.Tensor:
    """Items of bytes, which may overlap, as rows of uint8. To be read only, whatever the tensor allows.

    torch would warn of an array that says so itself.
    """
    step = items.strides[0]
    num_bytes = (len(items) - 1) * step + items.itemsize
    memory = np.asarray(_Memory(address_of(items), num_bytes, read_only=False))
    return torch.from_numpy(memory).as_strided((len(items), items.itemsize), (step, 1))


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array begins in memory."""
    return int(array.__array_interface__["data"][0])


def announce(addresses: Int64Array, num_bytes: Int64Array | int) -> None:
    """Let the kernel read mapped pages in the background.

    Args:
        addresses: Where each range of bytes begins.
        num_bytes: Its length.
    """
    for page, length in _page_ranges(addresses // mmap.PAGESIZE, -(-(addresses + num_bytes) // mmap.PAGESIZE)):
        _libc.madvise(page * mmap.PAGESIZE, length * mmap.PAGESIZE, mmap.MADV_WILLNEED)


def are_in_memory(path: str, offsets: Int64Array) -> bool:
    """Whether the pages at these offsets of a file are in memory, so that announcing them would be wasted time.

    ``mincore`` would not tell: it claims so of every file that belongs to somebody else.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        # Fails with EAGAIN where it would have to be read, with EOPNOTSUPP where the file system cannot tell.
        return all(_preadv2(descriptor, _ONE_BYTE, 1, offset, os.RWF_NOWAIT) == 1 for offset in offsets.tolist())
    finally:
        os.close(descriptor)


class _IoVec(ctypes.Structure):
    """``struct iovec``: where bytes go that are read."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_anywhere = ctypes.create_string_buffer(1)
_ONE_BYTE = ctypes.byref(_IoVec(ctypes.addressof(_anywhere), 1))


def _page_ranges(first: Int64Array, stop: Int64Array) -> Iterator[tuple[int, int]]:
    """Page ranges, merged where they touch, cut where they are long: first page and length."""
    if not len(first):
        return
    order = np.argsort(first)
    first, stop = first[order], stop[order]
    breaks = np.flatnonzero(first[1:] > stop[:-1])
    starts, stops = first[np.r_[0, breaks + 1]], stop[np.r_[breaks, -1]]
    for start, end in zip(starts[:MAX_HINTS].tolist(), stops[:MAX_HINTS].tolist(), strict=True):
        for page in range(start, end, _HINT_PAGES):
            yield page, min(_HINT_PAGES, end - page)
