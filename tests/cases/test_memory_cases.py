"""What went wrong for others with mixed precision and device memory, and the right behaviour."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_fastio.callbacks.memory import MemoryHygieneCallback, precision
from lightning_fastio.errors import ConfigError
from tests.callbacks.small_runs import (
    QUIET,
    ManualNet,
    Net,
    RecordingMemory,
    assert_same_weights,
    batches,
    fit,
    make_trainer,
    reading,
)

pytestmark = QUIET

PACKAGE = Path(__file__).parents[2] / "lightning_fastio"


def half_precision(init_scale: float = 1024.0) -> MixedPrecision:
    """fp16 with a scaler that works on a CPU; Lightning itself does not offer it there."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


class Overflows(Net):
    """Gradients are infinite in steps 1 and 3 of 4."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx in (1, 3):
            self.body[0].weight.grad[0, 0] = float("inf")


def test_a2_steps_that_the_scaler_skips_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "mixed_precision", lambda *_: half_precision())
    counts = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            counts.append(callback._skipped.count if callback._skipped else None)

    callback = MemoryHygieneCallback("bf16-mixed")
    fit(tmp_path, [callback, Look()], Overflows(), limit_train_batches=4)
    assert counts == [0, 1, 1, 2]
    assert "2 steps skipped by the gradient scaler" in capsys.readouterr().out


@pytest.mark.parametrize("net", [Net, ManualNet])
def test_a3_gradients_are_clipped_after_unscaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: type[Net]
) -> None:
    norms: dict[str, list[float]] = {"ours": [], "stock": [], "float32": []}

    class Norms(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            grads = [p.grad.flatten() for p in pl_module.parameters()]
            norms[self.name].append(float(torch.cat(grads).norm()))

    options: dict[str, Any] = {} if net is ManualNet else {"gradient_clip_val": 0.05}
    stock = fit(tmp_path, [Norms("stock")], net(), plugins=[half_precision()], **options)
    monkeypatch.setattr(precision, "mixed_precision", lambda *_: half_precision())
    ours = fit(tmp_path, [MemoryHygieneCallback("bf16-mixed"), Norms("ours")], net(), **options)
    assert_same_weights(ours, stock)
    assert norms["ours"] == norms["stock"]
    if net is Net:
        fit(tmp_path, [Norms("float32")], net(), **options)
        assert norms["ours"][0] == pytest.approx(norms["float32"][0], rel=0.01)


def test_a5_half_weights_with_a_scaler_are_named(tmp_path: Path) -> None:
    net = Net()
    net.body[2].half()
    trainer = make_trainer(tmp_path, [MemoryHygieneCallback()], plugins=[half_precision()])
    with pytest.raises(ConfigError, match=r"parameters are float16: body\.2\.weight, body\.2\.bias\. Leave out"):
        trainer.fit(net, batches())


def test_a6_the_scale_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "mixed_precision", lambda *_: half_precision(8.0))
    first = make_trainer(tmp_path, [MemoryHygieneCallback("bf16-mixed")], limit_val_batches=0)
    first.fit(Net(), batches())
    first.save_checkpoint(tmp_path / "half.ckpt")
    monkeypatch.setattr(precision, "mixed_precision", lambda *_: half_precision(65536.0))
    scales = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())

    callbacks: list[Callback] = [MemoryHygieneCallback("bf16-mixed"), Look()]
    second = make_trainer(tmp_path, callbacks, max_epochs=2, limit_val_batches=0)
    second.fit(Net(), batches(), ckpt_path=tmp_path / "half.ckpt")
    assert scales == [8.0]
    # The state lies where Lightning puts it, so that Trainer(precision="16-mixed") reads it as well.
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 8.0


def test_a7_the_first_nan_is_reported_once_with_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class BecomesNan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx >= 3 else loss

    fit(tmp_path, [MemoryHygieneCallback()], BecomesNan())
    (message,) = [record.message for record in caplog.records if record.name == "lightning_fastio"]
    assert message.startswith("the loss became nan in train batch 3 of epoch 0, at step 3 (32-true)")


@pytest.mark.parametrize(("policy", "expected"), [("pressure", 1), ("stage", 2), ("never", 0)])
def test_a8_the_cache_is_emptied_a_few_times_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, expected: int
) -> None:
    # At the first check there is pressure; afterwards there is none.
    looks = 4 + 1
    memory = RecordingMemory(*[reading(1, 9, 4)] * looks, reading(1, 4, 4)).install(monkeypatch)
    trainer = make_trainer(tmp_path, [MemoryHygieneCallback(empty_cache=policy)])
    trainer.fit(Net(), batches(110), batches(2))
    assert memory.num_emptied == expected


def test_a8_a_cpu_run_starts_no_cuda(tmp_path: Path) -> None:
    script = (
        "import torch, sys\n"
        "from pathlib import Path\n"
        "from lightning_fastio.callbacks.memory import MemoryHygieneCallback\n"
        "from tests.callbacks.small_runs import fit\n"
        "def never(*args, **kwargs): raise AssertionError('CUDA was asked')\n"
        "torch.cuda._lazy_init = torch.cuda.synchronize = torch.cuda.memory_stats_as_nested_dict = never\n"
        "fit(Path(sys.argv[1]), [MemoryHygieneCallback(empty_cache='stage', gc_every_n_steps=5)])\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a9_apex_and_deprecated_amp_calls_appear_nowhere() -> None:
    forbidden = re.compile(r"scale_loss|amp\.initialize|cuda\.amp\.(autocast|GradScaler|custom)")
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "examples").rglob("*.py")]
    assert len(files) > 20
    assert [path.name for path in files if forbidden.search(path.read_text())] == []
