"""Data modules inside a Trainer: stages, splits, resume, and what Lightning asks of a loader."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.errors import ConfigError, ResumeError
from lightning_fastio.loader import BatchLoader
from tests.memory import MemoryReader, counting_reader

# Many of these runs only train.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class MemoryDataModule(FastIODataModule):
    """A user's own storage: the source is a number of rows, or (rows, rows of a block)."""

    def open_reader(self, source: Any) -> MemoryReader:
        if isinstance(source, list):
            num_rows, block = source
            return counting_reader(num_rows, blocks=[*range(0, num_rows, block), num_rows], cache_bytes=12 * 8 * block)
        return counting_reader(int(source))


class Recorder(LightningModule):
    """Trains one weight and writes down the rows of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: dict[str, list[list[int]]] = {stage: [] for stage in ("train", "val", "test", "predict")}
        self.losses: list[float] = []
        self.fail_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch["x"].tolist()
        if len(self.seen["train"]) == self.fail_at:
            raise RuntimeError("the step fails")
        self.seen["train"].append(rows)
        loss = (self.weight * batch["y"].mean() - 1).square().sum()
        self.losses.append(loss.item())
        return loss

    lr = 1e-4

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["val"].append(batch["x"].tolist())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"].append(batch["x"].tolist())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["predict"].append(batch["x"].tolist())
        return batch["x"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def trainer(tmp_path: Path, **settings: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    return Trainer(default_root_dir=tmp_path, **quiet | settings)


def test_every_stage_sees_its_rows(tmp_path: Path) -> None:
    data = MemoryDataModule(train="100", val_split=0.2, test_split=10, batch_size=8, shuffle="global")
    model = Recorder()
    run = trainer(tmp_path)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    run.predict(model, data)
    train, val, test = (set(flat(model.seen[stage])) for stage in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (70, 20, 10)
    assert train | val | test == set(range(100))
    first, second = model.seen["train"][:9], model.seen["train"][9:]
    assert sorted(flat(first)) == sorted(flat(second)) == sorted(train)
    assert first != second
    assert flat(model.seen["val"]) == sorted(val) * 2
    assert flat(model.seen["predict"]) == flat(model.seen["test"]) == sorted(test)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("fastio")] == []


def test_the_split_ignores_the_global_seed() -> None:
    def val_rows(seed: int) -> list[int]:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        data = MemoryDataModule(train="100", val_split=0.2, seed=seed)
        return flat([batch["x"].tolist() for batch in data.val_dataloader()])

    assert val_rows(1) == val_rows(2)


def test_a_subclass_transforms_by_stage(tmp_path: Path) -> None:
    class Negative(MemoryDataModule):
        def transform_batch(self, batch: Any, stage: str) -> Any:
            return batch | {"x": -batch["x"]} if stage == "train" else batch

    model = Recorder()
    trainer(tmp_path, max_epochs=1).fit(model, Negative(train="16", val="8", batch_size=8, shuffle="none"))
    assert flat(model.seen["train"]) == [-row for row in range(16)]
    assert flat(model.seen["val"]) == list(range(8))


class NoisyDataModule(MemoryDataModule):
    """Draws from the generator that it is given."""

    def transform_batch(self, batch: Any, stage: str, generator: torch.Generator | None = None) -> Any:
        return batch | {"noise": torch.rand(len(batch["x"]), generator=generator)}


def test_transform_batch_runs_in_processes_with_the_same_random_numbers(tmp_path: Path) -> None:
    def noise(**settings: Any) -> list[list[float]]:
        data = NoisyDataModule(train="16", batch_size=4, **settings)
        data.trainer = trainer(tmp_path)
        batches = [batch["noise"].tolist() for batch in data.train_dataloader()]
        data.teardown()
        return batches

    assert noise(num_workers=2) == noise(num_workers=2, worker_type="process") == noise(num_workers=0)


class SaveAt(Callback):
    """Saves a checkpoint at one point of the run."""

    def __init__(self, path: Path, hook: str, batch: int) -> None:
        self.path, self.hook, self.batch = path, hook, batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self._save("on_train_batch_end", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._save("on_validation_end", trainer)

    def _save(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("shuffle", ["global", "block"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("hook", "settings"), [("on_train_batch_end", {}), ("on_validation_end", {"val_check_interval": 3})]
)
def test_resume_goes_on_with_the_unseen_rows_and_equal_losses(
    tmp_path: Path, shuffle: Any, num_workers: int, hook: str, settings: dict[str, Any]
) -> None:
    def data(workers: int) -> MemoryDataModule:
        return MemoryDataModule(
            train=[100, 10] if shuffle == "block" else "100",
            val="8",
            batch_size=8,
            shuffle=shuffle,
            seed=5,
            num_workers=workers,
        )

    whole, resumed = Recorder(), Recorder()
    # 13 batches make an epoch: this is the sixth one of the second.
    saver = SaveAt(tmp_path / "a.ckpt", hook, 19)
    trainer(tmp_path, callbacks=[saver], **settings).fit(whole, data(num_workers))
    trainer(tmp_path, **settings).fit(resumed, data(1), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.seen["train"] == whole.seen["train"][19:]
    assert resumed.losses == whole.losses[19:]


@pytest.mark.parametrize("shuffle", ["global", "block"])
@pytest.mark.parametrize("batch_size", [4, 16])
def test_resume_with_another_batch_size_counts_its_batches(tmp_path: Path, shuffle: Any, batch_size: int) -> None:
    def data(batch_size: int) -> MemoryDataModule:
        source = [100, 10] if shuffle == "block" else "100"
        return MemoryDataModule(train=source, val="8", batch_size=batch_size, shuffle=shuffle)

    whole, resumed = Recorder(), Recorder()
    trainer(tmp_path, callbacks=[SaveAt(tmp_path / "a.ckpt", "on_train_batch_end", 5)]).fit(whole, data(8))
    run = trainer(tmp_path)
    run.fit(resumed, data(batch_size), ckpt_path=tmp_path / "a.ckpt")
    rest = 60 // batch_size + (60 % batch_size > 0)
    assert sorted(flat(whole.seen["train"][:5]) + flat(resumed.seen["train"][:rest])) == list(range(100))
    assert sorted(flat(resumed.seen["train"][rest:])) == list(range(100))
    assert len(resumed.seen["train"]) == rest + -(-100 // batch_size)
    assert run.num_training_batches == -(-100 // batch_size)
    assert len(resumed.seen["val"]) == 2 * -(-8 // batch_size), "validation runs after both epochs"


def test_resume_after_the_stepping_batches_were_asked_for(tmp_path: Path) -> None:
    class Scheduled(Recorder):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 26
            return super().configure_optimizers()

    def data() -> MemoryDataModule:
        return MemoryDataModule(train="100", batch_size=8, shuffle="global")

    whole, resumed = Scheduled(), Scheduled()
    trainer(tmp_path, callbacks=[SaveAt(tmp_path / "a.ckpt", "on_train_batch_end", 5)]).fit(whole, data())
    trainer(tmp_path).fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.seen["train"] == whole.seen["train"][5:]


def test_resume_after_max_steps_and_with_accumulated_gradients(tmp_path: Path) -> None:
    def data() -> MemoryDataModule:
        return MemoryDataModule(train="100", batch_size=8, shuffle="global")

    whole, stopped, resumed = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, accumulate_grad_batches=3).fit(whole, data())
    run = trainer(tmp_path, accumulate_grad_batches=3, max_epochs=None, max_steps=3)
    run.fit(stopped, data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    trainer(tmp_path, accumulate_grad_batches=3).fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt")
    # Lightning takes the epoch that max_steps ended for its first, and the rest of it for its second.
    assert stopped.seen["train"] + resumed.seen["train"] == whole.seen["train"][:13]
    assert stopped.losses + resumed.losses == whole.losses[:13]


def test_the_choice_of_an_order_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = MemoryDataModule(train=[100, 10], batch_size=8)
    caplog.set_level("INFO", "lightning.pytorch")
    trainer(tmp_path, reload_dataloaders_every_n_epochs=1).fit(Recorder(), data)
    said = [record.message for record in caplog.records if "shuffle='auto'" in record.message]
    assert said == [
        "shuffle='auto' chose 'block': rows decode in 10 blocks that do not fit in three eighths of the cache of 0 MiB"
        "; rows mix inside windows of 30 rows"
    ]


def test_rows_come_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(100) % 10 == 0)
    data = MemoryDataModule(train="100", rows=tmp_path / "rows.npy", shuffle="none")
    assert flat([batch["x"].tolist() for batch in data.train_dataloader()]) == list(range(0, 100, 10))
    assert data.hparams["rows"] == str(tmp_path / "rows.npy")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_checkpoint_inside_a_step_or_after_its_exception_keeps_the_batch(tmp_path: Path, num_workers: int) -> None:
    class SavesInside(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(self.seen["train"]) == 8:
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")
            return super().training_step(batch, batch_idx)

    def data() -> MemoryDataModule:
        return MemoryDataModule(train="100", batch_size=8, shuffle="global", num_workers=num_workers)

    whole = Recorder()
    trainer(tmp_path).fit(whole, data())
    failed = SavesInside()
    failed.fail_at = 9

    class Keep(Callback):
        def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with pytest.raises(RuntimeError, match="the step fails"):
        trainer(tmp_path, callbacks=[Keep()]).fit(failed, data())
    for name, done in (("inside", 8), ("failed", 9)):
        resumed = Recorder()
        trainer(tmp_path).fit(resumed, data(), ckpt_path=tmp_path / f"{name}.ckpt")
        assert resumed.seen["train"] == whole.seen["train"][done:]


def test_resume_after_an_exception_in_the_step(tmp_path: Path) -> None:
    def data() -> MemoryDataModule:
        return MemoryDataModule(train="100", batch_size=8, shuffle="global", num_workers=2)

    failed, resumed, whole = Recorder(), Recorder(), Recorder()
    failed.fail_at = 9
    saver = SaveAt(tmp_path / "a.ckpt", "on_train_batch_end", 9)
    with pytest.raises(RuntimeError, match="the step fails"):
        trainer(tmp_path, callbacks=[saver]).fit(failed, data())
    trainer(tmp_path).fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt")
    trainer(tmp_path).fit(whole, data())
    assert resumed.seen["train"] == whole.seen["train"][9:]
    assert [thread for thread in threading.enumerate() if thread.name.startswith("fastio")] == []


def test_another_split_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=1)
    run.fit(Recorder(), MemoryDataModule(train="100", val_split=0.2))
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = {"train": "100", "val_split": 0.2, "split_seed": 1}
    with pytest.raises(
        ResumeError, match=r"split \[val 0.2, .*, seed 0: \w+\], but now it is \[val 0.2, .*, seed 1: \w+\]"
    ):
        trainer(tmp_path).fit(Recorder(), MemoryDataModule(**other), ckpt_path=tmp_path / "a.ckpt")
    trainer(tmp_path).fit(Recorder(), MemoryDataModule(**other, allow_changed_data=True), ckpt_path=tmp_path / "a.ckpt")


def test_own_data_is_tested_with_the_checkpoint_of_any_split(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=1)
    run.fit(Recorder(), MemoryDataModule(train="100", val_split=0.2))
    run.save_checkpoint(tmp_path / "a.ckpt")
    model = Recorder()
    trainer(tmp_path).test(model, MemoryDataModule(test="10"), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert flat(model.seen["test"]) == list(range(10))
    other = MemoryDataModule(train="100", test_split=0.2)
    with pytest.raises(ResumeError, match="was written with the split"):
        trainer(tmp_path).test(Recorder(), other, ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_another_loader_of_the_same_stage_does_not_end_the_first(tmp_path: Path) -> None:
    class Peek(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            next(iter(trainer.datamodule.train_dataloader()))  # type: ignore[attr-defined]

    model = Recorder()
    trainer(tmp_path, max_epochs=1, callbacks=[Peek()]).fit(model, MemoryDataModule(train="100", batch_size=8))
    assert sorted(flat(model.seen["train"])) == list(range(100))


def test_hyperparameters_are_primitives_and_rebuild_the_module(tmp_path: Path) -> None:
    data = MemoryDataModule(train=[100, 10], batch_size=16, transform=lambda batch: batch, rows=np.arange(50))
    assert data.hparams["train"] == [100, 10]
    assert "transform" not in data.hparams
    assert "rows" not in data.hparams
    run = trainer(tmp_path, max_epochs=1)
    run.fit(Recorder(), data)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = MemoryDataModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.batch_size == 16
    assert MemoryDataModule(train=Path("a/b")).hparams["train"] == "a/b"


@pytest.mark.parametrize("overfit", [2, 0.5])
def test_overfit_batches_repeats_the_same_rows(tmp_path: Path, overfit: float) -> None:
    model = Recorder()
    trainer(tmp_path, overfit_batches=overfit).fit(model, MemoryDataModule(train="32", batch_size=8))
    assert model.seen["train"] == [list(range(8)), list(range(8, 16))] * 2


def test_limits_start_each_epoch_anew(tmp_path: Path) -> None:
    model = Recorder()
    data = MemoryDataModule(train="48", val="32", batch_size=8, shuffle="none")
    trainer(tmp_path, limit_train_batches=2, limit_val_batches=1, max_epochs=3).fit(model, data)
    assert model.seen["train"] == [list(range(8)), list(range(8, 16))] * 3
    assert model.seen["val"] == [list(range(8))] * 3


def test_reloading_loaders_leaves_nothing_behind(tmp_path: Path) -> None:
    counts = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))

    model = Recorder()
    data = MemoryDataModule(train="48", batch_size=8, shuffle="global", num_workers=2)
    trainer(tmp_path, reload_dataloaders_every_n_epochs=1, max_epochs=5, callbacks=[Count()]).fit(model, data)
    assert counts[0] == counts[-1]
    epochs = [model.seen["train"][start : start + 6] for start in range(0, 30, 6)]
    assert all(sorted(flat(epoch)) == list(range(48)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 5


def test_predictions_are_written_with_their_rows(tmp_path: Path) -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.found: list[tuple[list[int], list[int]]] = []
            self.epoch: Any = None

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any
        ) -> None:
            self.found.append((prediction.tolist(), list(batch_indices)))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.epoch = batch_indices

    writer = Writer()
    data = MemoryDataModule(predict="20", batch_size=8)
    trainer(tmp_path, callbacks=[writer]).predict(Recorder(), data)
    assert [rows for rows, _ in writer.found] == [rows for _, rows in writer.found] == writer.epoch[0]
    assert flat(writer.epoch[0]) == list(range(20))


def test_lightnings_tuners_work(tmp_path: Path) -> None:
    data = MemoryDataModule(train="64", val="8", batch_size=2, num_workers=2)
    tuner = Tuner(trainer(tmp_path, max_epochs=1))
    found_size = tuner.scale_batch_size(Recorder(), datamodule=data, max_trials=3, steps_per_trial=1)
    assert found_size == data.batch_size
    assert found_size in (8, 16), "Lightning 2.4 counts trials differently"
    found = tuner.lr_find(Recorder(), datamodule=data, num_training=5, early_stop_threshold=None)
    assert len(found.results["lr"]) >= 4


def test_a_loader_without_a_data_module(tmp_path: Path) -> None:
    model = Recorder()
    train = BatchLoader(counting_reader(40), 8, shuffle="global")
    val = [BatchLoader(counting_reader(16), 8), BatchLoader(counting_reader(8), 8)]
    trainer(tmp_path).fit(model, train, val)
    assert sorted(flat(model.seen["train"][:5])) == list(range(40))
    assert model.seen["train"][:5] != model.seen["train"][5:]
    assert model.seen["val"] == [list(range(8)), list(range(8, 16)), list(range(8))] * 2


@pytest.mark.skipif(lightning.__version__ < "2.5", reason="Lightning 2.4 itself resumes one batch early")
def test_combined_loaders_resume_together(tmp_path: Path) -> None:
    class Pairs(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen["train"].append(batch["a"]["x"].tolist() + [-row for row in batch["b"]["x"].tolist()])
            return self.weight.sum()

    def loaders() -> CombinedLoader:
        return CombinedLoader(
            {
                "a": BatchLoader(counting_reader(40), 8, shuffle="global"),
                "b": BatchLoader(counting_reader(20), 8, shuffle="global", seed=1),
            },
            "max_size_cycle",
        )

    whole, resumed = Pairs(), Pairs()
    trainer(tmp_path, callbacks=[SaveAt(tmp_path / "a.ckpt", "on_train_batch_end", 4)]).fit(whole, loaders())
    trainer(tmp_path).fit(resumed, loaders(), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.seen["train"] == whole.seen["train"][4:]


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_states_inside_a_step_of_loaders_of_different_lengths(tmp_path: Path, mode: Any) -> None:
    class Pairs(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(self.seen["train"]) == 6 and self.fail_at is not None:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")
            pair = [None if part is None else part["x"].tolist() for part in batch]
            self.seen["train"].append(pair)  # type: ignore[arg-type]
            return self.weight.sum()

    class Loaders(FastIODataModule):
        def open_reader(self, source: Any) -> MemoryReader:
            return counting_reader(10)

        def train_dataloader(self) -> Any:
            short = BatchLoader(counting_reader(6), 2, shuffle="global", seed=1)
            short.on_epoch = super().train_dataloader().on_epoch
            return CombinedLoader([short, BatchLoader(counting_reader(20), 2)], mode)

    def data() -> FastIODataModule:
        return Loaders(train="x")

    whole, resumed = Pairs(), Pairs()
    whole.fail_at = -1
    trainer(tmp_path, max_epochs=1).fit(whole, data())
    trainer(tmp_path, max_epochs=1).fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.seen["train"] == whole.seen["train"][6:]


def test_an_exception_in_a_step_leaves_nothing_running(tmp_path: Path) -> None:
    model = Recorder()
    model.fail_at = 2
    data = MemoryDataModule(train="100", batch_size=8, num_workers=3)
    with pytest.raises(RuntimeError, match="the step fails"):
        trainer(tmp_path).fit(model, data)
    data.teardown("fit")
    assert [thread for thread in threading.enumerate() if thread.name.startswith("fastio")] == []


def test_weights_and_rows_of_a_field() -> None:
    class Labelled(MemoryDataModule):
        def open_reader(self, source: Any) -> MemoryReader:
            return MemoryReader({"x": np.arange(100), "label": (np.arange(100) >= 90).astype(np.int64)})

    data = Labelled(train="-", batch_size=50, weights="balanced", seed=1)
    rows = np.array([flat([batch["x"].tolist() for batch in data.train_dataloader()]) for _ in range(20)])
    assert 0.45 < (rows >= 90).mean() < 0.55
    by_field = Labelled(train="-", weights="label").train_dataloader()
    assert min(flat([batch["x"].tolist() for batch in by_field])) >= 90
    by_array = Labelled(train="-", weights=(np.arange(100) < 5).astype(float)).train_dataloader()
    assert max(flat([batch["x"].tolist() for batch in by_array])) < 5
    assert set(flat([batch["x"].tolist() for batch in Labelled(train="-", rows=[3, 95]).train_dataloader()])) == {3, 95}
    split = Labelled(train="-", val_split=0.2, stratify_by="label")
    val = flat([batch["label"].tolist() for batch in split.val_dataloader()])
    assert (len(val), sum(val)) == (20, 2)
    grouped = Labelled(train="-", val_split=0.1, split_by="label")
    assert {row >= 90 for row in flat([batch["x"].tolist() for batch in grouped.val_dataloader()])} == {True}
    assert len(flat([batch["x"].tolist() for batch in Labelled(train="-", max_rows=7).train_dataloader()])) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "10", "val": "10", "val_split": 0.1}, "both given"),
        ({"val_split": 0.1}, "give train="),
        ({"train": "10", "split_by": "x"}, "give val_split="),
    ],
)
def test_contradictions_are_found_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryDataModule(**settings)


def test_a_stage_without_data_looks_undefined_to_lightning(tmp_path: Path) -> None:
    data = MemoryDataModule(val="10")
    with pytest.raises(MisconfigurationException, match="train_dataloader"):
        trainer(tmp_path).fit(Recorder(), data)
    trainer(tmp_path).validate(Recorder(), data, verbose=False)


def test_public_arguments_are_documented() -> None:
    text = FastIODataModule.__init__.__doc__ or ""
    for name in list(inspect.signature(FastIODataModule.__init__).parameters)[1:]:
        assert f"            {name}: " in text, name
