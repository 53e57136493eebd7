"""Memory for batches that is used again once nothing refers to it.

A fresh buffer of a few megabytes costs as much as filling it: the kernel maps and clears every page at the first
touch. A recycled one is mapped already, so that a batch costs one copy and no more.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.schema import Batch, FieldSpec, Schema

_SMALLEST = 128 << 10
"""Below this many bytes the C library recycles memory by itself."""

_NUMPY_TYPES = {
    torch_type: np.dtype(str(torch_type).removeprefix("torch."))
    for torch_type in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}

_MOST_FREE = 8
"""Free buffers of one size that are kept; more than the batches of a pipeline that end at the same time is waste."""


class BufferPool:
    """Hands out writable memory that nothing else refers to. Thread-safe.

    A tensor made here keeps a NumPy view of its buffer alive, and so does everything that shares its storage. When
    the last of them is gone, so is the view, and only then the buffer returns to the pool.
    """

    def __init__(self) -> None:
        # A deque's append and pop are atomic: the last reference may go anywhere, even inside `allocate`, so that
        # taking a lock here could wait for itself.
        self._free: defaultdict[int, deque[npt.NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=_MOST_FREE))

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()  # Memory does not travel to another process.

    def allocate(self, schema: Schema, num_rows: int) -> Batch:
        """Uninitialised buffers for the ``tensor`` fields of ``num_rows`` rows, as `Schema.allocate` gives them."""
        return {name: self._tensor(spec, num_rows) for name, spec in schema.items() if spec.kind == "tensor"}

    def _tensor(self, spec: FieldSpec, num_rows: int) -> torch.Tensor:
        assert spec.dtype is not None
        num_bytes = spec.dtype.itemsize * prod(spec.shape) * num_rows
        if num_bytes < _SMALLEST:
            return torch.empty((num_rows, *spec.shape), dtype=spec.dtype)
        free = self._free[num_bytes]
        try:
            buffer = free.pop()
        except IndexError:
            buffer = np.empty(num_bytes, np.uint8)
        # Shaped by NumPy, since torch lets go of the interpreter's lock in each call.
        stored = _NUMPY_TYPES.get(spec.dtype)
        shape = (num_rows, *spec.shape)
        view: npt.NDArray[Any] = buffer[:] if stored is None else np.ndarray(shape, stored, buffer)
        weakref.finalize(view, free.append, buffer).atexit = False
        tensor = torch.from_numpy(view)
        return tensor.view(spec.dtype).view(shape) if stored is None else tensor
