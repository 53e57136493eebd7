"""Precision that the callback installs, against ``Trainer(precision=...)``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_fastio.callbacks.memory import MemoryHygieneCallback, precision
from tests.callbacks.small_runs import QUIET, ManualNet, Net, assert_same_weights, batches, fit, make_trainer

pytestmark = QUIET


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (Net, {}),
        (Net, {"gradient_clip_val": 0.1}),
        (Net, {"accumulate_grad_batches": 3}),
        (ManualNet, {}),
    ],
)
def test_weights_equal_those_of_trainer_precision(tmp_path: Path, net: type[Net], options: dict[str, Any]) -> None:
    ours = fit(tmp_path, [MemoryHygieneCallback("bf16-mixed")], net(), **options)
    stock = fit(tmp_path, [], net(), precision="bf16-mixed", **options)
    assert {dtype for _, dtype in ours.dtypes} == {torch.bfloat16}
    assert ours.dtypes == stock.dtypes
    assert_same_weights(ours, stock)


def averages() -> Callback:
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("new in Lightning 2.6")
    return callbacks.EMAWeightAveraging(decay=0.9)


def swa() -> Callback:
    return callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)


def checkpoints() -> Callback:
    return callbacks.ModelCheckpoint(every_n_train_steps=7, save_last=True)


@pytest.mark.parametrize("make", [averages, swa, checkpoints])
@pytest.mark.filterwarnings("ignore:.*[Ss]wapping scheduler.*")
def test_beside_callbacks_that_average_or_save_weights(tmp_path: Path, make: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": make is checkpoints}
    ours = fit(tmp_path / "ours", [MemoryHygieneCallback("bf16-mixed"), make()], **options)
    stock = fit(tmp_path / "stock", [make()], precision="bf16-mixed", **options)
    assert_same_weights(ours, stock)


def test_auto_leaves_a_cpu_run_as_it_is(tmp_path: Path) -> None:
    ours = fit(tmp_path, [MemoryHygieneCallback()])
    assert {dtype for _, dtype in ours.dtypes} == {torch.float32}
    assert_same_weights(ours, fit(tmp_path, []))


@pytest.mark.parametrize("choice", ["auto", None, "bf16-mixed"])
def test_a_precision_of_the_trainer_is_kept_in_silence(
    tmp_path: Path, choice: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, [MemoryHygieneCallback(choice)], precision="bf16-mixed")
    plugin = trainer.precision_plugin
    trainer.fit(Net(), batches())
    assert trainer.strategy.precision_plugin is plugin
    assert not [record for record in caplog.records if record.name == "lightning_fastio"]


@pytest.mark.parametrize("choice", ["32", "16-mixed"])
def test_a_contradiction_is_stated(tmp_path: Path, choice: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, [MemoryHygieneCallback(choice)], precision="bf16-mixed")
    trainer.fit(Net(), batches())
    (message,) = [record.message for record in caplog.records if record.name == "lightning_fastio"]
    assert message.startswith(f"MemoryHygieneCallback(precision={choice!r}) has no effect")
    assert "MixedPrecision('bf16-mixed')" in message
    assert trainer.precision == "bf16-mixed"


def test_half_on_a_cpu_is_what_lightning_makes_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = fit(tmp_path, [MemoryHygieneCallback("16-mixed")])
    assert {dtype for _, dtype in ours.dtypes} == {torch.bfloat16}
    assert "runs as 'bf16-mixed' on a CPU" in caplog.text


def test_one_plugin_object_serves_all_stages(tmp_path: Path) -> None:
    callback = MemoryHygieneCallback("bf16-mixed")
    trainer = make_trainer(tmp_path, [callback])
    trainer.fit(Net(), batches())
    plugin = trainer.strategy.precision_plugin
    trainer.test(Net(), batches(), verbose=False)
    assert trainer.strategy.precision_plugin is plugin
    assert type(plugin) is MixedPrecision


class OtherPrecision(Precision):
    """What a strategy with a precision of its own would bring."""

    precision = "16-true"


def test_a_plugin_of_another_class_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, [MemoryHygieneCallback("bf16-mixed")], plugins=[OtherPrecision()])
    trainer.fit(Net(), batches())
    assert type(trainer.strategy.precision_plugin) is OtherPrecision
    assert "already runs with OtherPrecision('16-true')" in caplog.text


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available.*")
@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_auto_takes_what_every_gpu_has(has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Strategy:
        root_device = torch.device("cuda", 1)
        precision_plugin = Precision()

        def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
            asked.append((decision, all))
            return decision

    class FakeTrainer:
        strategy = Strategy()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if has_bf16 else (7, 5))
    plugin = precision.install_precision(FakeTrainer(), "auto")  # type: ignore[arg-type]
    assert isinstance(plugin, MixedPrecision)
    assert (plugin.precision, plugin.device) == (expected, "cuda")
    assert (plugin.scaler is not None) == (expected == "16-mixed")
    assert FakeTrainer.strategy.precision_plugin is plugin
    assert asked == [(has_bf16, True)]


def test_tf32_is_set_and_restored_only_where_nobody_chose() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert precision.allow_tf32(cpu, "high") is None
    assert torch.get_float32_matmul_precision() == "highest"
    assert precision.allow_tf32(gpu, "high") == "highest"
    try:
        assert torch.get_float32_matmul_precision() == "high"
        assert precision.allow_tf32(gpu, "medium") is None
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precision.allow_tf32(gpu, None) is None


def test_tf32_settings_of_the_new_kind_are_not_touched() -> None:
    script = (
        "import torch\n"
        "from lightning_fastio.callbacks.memory.precision import allow_tf32\n"
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'\n"
        "torch.backends.fp32_precision = 'tf32'\n"
        "assert allow_tf32(torch.device('cuda', 0), 'high') is None\n"
        "assert torch.backends.cuda.matmul.fp32_precision == 'ieee'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_checkpoints_load_without_the_callback(tmp_path: Path) -> None:
    with_callback = make_trainer(tmp_path, [MemoryHygieneCallback("bf16-mixed")])
    with_callback.fit(Net(), batches(), batches(2))
    with_callback.save_checkpoint(tmp_path / "one.ckpt")
    # Lightning would warn if the callback that is left out had a state in the checkpoint.
    stock = make_trainer(tmp_path, [], max_epochs=2, precision="bf16-mixed")
    stock.fit(Net(), batches(), batches(2), ckpt_path=tmp_path / "one.ckpt")
    assert stock.global_step == 40
