"""Runs of a Trainer that write down everything that happens, to compare one with PrefetchCallback to one without."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fastio.loader import BatchLoader
from tests.memory import MemoryReader

QUIET = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*checkpoint directory.*exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are trying to .self.log.*barebones:UserWarning"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning"),
]
"""Lightning's advice about tiny loaders, and what it uses of torch's old pytree."""

HOOKS = [
    *(f"on_{stage}_{edge}" for stage in ("fit", "train", "validation", "test", "predict") for edge in ("start", "end")),
    *(
        f"on_{stage}_{unit}_{edge}"
        for stage in ("train", "validation", "test", "predict")
        for unit in ("epoch", "batch")
        for edge in ("start", "end")
    ),
    *("on_sanity_check_start", "on_sanity_check_end", "on_before_zero_grad", "on_after_backward", "on_exception"),
    *("setup", "teardown"),
]

FEATURES = 4


class Rows(Dataset[torch.Tensor]):
    """Row ``i`` holds ``start + i``."""

    def __init__(self, num_rows: int, start: int = 0) -> None:
        self.num_rows, self.start = num_rows, start

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((FEATURES,), float(self.start + row))


class NoisyRows(Rows):
    """Draws from the generators that training draws from as well."""

    def __getitem__(self, row: int) -> torch.Tensor:
        return super().__getitem__(row) + torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002


class Stream(IterableDataset[torch.Tensor]):
    """The same rows, without a length."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((FEATURES,), float(row)) for row in range(self.num_rows))


class FailsAt(Rows):
    """Cannot read one row."""

    def __init__(self, num_rows: int, bad_row: int) -> None:
        super().__init__(num_rows)
        self.bad_row = bad_row

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == self.bad_row:
            raise OSError(f"row {row} is damaged")
        return super().__getitem__(row)


def load(num_batches: int, dataset: type[Rows] = Rows, start: int = 0, **options: Any) -> DataLoader[torch.Tensor]:
    """Batches of two rows."""
    return DataLoader(dataset(2 * num_batches, start), batch_size=2, **options)


def stream(num_batches: int) -> DataLoader[torch.Tensor]:
    """Batches of two rows, without a length."""
    return DataLoader(Stream(2 * num_batches), batch_size=2)


def read(num_batches: int, start: int = 0, **options: Any) -> BatchLoader:
    """The same from a reader, shuffled."""
    values = np.repeat(np.arange(start, start + 2 * num_batches, dtype=np.float32)[:, None], FEATURES, axis=1)
    return BatchLoader(MemoryReader({"x": values}), 2, shuffle="global", **options)


def digest(batch: Any) -> Any:
    """What a batch holds, comparable."""
    if isinstance(batch, torch.Tensor):
        return batch.flatten().tolist()
    if isinstance(batch, Mapping):
        return {key: digest(value) for key, value in batch.items()}
    if hasattr(batch, "to_dict"):
        return digest(batch.to_dict())
    if isinstance(batch, (list, tuple)):
        return [digest(value) for value in batch]
    return repr(batch) if isinstance(batch, BaseException) else batch


def total(batch: Any) -> torch.Tensor:
    """One row of features out of any batch."""
    if isinstance(batch, torch.Tensor):
        return batch.sum(0)
    values = batch.values() if isinstance(batch, dict) else batch
    return torch.stack([total(value) for value in values if value is not None]).sum(0)


@dataclass
class Trace:
    """What happened in a run."""

    events: list[Any] = field(default_factory=list)
    """Hooks and steps in order, with what they were given and the counters of that moment."""
    logged: list[Any] = field(default_factory=list)
    """What loggers were given, except the metrics of this package."""
    weights: list[float] = field(default_factory=list)
    progress: Any = None
    """Counters of all loops."""
    generators: Any = None
    """States of the global generators."""
    error: str | None = None

    def note(self, name: str, trainer: Trainer | None = None, *details: Any) -> None:
        """Add an event."""
        counters: tuple[Any, ...] = ()
        if trainer is not None:
            is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            counters = trainer.current_epoch, trainer.global_step, is_last, str(trainer.state.stage)
        self.events.append((name, counters, *details))


