"""What only a CUDA device can show: copies beside the step, safe memory, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_fastio.callbacks import PrefetchCallback
from lightning_fastio.prefetch import DevicePrefetcher
from tests.callbacks.traced_runs import QUIET

pytestmark = [*QUIET, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SIZE = 256
NUM_COPIES = 40
"""Values of a row, and how much work a step does."""


class Rows(Dataset[torch.Tensor]):
    """Row ``i`` is filled with ``i``."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((SIZE, SIZE), float(row))


class Busy(LightningModule):
    """Multiplies large matrices; notes the sum of every batch, on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(SIZE, SIZE)
        self.sums: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # Churn: memory of all sizes is taken and dropped, so that a batch freed too early would be overwritten.
        churn = [torch.full((64 << (number % 8), SIZE), -1.0, device=self.device) for number in range(16)]
        out = self.layer(batch)
        for _ in range(NUM_COPIES):
            out = torch.tanh(out @ self.layer.weight)
        self.sums.append(batch.double().sum())
        if batch_idx % 10 == 0:
            self.kept.append(batch)
        del churn
        return out.mean() * 1e-6

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(folder: Path, module: Busy, num_batches: int, *callbacks: Any, pin_memory: bool = True) -> Trainer:
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Rows(num_batches * 8), batch_size=8, num_workers=2, pin_memory=pin_memory))
    return trainer


@pytest.mark.parametrize("pin_memory", [True, False])
def test_2000_steps_with_churn_are_the_same(tmp_path: Path, pin_memory: bool) -> None:
    runs = []
    for callbacks in ([], [PrefetchCallback(3, summary=False)]):
        torch.manual_seed(0)
        module = Busy()
        train(tmp_path, module, 2000, *callbacks, pin_memory=pin_memory)
        runs.append(module)
    stock, ahead = runs
    assert torch.equal(torch.stack(stock.sums), torch.stack(ahead.sums))
    assert all(torch.equal(kept, other) for kept, other in zip(stock.kept, ahead.kept, strict=True))
    assert torch.equal(stock.layer.weight, ahead.layer.weight)


def test_copies_overlap_the_step(tmp_path: Path) -> None:
    module = Busy()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(tmp_path, module, 30, PrefetchCallback(2, summary=False))
    kernels, copies = [], []
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        if "Memcpy HtoD" in event.name:
            copies.append(span)
        elif "gemm" in event.name.lower() or "cutlass" in event.name.lower():
            kernels.append(span)
    overlapping = [copy for copy in copies if any(start < copy[1] and copy[0] < end for start, end in kernels)]
    assert overlapping


def test_peak_memory_is_at_most_depth_batches_above_stock(tmp_path: Path) -> None:
    peaks = []
    for depth in (0, 3):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(tmp_path, Busy(), 30, *([PrefetchCallback(depth, summary=False)] if depth else []))
        peaks.append(torch.cuda.max_memory_allocated())
    batch_bytes = 8 * SIZE * SIZE * 4
    assert peaks[1] - peaks[0] <= 4 * batch_bytes


def test_copy_times_are_measured(tmp_path: Path) -> None:
    callback = PrefetchCallback(summary=False)
    train(tmp_path, Busy(), 40, callback)
    measured = callback.waits["copy_s"][:30]
    assert (measured > 0).all()
    assert (callback.waits["copy_wait_s"] >= 0).all()


def test_compiled_steps_with_cuda_graphs(tmp_path: Path) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh()).cuda()
    compiled = torch.compile(layer, mode="reduce-overhead")
    batches = [torch.full((8, SIZE), float(number)).pin_memory() for number in range(50)]
    with torch.no_grad():
        expected = [layer(batch.cuda()) for batch in batches]
        for number, batch in enumerate(DevicePrefetcher(batches, "cuda", depth=3)):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(batch), expected[number])


def test_batches_that_the_loader_made_on_the_device() -> None:
    def loader() -> Iterator[torch.Tensor]:
        for number in range(20):
            values = torch.zeros(1 << 20, device="cuda")
            for _ in range(20):
                values = values + number
            yield values

    sums = [int(batch[0]) for batch in DevicePrefetcher(loader(), "cuda", depth=3)]
    assert sums == [20 * number for number in range(20)]


def test_two_trainers_share_the_copy_stream(tmp_path: Path) -> None:
    modules = [Busy(), Busy()]
    for module in modules:
        torch.manual_seed(0)
        train(tmp_path, module, 20, PrefetchCallback(summary=False))
    assert torch.equal(torch.stack(modules[0].sums), torch.stack(modules[1].sums))
