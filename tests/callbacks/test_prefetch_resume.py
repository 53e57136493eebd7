"""A run with PrefetchCallback that is resumed sees exactly the batches whose steps were not done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader

from lightning_fastio._lightning import AheadFetcher
from lightning_fastio.callbacks import PrefetchCallback
from lightning_fastio.datamodules import FastIODataModule
from tests.callbacks.traced_runs import QUIET, Net, Trace, load
from tests.memory import MemoryReader, counting_reader

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:The .* does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Treespec:FutureWarning"),
]

LIGHTNING = tuple(map(int, lightning.__version__.split(".")[:2]))

NUM_BATCHES = 6


class StatefulLoader:
    """Batches with their number as values; goes on where a state says."""

    def __init__(self, sized: bool) -> None:
        self.position = 0
        self.resumed_at: int | None = None
        if sized:
            self.__class__ = SizedLoader

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.position = self.resumed_at or 0
        self.resumed_at = None
        while self.position < NUM_BATCHES:
            self.position += 1
            yield torch.full((2, 4), float(self.position - 1))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed_at = state["position"]


class SizedLoader(StatefulLoader):
    def __len__(self) -> int:
        return NUM_BATCHES


class Seen(Net):
    """Keeps the numbers of its training batches by epoch."""

    def __init__(self) -> None:
        super().__init__(Trace())
        self.seen: list[tuple[int, int]] = []
        self.last: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.current_epoch, int(batch[0, 0])))
        self.last.append(self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
        return super().training_step(batch, batch_idx)


class EstimatingNet(Seen):
    """Builds the loaders before the checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class SaveAt(Callback):
    """Saves in a given hook, at the fourth batch of training or the second of validation."""

    def __init__(self, hook: str, path: Path) -> None:
        self.path = path
        self.saved = False
        setattr(self, hook, self.save)
        self.when = {"on_train_batch_end": 2, "on_before_zero_grad": 2, "on_validation_batch_end": 1}.get(hook, 0)

    def save(self, trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        if trainer.sanity_checking or self.saved or (args and batch_idx < self.when):
            return
        self.saved = True
        trainer.save_checkpoint(self.path)


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )


def loader_states(path: Path) -> Any:
    return torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]


