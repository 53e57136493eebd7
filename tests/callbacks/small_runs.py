"""Small training runs and a device that only exists in memory, for the tests of MemoryHygieneCallback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_fastio.callbacks.memory import callback
from lightning_fastio.callbacks.memory.allocator import GIB, DeviceReading

QUIET = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
"""Lightning's advice about tiny loaders, and what it uses of torch's old pytree."""


class Net(LightningModule):
    """Two layers; notes the dtype that its layers produced, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.dtypes: list[tuple[str, torch.dtype]] = []

    def loss(self, batch: Any, stage: str) -> torch.Tensor:
        out = self.body(batch[0])
        self.dtypes.append((stage, out.dtype))
        return (out.float() ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "validate")

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "predict")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ManualNet(Net):
    """The same with manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, "train"))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


def batches(num_batches: int = 20) -> DataLoader[Any]:
    """Batches of 4 rows with 8 numbers each, always the same."""
    values = torch.randn(num_batches * 4, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(values), batch_size=4)


def make_trainer(folder: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    """A quiet CPU Trainer for one epoch."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    return Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )


def fit(folder: Path, callbacks: list[Callback], net: Net | None = None, **options: Any) -> Net:
    """Train 20 batches and validate; returns the trained module."""
    torch.manual_seed(0)
    net = net or Net()
    net.body.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)
    make_trainer(folder, callbacks, **options).fit(net, batches(), batches(2))
    return net


def assert_same_weights(one: Net, other: Net) -> None:
    """Bit for bit."""
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


class RecordingMemory:
    """A device of 10 GiB that plays back readings and writes down what is done to it."""

    def __init__(self, *readings: DeviceReading) -> None:
        self.readings = list(readings)
        self.calls: list[str] = []
        self.free = 0
        self.blocks: list[dict[str, Any]] = []

    def read(self) -> DeviceReading:
        self.calls.append("read")
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def segments(self) -> list[dict[str, Any]]:
        return [{"blocks": self.blocks}]

    def free_bytes(self) -> int:
        return self.free

    def record_history(self, max_entries: int | None) -> None:
        self.calls.append(f"record_history {max_entries}")

    def save_history(self, path: Path) -> None:
        self.calls.append(f"save_history {path}")

    @property
    def num_emptied(self) -> int:
        return self.calls.count("empty_cache")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> RecordingMemory:
        """Take the place of the device of the next run."""
        monkeypatch.setattr(callback, "open_device_memory", lambda device: self)
        return self


def reading(allocated_gib: float = 1, reserved_gib: float = 2, peak_gib: float = 2, **others: Any) -> DeviceReading:
    """A reading of a 10-GiB device."""
    base = DeviceReading(
        total_bytes=10 * GIB,
        allocated_bytes=int(allocated_gib * GIB),
        reserved_bytes=int(reserved_gib * GIB),
        peak_bytes=int(peak_gib * GIB),
        split_bytes=0,
        num_retries=0,
    )
    return replace(base, **others)
