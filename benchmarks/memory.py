"""Memory and start-up where the data is far larger than either should be."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

_PARQUET = "large.parquet"
_BLOCK_BYTES = 100 << 20
_NUM_BLOCKS = 40
_CACHE_BYTES = 512 << 20


def run(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Load from a .npy of 10^9 rows, and stream a Parquet file of 4 GB with row groups of 100 MB."""
    table = Table(title="Memory and start-up", title_justify="left")
    for heading in ("", "first batch [s]", "peak memory [MiB]"):
        table.add_column(heading, justify="right" if heading else "left")
    figures = []
    # What the writer leaves behind in its process does not count.
    _in_new_process(_write_parquet, folder)
    for name, measure in (
        (".npy, 10^9 rows, global shuffle", _numpy),
        (f"Parquet, compressed, 4 GB, cache of {_CACHE_BYTES >> 20} MiB", _parquet),
    ):
        first_s, peak_bytes = _in_new_process(measure, folder)
        figures.append({"name": name, "first_batch_s": first_s, "peak_bytes": peak_bytes})
        table.add_row(name, f"{first_s:.2f}", f"{peak_bytes / 2**20:,.0f}")
    console.print(table)
    return figures


def _in_new_process(work: Callable[[Path], T], folder: Path) -> T:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (folder,))


def _numpy(folder: Path) -> tuple[float, int]:
    path = folder / "sparse.npy"
    # A file of holes: it has the size, but takes no space on the disk.
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(10**9, 16))
    from lightning_fastio.datamodules import NumpyDataModule

    return _stream(lambda: NumpyDataModule(train=str(path), batch_size=256), num_batches=2000)


def _write_parquet(folder: Path) -> None:
    from lightning_fastio.formats import open_writer

    block = np.random.default_rng(0).integers(0, 256, (_BLOCK_BYTES // 12_288, 12_288), dtype=np.uint8)
    # Uncompressed, nothing would be decoded and no memory held.
    with open_writer(folder / _PARQUET, block_bytes=_BLOCK_BYTES, compression="lz4") as writer:
        for _ in range(_NUM_BLOCKS):
            writer.write({"x": block})


def _parquet(folder: Path) -> tuple[float, int]:
    from lightning_fastio.datamodules import ParquetDataModule

    path = folder / _PARQUET
    return _stream(
        lambda: ParquetDataModule(train=str(path), batch_size=256, shuffle="block", cache_bytes=_CACHE_BYTES)
    )


def _stream(make_data: Callable[[], Any], num_batches: int | None = None) -> tuple[float, int]:
    """Seconds to the first batch, and the most memory that was held beyond what the imports took."""
    before = _private_bytes()
    start = perf_counter()
    data = make_data()
    data.setup("fit")
    first_s, peak_bytes = None, 0
    for _ in islice(data.train_dataloader(), num_batches):
        first_s = first_s or perf_counter() - start
        peak_bytes = max(peak_bytes, _private_bytes() - before)
    assert first_s is not None
    return first_s, peak_bytes


def _private_bytes() -> int:
    """Resident memory without pages of files, which the kernel takes back when it needs them."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
