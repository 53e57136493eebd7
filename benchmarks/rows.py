"""What a batch of a few small rows costs in the loader itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch.utils.data import DataLoader

from benchmarks.formats import PerSample
from benchmarks.measure import Comparison, Contender, run_all
from lightning_fastio.datamodules import NumpyDataModule

_ROW_BYTES, _BATCH_SIZE = 256, 32


def run(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Compare torch's DataLoader, without and with workers, and this package."""
    path = folder / "rows.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (400_000, _ROW_BYTES), dtype=np.uint8))
    samples = PerSample(np.load(path, mmap_mode="c"))
    two_workers = DataLoader(samples, _BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True)
    in_process = DataLoader(samples, _BATCH_SIZE, shuffle=True)
    data = NumpyDataModule(train=str(path), batch_size=_BATCH_SIZE)
    data.setup("fit")
    loader = data.train_dataloader()
    contenders = [
        Contender("DataLoader, 2 workers", "today", lambda: two_workers),
        Contender("DataLoader, no workers", "expert", lambda: in_process),
        Contender("lightning_fastio", "fastio", lambda: loader),
    ]
    comparison = Comparison("Batches of 32 rows of 256 B", _ROW_BYTES, _BATCH_SIZE, contenders)
    return run_all([comparison], console, round_s=1.0)
