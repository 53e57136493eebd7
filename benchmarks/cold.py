"""Random rows of a file that is not in the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from benchmarks.measure import Comparison, Contender, run_all
from lightning_fastio.datamodules import NumpyDataModule

_ROW_BYTES, _BATCH_SIZE = 12_288, 256
_FILE_BYTES = 3 << 30
"""More than is read in a round, so that no row is read twice."""


def run(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Compare a plain memory map, this package, and reading the file from start to end."""
    path = folder / "rows.npy"
    num_rows = _write(path)
    data = NumpyDataModule(train=str(path), batch_size=_BATCH_SIZE)
    data.setup("fit")
    loader = data.train_dataloader()

    def memory_map() -> Iterator[torch.Tensor]:
        mapped = torch.from_numpy(np.load(path, mmap_mode="c"))
        for rows in torch.randperm(num_rows).split(_BATCH_SIZE):
            yield torch.index_select(mapped, 0, rows)

    def in_order() -> Iterator[npt.NDArray[Any]]:
        with open(path, "rb", buffering=0) as file:
            buffer = np.empty((341, _ROW_BYTES), np.uint8)  # 4 MiB at a time
            while file.readinto(buffer) == buffer.nbytes:  # type: ignore[arg-type]
                yield buffer

    contenders = [
        Contender("memory map, by batch", "today", memory_map),
        Contender("lightning_fastio", "fastio", lambda: loader),
        Contender("limit: file in order", "limit", in_order),
    ]

    def forget() -> None:
        # Pages that somebody maps stay in the cache.
        loader.reader.close()
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    comparison = Comparison(
        "Cold cache: random rows of 12 KiB",
        _ROW_BYTES,
        _BATCH_SIZE,
        contenders,
        prepare=forget,
    )
    return run_all([comparison], console, round_s=1.0)


def _write(path: Path) -> int:
    """Write rows of noise; gives their number."""
    block = np.random.default_rng(0).integers(0, 256, (8192, _ROW_BYTES), dtype=np.uint8)
    num_rows = _FILE_BYTES // block.nbytes * len(block)
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(num_rows, _ROW_BYTES))
    for start in range(0, num_rows, len(block)):
        rows[start : start + len(block)] = block
    rows.flush()  # only clean pages can be dropped
    return num_rows
