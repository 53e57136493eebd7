"""Out-of-memory errors leave with a report."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fastio.callbacks.memory import MemoryHygieneCallback, oom
from lightning_fastio.callbacks.memory.allocator import GIB
from lightning_fastio.loader import BatchLoader
from tests.callbacks.small_runs import QUIET, Net, RecordingMemory, fit, make_trainer, reading
from tests.memory import MemoryReader

pytestmark = QUIET

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10.00 GiB"


class RunsOut(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise torch.cuda.OutOfMemoryError(MESSAGE)
        return super().training_step(batch, batch_idx)


def test_the_error_says_who_holds_the_memory_and_what_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Looks: sanity check, start of training, after steps 1 and 2, and when memory ran out.
    memory = RecordingMemory(*[reading(1, 2, 4)] * 4, reading(7, 7.5, 7)).install(monkeypatch)
    memory.free = GIB
    memory.blocks = [
        {"size": 3 * GIB, "state": "active_allocated"},
        {"size": 5 * GIB, "state": "inactive"},
        {"size": GIB, "state": "active_allocated"},
    ]
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        fit(tmp_path, [MemoryHygieneCallback()], RunsOut())
    assert str(caught.value).splitlines() == [
        MESSAGE,
        "",
        "Out of device memory in train batch 3:",
        "  device 10.00 GiB: tensors 7.00, unused cache 0.50, outside this allocator 1.50; peak 7.00",
        "  largest blocks: 3.00, 1.00 GiB",
        "  batch[0]: float32 (4, 8)",
        "What to try:",
        # Needed 7 + 2 - 1 = 8 GiB for 4 samples; there is room for 10 - 1.5 - 1 = 7.5.
        "  - a batch size of 3 or less, with Trainer(accumulate_grad_batches=2) for the same step",
        "  - activation checkpointing (torch.utils.checkpoint) of the largest part of the model",
        "  - look at nvidia-smi: 1.50 GiB are held outside this allocator, by CUDA or others",
    ]
    # By this, Lightning's batch-size finder knows the error.
    assert len(caught.value.args) == 1


def test_pieces_of_cache_are_named() -> None:
    memory = RecordingMemory(reading(3, 8, 8))
    report = oom.device_report(
        torch.cuda.OutOfMemoryError(MESSAGE), memory, where="here", batch=None, at_start=reading()
    )
    assert "the cache holds enough, but in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tried to allocate 20.00 MiB.", 20 << 20),
        ("Tried to allocate 1.50 GiB (GPU 0;", 3 << 29),
        ("Tried to allocate 512 bytes", 512),
        ("no number", 0),
    ],
)
def test_requested_bytes_are_read_from_the_message(text: str, expected: int) -> None:
    assert oom.requested_bytes(text) == expected


@pytest.mark.parametrize(
    ("batch_size", "held_gib", "expected"),
    [
        (256, 10, 216),  # 9.5 of 10 GiB of activations fit, less a margin of a tenth, in steps of 8
        (256, 24, 88),
        (8, 8, 7),
        (1, 8, None),
    ],
)
def test_fitting_batch_size(batch_size: int, held_gib: float, expected: int | None) -> None:
    now = reading(allocated_gib=held_gib)
    size = oom.fitting_batch_size(batch_size, now, requested=GIB // 2, outside=0, at_start=reading(allocated_gib=0.5))
    assert size == expected


def test_host_memory_is_explained_too(tmp_path: Path) -> None:
    class RunsOutOnHost(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.empty(1 << 50)

    with pytest.raises(RuntimeError, match=r"Out of host memory in validate batch 0") as caught:
        fit(tmp_path, [MemoryHygieneCallback()], RunsOutOnHost(), num_sanity_val_steps=0)
    assert "/dev/shm holds" in str(caught.value)


def test_snapshot_is_written_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RecordingMemory(reading()).install(monkeypatch)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Allocations are recorded in .*oom-rank0\.pickle"):
        fit(tmp_path, [MemoryHygieneCallback(oom_snapshot=tmp_path / "new" / "oom.pickle")], RunsOut())
    history = [call for call in memory.calls if "history" in call]
    assert history == ["record_history 100000", f"save_history {tmp_path}/new/oom-rank0.pickle", "record_history None"]
    assert (tmp_path / "new").is_dir()


def test_a_device_that_fails_outright_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    memory = RecordingMemory(reading()).install(monkeypatch)
    monkeypatch.setattr(memory, "free_bytes", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        fit(tmp_path, [MemoryHygieneCallback(gc_every_n_steps=5)], RunsOut())
    assert str(caught.value) == MESSAGE
    assert "no report on the memory, since RuntimeError: CUDA error" in caplog.text
    assert gc.isenabled()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_data_pipeline_is_shut_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    RecordingMemory(reading()).install(monkeypatch)
    reader = MemoryReader({"x": np.ones((80, 8), np.float32)})
    loader = BatchLoader(reader, batch_size=4, num_workers=num_workers, batch_as="tuple")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        make_trainer(tmp_path, [MemoryHygieneCallback()], limit_val_batches=0).fit(RunsOut(), loader)
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("fastio")]
    for thread in readers:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in readers)
