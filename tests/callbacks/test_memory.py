"""MemoryHygieneCallback in whole runs on a CPU: what happens when, and everything restored."""

from __future__ import annotations

import csv
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_fastio.callbacks.memory import MemoryHygieneCallback
from lightning_fastio.errors import ConfigError
from tests.callbacks.small_runs import (
    QUIET,
    Net,
    RecordingMemory,
    assert_same_weights,
    batches,
    fit,
    make_trainer,
    reading,
)

pytestmark = QUIET


def logged(folder: Path) -> list[dict[str, str]]:
    with next(folder.glob("**/metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def test_weights_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    assert_same_weights(fit(tmp_path, [MemoryHygieneCallback(gc_every_n_steps=5)]), fit(tmp_path, []))


def test_host_memory_is_logged_at_the_cadence_of_the_trainer(tmp_path: Path) -> None:
    fit(tmp_path, [MemoryHygieneCallback()], logger=CSVLogger(tmp_path), log_every_n_steps=5)
    rows = logged(tmp_path)
    assert [int(row["step"]) for row in rows] == [4, 9, 14, 19]
    assert all(0.05 < float(row["fastio/memory_host_gib"]) < 64 for row in rows)
    assert set(rows[0]) == {"step", "fastio/memory_host_gib", "fastio/memory_host_mapped_gib"}


def test_device_memory_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordingMemory(reading(1, 4, 3, split_bytes=1 << 30, num_retries=7)).install(monkeypatch)
    fit(tmp_path, [MemoryHygieneCallback()], logger=CSVLogger(tmp_path), log_every_n_steps=20)
    (row,) = logged(tmp_path)
    assert {name.removeprefix("fastio/memory_"): float(value) for name, value in row.items() if "host" not in name} == {
        "step": 19,
        "allocated_gib": 1,
        "reserved_gib": 4,
        "peak_gib": 3,
        "fragmentation_fraction": 0.25,
        "alloc_retries": 7,
        "returned_gib": 0,
        "empty_cache_s": 0,
    }


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_logs_its_memory_when_it_ends(tmp_path: Path, stage: str) -> None:
    trainer = make_trainer(tmp_path, [MemoryHygieneCallback()], logger=CSVLogger(tmp_path))
    getattr(trainer, stage)(Net(), batches(3))
    trainer.logger.save()  # type: ignore[union-attr]
    assert [row["step"] for row in logged(tmp_path) if row["fastio/memory_host_gib"]] == ["0"]


def test_summary_has_the_peak_its_step_and_what_empty_cache_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = reading(1, 2, 2), reading(1, 9, 5)
    RecordingMemory(small, small, large, large, reading(1, 6, 5)).install(monkeypatch)
    fit(tmp_path, [MemoryHygieneCallback("bf16-mixed", empty_cache="stage")], limit_val_batches=0)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Memory: "))
    assert line.startswith(
        "Memory: precision bf16-mixed, device peak 5.00 GiB by step 2, empty_cache 1x returned 3.00 GiB in 0."
    )


@pytest.mark.parametrize(("summary", "count"), [(True, 1), (False, 0)])
def test_summary_can_be_switched_off(summary: bool, count: int, capsys: Any, tmp_path: Path) -> None:
    fit(tmp_path, [MemoryHygieneCallback(summary=summary)])
    assert capsys.readouterr().out.count("Memory: precision 32-true, host peak") == count


def test_automatic_collection_is_off_during_training_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, collected = [], []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))

    class Look(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(gc.isenabled())

    fit(tmp_path, [MemoryHygieneCallback(gc_every_n_steps=8), Look()], num_sanity_val_steps=0)
    assert seen == [False] * 20
    assert gc.isenabled()
    # At the start, at batches 8 and 16, after validation, after training.
    assert collected == [2, 1, 1, 2, 2]


def test_collection_that_the_user_switched_off_stays_off(tmp_path: Path) -> None:
    gc.disable()
    try:
        fit(tmp_path, [MemoryHygieneCallback(gc_every_n_steps=2)])
        assert not gc.isenabled()
    finally:
        gc.enable()


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise ZeroDivisionError("mine")
        return super().training_step(batch, batch_idx)


def test_everything_is_restored_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordingMemory(reading()).install(monkeypatch)
    monkeypatch.setattr("lightning_fastio.callbacks.memory.callback.allow_tf32", lambda *_: _set_high())
    threads = threading.enumerate()
    callback = MemoryHygieneCallback(gc_every_n_steps=2)
    with pytest.raises(ZeroDivisionError, match=r"^mine$"):
        fit(tmp_path, [callback], Fails())
    assert gc.isenabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert threading.enumerate() == threads
    assert (callback._device, callback._cache, callback._place) == (None, None, None)


def _set_high() -> str:
    torch.set_float32_matmul_precision("high")
    return "highest"


@pytest.mark.parametrize("logger", [True, False])
def test_every_stage_with_and_without_a_logger(tmp_path: Path, logger: bool) -> None:
    callback = MemoryHygieneCallback("bf16-mixed", gc_every_n_steps=3)
    trainer = make_trainer(tmp_path, [callback], logger=CSVLogger(tmp_path) if logger else False, log_every_n_steps=2)
    net = Net()
    trainer.fit(net, batches(), batches(2))
    trainer.validate(net, batches(2), verbose=False)
    trainer.test(net, batches(2), verbose=False)
    trainer.predict(net, batches(2))
    assert set(net.dtypes) == {(stage, torch.bfloat16) for stage in ("train", "validate", "test", "predict")}


def test_no_batch_is_kept(tmp_path: Path) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    class Remembers(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(weakref.ref(batch[0]))
            return super().training_step(batch, batch_idx)

        validation_step = training_step

    callback = MemoryHygieneCallback()
    fit(tmp_path, [callback], Remembers())
    gc.collect()
    assert len(seen) == 24
    assert [ref() for ref in seen] == [None] * 24


def test_evaluation_with_gradients_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class KeepsGradients(Net):
        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            torch.set_grad_enabled(True)

    trainer = make_trainer(tmp_path, [MemoryHygieneCallback()], inference_mode=False)
    trainer.validate(KeepsGradients(), batches(3), verbose=False)
    assert [record.message.split(",")[0] for record in caplog.records if record.name == "lightning_fastio"] == [
        "validate runs with gradients enabled"
    ]


def test_batch_with_a_graph_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Augments(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * self.body[0].weight.mean()]

    fit(tmp_path, [MemoryHygieneCallback()], Augments())
    messages = [record.message for record in caplog.records if record.name == "lightning_fastio"]
    assert [message.split(",")[0] for message in messages] == [
        "the train batch carries the gradient graph of what made batch[0]"
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp8"},
        {"float32_matmul": "tf32"},
        {"empty_cache": "always"},
        {"pressure_fraction": 2.0},
        {"check_every_n_steps": 0},
        {"gc_every_n_steps": 0},
    ],
)
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        MemoryHygieneCallback(**options)


def test_arguments_come_from_a_command_line() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(MemoryHygieneCallback, "memory")
    line = ["--memory.precision=16-mixed", "--memory.gc_every_n_steps=50", "--memory.oom_snapshot=oom.pickle"]
    callback = parser.instantiate_classes(parser.parse_args(line)).memory
    assert (callback.precision, callback.gc_every_n_steps, callback.oom_snapshot) == ("16-mixed", 50, "oom.pickle")
    assert callback.empty_cache == "pressure"
    assert "bf16-mixed on a GPU that has it" in parser.format_help()


DDP_SCRIPT = """
import sys, torch
from pathlib import Path
from lightning_fastio.callbacks.memory import MemoryHygieneCallback
from tests.callbacks.small_runs import Net, assert_same_weights, fit

if __name__ == "__main__":
    options = dict(strategy="ddp_fork", devices=2)
    ours = fit(Path(sys.argv[1]), [MemoryHygieneCallback("bf16-mixed", gc_every_n_steps=4)], **options)
    stock = fit(Path(sys.argv[1]), [], precision="bf16-mixed", **options)
    alone = fit(Path(sys.argv[1]), [])
    assert_same_weights(ours, stock)
    assert not torch.equal(ours.body[0].weight, alone.body[0].weight)
    print("same weights")
"""


def test_two_processes_train_the_same_weights(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(DDP_SCRIPT)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Memory: precision bf16-mixed") == 1
    assert done.stdout.endswith("same weights\n")
