"""MemoryHygieneCallback on a real device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fastio.callbacks.memory import MemoryHygieneCallback
from lightning_fastio.callbacks.memory.allocator import CudaMemory
from tests.callbacks.small_runs import QUIET, ManualNet, Net, assert_same_weights, batches, fit, make_trainer

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), *QUIET]

GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
MIB = 1 << 20


def device_memory() -> CudaMemory:
    return CudaMemory(torch.device("cuda", torch.cuda.current_device()))


def test_readings_are_those_of_torch() -> None:
    memory = device_memory()
    before = memory.read()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    now = memory.read()
    assert now.allocated_bytes - before.allocated_bytes == 64 * MIB
    assert now.allocated_bytes == torch.cuda.memory_allocated()
    assert now.reserved_bytes == torch.cuda.memory_reserved()
    assert now.peak_bytes == torch.cuda.max_memory_allocated()
    sizes = [block["size"] for segment in memory.segments() for block in segment["blocks"]]
    assert 64 * MIB in sizes
    del held
    memory.empty_cache()
    assert memory.read().reserved_bytes < now.reserved_bytes
    assert 0 < memory.free_bytes() < memory.read().total_bytes


@pytest.mark.parametrize("net", [Net, ManualNet])
@pytest.mark.parametrize("choice", ["bf16-mixed", "16-mixed"])
def test_weights_equal_those_of_trainer_precision(tmp_path: Path, net: type[Net], choice: Any) -> None:
    ours = fit(tmp_path, [MemoryHygieneCallback(choice, float32_matmul=None)], net(), **GPU)
    stock = fit(tmp_path, [], net(), precision=choice, **GPU)
    assert ours.dtypes == stock.dtypes
    assert_same_weights(ours, stock)


def test_auto_takes_what_the_device_is_good_at(tmp_path: Path) -> None:
    net = fit(tmp_path, [MemoryHygieneCallback()], **GPU)
    has_bf16 = torch.cuda.get_device_capability() >= (8, 0)
    assert {dtype for _, dtype in net.dtypes} == {torch.bfloat16 if has_bf16 else torch.float16}
    assert torch.get_float32_matmul_precision() == "highest"


def test_nothing_synchronises_in_a_step(tmp_path: Path) -> None:
    class NoSync(Callback):
        """Between its first and last hook of a step, torch refuses to wait for the device."""

        def on_train_batch_start(self, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    # Ours is called within theirs at the start of a batch, and before theirs at its end.
    first, last = NoSync(), NoSync()
    first.on_train_batch_end = lambda *args: None  # type: ignore[method-assign]
    try:
        fit(tmp_path, [first, MemoryHygieneCallback(check_every_n_steps=2), last], **GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_out_of_memory_is_explained(tmp_path: Path) -> None:
    class RunsOut(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    snapshot = tmp_path / "oom.pickle"
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Out of device memory in train batch 2") as caught:
        fit(tmp_path, [MemoryHygieneCallback(oom_snapshot=snapshot)], RunsOut(), **GPU)
    assert "batch[0]: float32 (4, 8)" in str(caught.value)
    assert (tmp_path / "oom-rank0.pickle").stat().st_size > 0


def test_surplus_is_given_back(tmp_path: Path) -> None:
    class Pieces(Net):
        """Leaves a cache that later steps cannot use: many blocks of changing size."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            torch.empty((64 + 32 * batch_idx) * MIB, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    torch.cuda.empty_cache()
    callback = MemoryHygieneCallback(pressure_fraction=1e-4, check_every_n_steps=20)
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append((callback._cache.num_calls, torch.cuda.memory_reserved()))  # type: ignore[union-attr]

    fit(tmp_path, [callback, Look()], Pieces(), **GPU)
    assert [calls for calls, _ in seen] == [0] * 19 + [1]
    assert seen[-1][1] < seen[-2][1]


def test_a_late_nan_is_reported_at_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class BecomesNan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx >= 3 else loss

    trainer = make_trainer(tmp_path, [MemoryHygieneCallback()], **GPU)
    trainer.fit(BecomesNan(), batches(), batches(2))
    messages = [record.message for record in caplog.records if record.name == "lightning_fastio"]
    assert [message[:38] for message in messages] == ["the loss became nan in train batch 3 o"]


def test_no_device_memory_is_kept(tmp_path: Path) -> None:
    fit(tmp_path, [], **GPU)  # cuBLAS takes its workspace, for good
    gc.collect()
    before = torch.cuda.memory_allocated()
    net = fit(tmp_path, [MemoryHygieneCallback()], **GPU)
    net.cpu()
    del net
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MIB
