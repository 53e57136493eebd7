"""With PrefetchCallback a run is the same as without it: batches, hooks, counters, metrics, weights, random numbers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_fastio.callbacks import PrefetchCallback
from tests.callbacks.traced_runs import (
    QUIET,
    FailsAt,
    Net,
    NoisyRows,
    Scenario,
    Trace,
    assert_same,
    load,
    read,
    run_traced,
    stream,
)

pytestmark = QUIET


def fit(train: Any, val: Any = None, **options: Any) -> Scenario:
    """Fit on loaders that are made anew for each run."""
    return Scenario(lambda trainer, net: trainer.fit(net, train(), None if val is None else val()), options)


class ManualNet(Net):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]


class IterNet(Net):
    """Fetches its own batches."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class GreedyIterNet(Net):
    """Takes two batches for each step."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        first, _, _ = next(dataloader_iter)
        second, batch_idx, _ = next(dataloader_iter)
        return super().training_step(torch.cat([first, second]), batch_idx)


class SkippingNet(Net):
    """Ends each epoch after its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class ReloadingNet(Net):
    def train_dataloader(self) -> Any:
        return load(3, start=100 * self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return load(2, start=1000 * self.trainer.current_epoch)


class HookedNet(Net):
    """Has every transfer hook, each with an effect and a note."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trace.note("on_before", self.trainer, dataloader_idx)
        return batch + 1

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.trace.note("transfer", self.trainer, str(device), dataloader_idx)
        return super().transfer_batch_to_device(batch * 2, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trace.note("on_after", self.trainer, dataloader_idx)
        return batch - 1


class FailingStepNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ValueError("step 2")
        return super().training_step(batch, batch_idx)


class FailingValidationNet(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.trainer.current_epoch == 1:
            raise ValueError("validation")
        super().validation_step(batch, batch_idx, dataloader_idx)


class InterruptedNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


class StoppingNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.should_stop = self.trainer.global_step == 4
        return super().training_step(batch, batch_idx)


class Indices(BasePredictionWriter):
    """Keeps the row numbers that it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[Any] = []

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Any, batch_indices: Any, *a: Any) -> None:
        self.seen.append(batch_indices)

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.seen.append(batch_indices)


def all_stages(trainer: Trainer, net: LightningModule) -> Any:
    trainer.fit(net, load(3, shuffle=True), load(2))
    trainer.validate(net, load(2), verbose=False)
    trainer.test(net, [load(2), load(3)], verbose=False)
    return trainer.predict(net, load(3, shuffle=True))


def fit_twice(trainer: Trainer, net: LightningModule) -> None:
    trainer.fit(net, load(3), load(2))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, load(4), load(1))


def predict_with_indices(trainer: Trainer, net: LightningModule) -> Any:
    writer = next(callback for callback in trainer.callbacks if isinstance(callback, Indices))
    return [trainer.predict(net, [load(3), load(2)]), writer.seen]