def resume(folder: Path, path: Path, *, sized: bool, depth: int, net: Seen | None = None, **options: Any) -> Seen:
    net = net or Seen()
    make_trainer(folder, PrefetchCallback(depth, summary=False), **options).fit(
        net, StatefulLoader(sized), load(2), ckpt_path=path
    )
    return net


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(
    ("hook", "rest"),
    [
        ("on_train_batch_end", [3, 4, 5]),
        ("on_validation_batch_end", [3, 4, 5]),
        # Saved inside step 2, which is then not done.
        ("on_before_zero_grad", [2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_the_rest_of_the_epoch_follows(
    tmp_path: Path, hook: str, rest: list[int], sized: bool, depth: int, first: bool
) -> None:
    path = tmp_path / "saved.ckpt"
    saver, prefetch = SaveAt(hook, path), PrefetchCallback(depth, summary=False)
    callbacks = [saver, prefetch] if first else [prefetch, saver]
    make_trainer(tmp_path, *callbacks, val_check_interval=3, check_val_every_n_epoch=None).fit(
        Seen(), StatefulLoader(sized), load(2)
    )
    net = resume(tmp_path, path, sized=sized, depth=depth, val_check_interval=3, check_val_every_n_epoch=None)
    assert [number for _, number in net.seen] == rest
    if LIGHTNING >= (2, 5) or hook == "on_before_zero_grad":
        # 2.4 itself counts one batch too few after a checkpoint of a finished batch.
        assert net.last == [False] * (len(rest) - 1) + [True]


@pytest.mark.parametrize("sized", [True, False])
def test_after_an_error_in_a_step_it_is_done_again(tmp_path: Path, sized: bool) -> None:
    path = tmp_path / "saved.ckpt"

    class Fails(Seen):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise ValueError("step 3")
            return super().training_step(batch, batch_idx)

    class SaveOnException(Callback):
        def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
            trainer.save_checkpoint(path)

    with pytest.raises(ValueError, match="step 3"):
        make_trainer(tmp_path, PrefetchCallback(3), SaveOnException()).fit(Fails(), StatefulLoader(sized))
    net = resume(tmp_path, path, sized=sized, depth=3)
    assert [number for _, number in net.seen] == [3, 4, 5]


@pytest.mark.parametrize("sized", [True, False])
def test_after_fit_the_state_is_that_of_the_last_step(tmp_path: Path, sized: bool) -> None:
    path = tmp_path / "saved.ckpt"
    trainer = make_trainer(tmp_path, PrefetchCallback(3, summary=False), max_steps=3)
    trainer.fit(Seen(), StatefulLoader(sized))
    trainer.save_checkpoint(path)
    assert loader_states(path) == [{"position": 3}]


def test_a_checkpoint_of_a_whole_epoch_starts_the_next(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    make_trainer(tmp_path, PrefetchCallback(3, summary=False), SaveAt("on_train_epoch_end", path)).fit(
        Seen(), StatefulLoader(True)
    )
    net = resume(tmp_path, path, sized=True, depth=3, max_epochs=2)
    # The state of a loader at its end is for the loader to read: this one has nothing left, and starts anew.
    assert {epoch for epoch, _ in net.seen} == {1}


def test_states_that_were_left_waiting_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    make_trainer(tmp_path, PrefetchCallback(2, summary=False), SaveAt("on_train_batch_end", path)).fit(
        EstimatingNet(), StatefulLoader(True)
    )
    net = resume(tmp_path, path, sized=True, depth=2, net=EstimatingNet())
    assert [number for _, number in net.seen] == [3, 4, 5]


def test_without_the_callback_a_combined_loader_speaks_for_itself_again(tmp_path: Path) -> None:
    combined = CombinedLoader(StatefulLoader(True), "min_size")
    make_trainer(tmp_path, PrefetchCallback(3, summary=False)).fit(Seen(), combined)
    path = tmp_path / "saved.ckpt"
    make_trainer(tmp_path, SaveAt("on_train_batch_end", path)).fit(Seen(), combined)
    assert loader_states(path) == [{"position": 3}]


# The loaders of this package


class Shuffled(FastIODataModule):
    def open_reader(self, source: Any) -> MemoryReader:
        return counting_reader(source)


class RowsSeen(Seen):
    """Keeps the rows of its training batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows = [*getattr(self, "rows", []), batch["x"].tolist()]
        return self.layer(batch["y"].float().reshape(-1, 1).expand(-1, 4)).pow(2).mean() * 1e-9

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Nothing to measure."""


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(("hook", "num_done"), [("on_train_batch_end", 3), ("on_before_zero_grad", 2)])
def test_data_modules_go_on_with_exactly_the_rows_not_seen(
    tmp_path: Path, hook: str, num_done: int, depth: int
) -> None:
    path = tmp_path / "saved.ckpt"

    def run(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        net = RowsSeen()
        data = Shuffled(train=24, batch_size=4, seed=3)
        make_trainer(tmp_path, *callbacks, max_epochs=2).fit(net, datamodule=data, ckpt_path=ckpt_path)
        return net.rows

    stock = run()
    assert run(PrefetchCallback(depth, summary=False), SaveAt(hook, path)) == stock
    assert run(PrefetchCallback(depth, summary=False), ckpt_path=path) == stock[num_done:]
    # A checkpoint does not depend on the callback that was there when it was written.
    assert run(ckpt_path=path) == stock[num_done:]


# Tuners run trials of their own, without the callbacks of the Trainer.


class TunedNet(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return load(4)

    def val_dataloader(self) -> Any:
        return load(2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def tune_lr(trainer: Trainer, net: TunedNet) -> Any:
    Tuner(trainer).lr_find(net, num_training=6, update_attr=True)
    trainer.fit(net)


TUNERS = {
    "lr_find": ([], tune_lr),
    "learning rate finder": (
        [lambda: LearningRateFinder(num_training_steps=5)],
        lambda trainer, net: trainer.fit(net),
    ),
    "batch size finder": (
        [lambda: BatchSizeFinder(max_trials=2, steps_per_trial=2)],
        lambda trainer, net: trainer.fit(net),
    ),
}


@pytest.mark.parametrize("name", TUNERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tuners_find_the_same(name: str, tmp_path: Path) -> None:
    make_callbacks, run = TUNERS[name]
    results = []
    for depth in (None, 2):
        torch.manual_seed(0)
        net = TunedNet()
        ahead = [] if depth is None else [PrefetchCallback(depth, summary=False)]
        trainer = make_trainer(tmp_path, *(make() for make in make_callbacks), *ahead, max_epochs=2)
        run(trainer, net)
        results.append((net.lr, net.batch_size, net.seen, net.layer[0].weight.tolist()))  # type: ignore[union-attr,operator]
        assert "batch_to_device" not in vars(trainer.strategy)
        assert not isinstance(trainer.fit_loop._data_fetcher, AheadFetcher)
    assert results[0] == results[1]
