"""How arrays get from a worker process to the writer: through shared memory, not through pickles.

A slot is an anonymous file in memory (``memfd_create``), which the workers open through ``/proc``. Unlike
``/dev/shm`` it has no size limit of its own (containers often give 64 MiB), and no name that could be left behind:
the memory is gone when the last process is.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.convert.source import RowBatch

_PAGE = mmap.PAGESIZE
_SMALL_BYTES = 1 << 14


@dataclass(frozen=True)
class InSlot:
    """An array that lies in a slot."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Slot:
    """Shared memory that one task fills and the writer empties, over and over."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("fastio-convert")
        self._map: mmap.mmap | None = None
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        """Where a worker opens it."""

    def take_out(self, rows: RowBatch) -> RowBatch:
        """Rows with their arrays as views of the slot, valid until the next task fills it."""
        size = os.fstat(self._fd).st_size
        if size and (self._map is None or len(self._map) < size):
            self._map = mmap.mmap(self._fd, size)
        return {name: self._view(value) for name, value in rows.items()}

    def close(self) -> None:
        """Give the memory back. Views that are still held keep their map alive."""
        self._map = None
        os.close(self._fd)

    def _view(self, value: Any) -> Any:
        if not isinstance(value, InSlot):
            return value
        assert self._map is not None
        return np.ndarray(value.shape, value.dtype, buffer=self._map, offset=value.offset)


def put_in(rows: RowBatch, path: str) -> RowBatch:
    """Copy the larger arrays of ``rows`` into the slot at ``path``, and say where they lie.

    The slot grows to what the rows need; it never shrinks under a view of the writer.
    """
    placed: RowBatch = {}
    arrays: list[tuple[InSlot, npt.NDArray[Any]]] = []
    end = 0
    for name, value in rows.items():
        if isinstance(value, np.ndarray) and value.nbytes > _SMALL_BYTES and not value.dtype.hasobject:
            placed[name] = InSlot(end, value.dtype, value.shape)
            arrays.append((placed[name], value))
            end += -(-value.nbytes // _PAGE) * _PAGE
        else:
            placed[name] = value
    if arrays:
        shared = _mapped(path, end)
        for place, value in arrays:
            np.copyto(np.ndarray(place.shape, place.dtype, buffer=shared, offset=place.offset), value)
    return placed


# Maps of this worker by path: making one anew for each task would fault in every page of it again.
_maps: dict[str, mmap.mmap] = {}


def _mapped(path: str, size: int) -> mmap.mmap:
    if path not in _maps or len(_maps[path]) < size:
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            _maps[path] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    return _maps[path]