SCENARIOS = {
    "one loader": fit(lambda: load(4)),
    "shuffled": fit(lambda: load(4, shuffle=True), lambda: load(2)),
    "one batch": fit(lambda: load(1)),
    "no length": fit(lambda: stream(4)),
    "no length, validation inside": fit(lambda: stream(4), lambda: stream(2), val_check_interval=2),
    "no length, one batch": fit(lambda: stream(1), lambda: stream(1)),
    "no length, none": fit(lambda: stream(0)),
    "workers": fit(lambda: load(4, shuffle=True, num_workers=1), max_epochs=1),
    "persistent workers": fit(lambda: load(3, num_workers=1, persistent_workers=True)),
    "reader threads": fit(lambda: read(5, num_workers=2), lambda: read(3, num_workers=2), val_check_interval=2),
    "reader threads and a loader": fit(lambda: {"a": read(4, num_workers=2), "b": load(2, shuffle=True)}),
    "read in the thread that trains": fit(lambda: read(4, num_workers=0), lambda: read(2, num_workers=0)),
    "cycle": fit(lambda: {"a": load(5, shuffle=True), "b": load(2, shuffle=True)}),
    "cycle, limited": fit(lambda: {"a": load(5), "b": load(2, shuffle=True)}, limit_train_batches=4),
    "cycle of single batches": fit(lambda: {"a": load(3), "b": load(1, shuffle=True)}),
    "list of loaders": fit(lambda: [load(3), load(3, start=50)]),
    "min size": fit(lambda: CombinedLoader([load(4), load(2)], "min_size")),
    "max size": fit(lambda: CombinedLoader([load(4), load(2)], "max_size")),
    "sequential is refused": Scenario(
        lambda trainer, net: trainer.fit(net, CombinedLoader([load(2), load(2)], "sequential")), error=ValueError
    ),
    "validation inside": fit(lambda: load(4), lambda: load(2), val_check_interval=0.5),
    "validation every 3 batches": fit(
        lambda: load(4), lambda: load(2), val_check_interval=3, check_val_every_n_epoch=None
    ),
    "several validation loaders": fit(lambda: load(4), lambda: [load(2, shuffle=True), load(3), load(1, shuffle=True)]),
    "validation loaders together": fit(lambda: load(2), lambda: CombinedLoader([load(3), load(2)], "max_size_cycle")),
    "several without length": fit(lambda: load(2), lambda: [stream(2), load(2), stream(1)]),
    "accumulate": fit(lambda: load(5), accumulate_grad_batches=2),
    "accumulate, no length": fit(lambda: stream(5), accumulate_grad_batches=2),
    "limits": fit(lambda: load(6), lambda: load(6), limit_train_batches=2, limit_val_batches=3),
    "limits, no length": fit(lambda: stream(6), lambda: stream(6), limit_train_batches=2, limit_val_batches=3),
    "limits of several": fit(lambda: load(2), lambda: [load(4), load(1), load(3)], limit_val_batches=2),
    "limit as a share": fit(lambda: load(6), limit_train_batches=0.5),
    "no training batches": fit(lambda: load(6), lambda: load(2), limit_train_batches=0),
    "max_steps": fit(lambda: load(3), lambda: load(2), max_steps=5, max_epochs=-1),
    "max_steps, no length": fit(lambda: stream(3), max_steps=5, max_epochs=-1),
    "max_time of nothing": fit(lambda: load(3), max_time={"seconds": 0}),
    "should_stop": Scenario(lambda trainer, net: trainer.fit(net, load(3)), {"max_epochs": 4}, net=StoppingNet),
    "early stopping": Scenario(
        lambda trainer, net: trainer.fit(net, load(3), load(2)),
        {"max_epochs": 4},
        callbacks=lambda: [EarlyStopping("val", patience=1, min_delta=1e9)],
    ),
    "reload": Scenario(
        lambda trainer, net: trainer.fit(net),
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
        net=ReloadingNet,
    ),
    "all stages": Scenario(all_stages),
    "two fits": Scenario(fit_twice),
    "predict writer": Scenario(predict_with_indices, callbacks=lambda: [Indices()]),
    "barebones": fit(lambda: load(3), lambda: load(2), barebones=True),
    "fast_dev_run": fit(lambda: load(5), lambda: load(3), fast_dev_run=True),
    "overfit": fit(lambda: load(5, shuffle=True), lambda: load(3), overfit_batches=2),
    "manual": Scenario(lambda trainer, net: trainer.fit(net, load(3)), net=ManualNet),
    "dataloader_iter": Scenario(lambda trainer, net: trainer.fit(net, load(3), load(2)), net=IterNet),
    "dataloader_iter, no length": Scenario(lambda trainer, net: trainer.fit(net, stream(3)), net=IterNet),
    "dataloader_iter, two a step": Scenario(lambda trainer, net: trainer.fit(net, load(4)), net=GreedyIterNet),
    "skipped rest": Scenario(lambda trainer, net: trainer.fit(net, load(5)), net=SkippingNet),
    "skipped rest, persistent workers": Scenario(
        lambda trainer, net: trainer.fit(net, load(5, num_workers=1, persistent_workers=True)), net=SkippingNet
    ),
    "transfer hooks": Scenario(all_stages, net=HookedNet),
    "dataset draws": fit(lambda: load(6, NoisyRows, shuffle=True), lambda: load(2, NoisyRows), val_check_interval=0.5),
    "second loader draws": fit(lambda: load(2), lambda: [load(3), load(4, NoisyRows)]),
    "error in a row": Scenario(
        lambda trainer, net: trainer.fit(net, DataLoader(FailsAt(12, 9), batch_size=2)), error=OSError
    ),
    "error in the first row": Scenario(
        lambda trainer, net: trainer.fit(net, DataLoader(FailsAt(12, 0), batch_size=2)), error=OSError
    ),
    "error in a step": Scenario(lambda trainer, net: trainer.fit(net, load(5)), net=FailingStepNet, error=ValueError),
    "error in validation": Scenario(
        lambda trainer, net: trainer.fit(net, load(5), load(2)),
        {"val_check_interval": 2},
        net=FailingValidationNet,
        error=ValueError,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_is_the_same(name: str, tmp_path: Path) -> None:
    stock, _ = run_traced(SCENARIOS[name], tmp_path, [])
    for depth in (1, 3):
        ahead, _ = run_traced(SCENARIOS[name], tmp_path, [PrefetchCallback(depth, summary=False)])
        assert_same(stock, ahead)


@pytest.mark.parametrize(("num_workers", "is_used"), [(0, True), (2, False)])
def test_a_loader_with_threads_of_its_own_needs_no_other_on_a_cpu(
    num_workers: int, is_used: bool, tmp_path: Path
) -> None:
    threads: set[str] = set()

    class Watch(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            threads.update(thread.name for thread in threading.enumerate())
            return super().training_step(batch, batch_idx)

    scenario = Scenario(lambda trainer, net: trainer.fit(net, read(6, num_workers=num_workers)), net=Watch)
    run_traced(scenario, tmp_path, [PrefetchCallback(summary=False)])
    assert ("fastio-prefetch" in threads) == is_used
