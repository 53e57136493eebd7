"""A reader over arrays in memory: the smallest thing that keeps the contract, with a record of what was asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_fastio.formats.base import FieldLayout, Rows, check_rows
from lightning_fastio.schema import Batch, FieldSpec, Schema


class MemoryReader:
    """Rows of NumPy arrays; with ``blocks``, it pretends that they decode in blocks."""

    def __init__(
        self, columns: Mapping[str, np.ndarray[Any, Any]], blocks: list[int] | None = None, cache_bytes: int = 0
    ) -> None:
        self.columns = dict(columns)
        self.schema = Schema(
            {
                name: FieldSpec(torch.from_numpy(array[:0].copy()).dtype, array.shape[1:])
                for name, array in columns.items()
            }
        )
        self.blocks = None if blocks is None else np.asarray(blocks, np.int64)
        self.cache_bytes = cache_bytes
        self.metadata: dict[str, str] = {}
        self.announced: list[list[int]] = []
        self.closed = 0
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        return f"memory {len(self)} {self.schema}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def will_need(self, rows: Rows) -> None:
        with self._lock:
            self.announced.append(np.asarray(rows).tolist())

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        indices = check_rows(rows, len(self))
        batch = self.schema.allocate(len(indices)) if out is None else out
        for name, array in self.columns.items():
            batch[name].numpy()[...] = array[indices]  # type: ignore[union-attr]
        return batch

    def layout(self) -> list[FieldLayout]:
        return [FieldLayout(name, str(array.dtype), "memory") for name, array in self.columns.items()]

    def close(self) -> None:
        self.closed += 1


def counting_reader(num_rows: int, **options: Any) -> MemoryReader:
    """A reader whose field ``x`` holds the row number."""
    return MemoryReader({"x": np.arange(num_rows), "y": np.arange(num_rows, dtype=np.float32) / 2}, **options)