class Net(LightningModule):
    """One layer with dropout, so that training draws random numbers in the main process."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.layer = torch.nn.Sequential(torch.nn.Linear(FEATURES, 1), torch.nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trace.note("training_step", self.trainer, digest(batch), batch_idx)
        loss = self.layer(total(batch)).pow(2).mean() * 1e-6
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.trace.note("validation_step", self.trainer, digest(batch), batch_idx, dataloader_idx)
        self.log("val", self.layer(total(batch)).mean(), batch_size=2)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.trace.note("test_step", self.trainer, digest(batch), batch_idx, dataloader_idx)
        self.log("test", self.layer(total(batch)).mean(), batch_size=2)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.trace.note("predict_step", self.trainer, digest(batch), batch_idx, dataloader_idx)
        return self.layer(total(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ListLogger(Logger):
    """Keeps what it is given."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.fastio: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        others = {name: value for name, value in metrics.items() if not name.startswith("fastio/")}
        if others:
            self.trace.logged.append((step, others))
        ours = {name: value for name, value in metrics.items() if name.startswith("fastio/")}
        if ours:
            self.fastio.append((step or 0, ours))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""


def _recording_hook(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self.trace.note(name, trainer, *(digest(arg) for arg in args if not isinstance(arg, torch.optim.Optimizer)))

    return hook


class Recorder(Callback):
    """Writes every hook down."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace


for _name in HOOKS:
    setattr(Recorder, _name, _recording_hook(_name))


@dataclass
class Scenario:
    """One way to use a Trainer."""

    run: Callable[[Trainer, Net], Any]
    options: dict[str, Any] = field(default_factory=dict)
    net: type[Net] = Net
    callbacks: Callable[[], list[Callback]] = list
    error: type[BaseException] | None = None


def run_traced(scenario: Scenario, folder: Path, callbacks: list[Callback]) -> tuple[Trace, Trainer]:
    """Run a scenario on one CPU with the same seeds each time."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    trace = Trace()
    net = scenario.net(trace)
    options: dict[str, Any] = {
        "max_epochs": 2,
        "logger": ListLogger(trace),
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **scenario.options,
    }
    if options.get("barebones"):
        options = {key: value for key, value in options.items() if key in ("max_epochs", "barebones")}
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[Recorder(trace), *scenario.callbacks(), *callbacks],
        **options,
    )
    threads_before = set(threading.enumerate())
    if scenario.error is None:
        trace.note("result", None, digest(scenario.run(trainer, net)))
    else:
        with pytest.raises(scenario.error) as raised:
            scenario.run(trainer, net)
        trace.error = str(raised.value)
    # torch's own feeders of worker queues end when they get to it.
    left = {thread for thread in threading.enumerate() if not thread.name.startswith("QueueFeederThread")}
    assert left <= threads_before
    trace.weights = net.layer[0].weight.flatten().tolist()  # type: ignore[union-attr,operator]
    trace.logged.append(digest(dict(trainer.callback_metrics)))
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    trace.generators = (torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2], random.getstate())
    # Asked last: a loader may start, and draw, for its state.
    trace.progress = trainer.fit_loop.state_dict()
    return trace, trainer


def assert_same(stock: Trace, ahead: Trace) -> None:
    """Equal in everything, with the first difference shown."""
    for number, (expected, actual) in enumerate(zip(stock.events, ahead.events, strict=False)):
        assert actual == expected, f"event {number}"
    assert len(ahead.events) == len(stock.events)
    assert ahead.logged == stock.logged
    assert ahead.weights == stock.weights
    assert ahead.progress == stock.progress
    assert ahead.error == stock.error
    assert ahead.generators == stock.generators
