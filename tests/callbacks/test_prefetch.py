"""PrefetchCallback: copies ahead, hooks, what it measures and logs, how it ends."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_fastio.callbacks import PrefetchCallback, prefetch
from lightning_fastio.datamodules import NumpyDataModule
from lightning_fastio.errors import ConfigError
from tests.callbacks.test_prefetch_same import SCENARIOS
from tests.callbacks.traced_runs import (
    QUIET,
    ListLogger,
    Net,
    NoisyRows,
    Rows,
    Scenario,
    Trace,
    assert_same,
    load,
    run_traced,
)
from tests.recording_backend import RecordingBackend

pytestmark = QUIET


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> RecordingBackend:
    """An accelerator in memory, in the place of the CPU."""
    double = RecordingBackend()
    monkeypatch.setattr(prefetch, "open_backend", lambda device: double)
    return double


def quiet_trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )


class Rowless(Net):
    """Keeps its trace to itself."""

    def __init__(self) -> None:
        super().__init__(Trace())


# Copies ahead


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_is_the_same_when_batches_are_copied_ahead(name: str, tmp_path: Path, backend: RecordingBackend) -> None:
    stock, _ = run_traced(SCENARIOS[name], tmp_path, [])
    ahead, trainer = run_traced(SCENARIOS[name], tmp_path, [PrefetchCallback(2, summary=False)])
    assert_same(stock, ahead)
    assert "batch_to_device" not in vars(trainer.strategy)


class TransferNet(Net):
    """Has the hooks that can be used together with copying ahead; notes where they run."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.transfers.append((int(batch.min()), dataloader_idx, threading.current_thread().name))
        return super().transfer_batch_to_device(batch * 2, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trace.note("on_after", self.trainer, dataloader_idx, threading.current_thread().name)
        return batch - 1

    def __init__(self, trace: Any) -> None:
        super().__init__(trace)
        self.transfers: list[tuple[int, int, str]] = []


def test_transfer_hooks_run_once_and_after_it_on_the_training_thread(tmp_path: Path, backend: RecordingBackend) -> None:
    nets: list[Any] = []

    def run(trainer: Trainer, net: Net) -> Any:
        nets.append(net)
        trainer.fit(net, load(4), [load(2, start=20), load(2, start=40)])
        return trainer.predict(net, load(3))

    scenario = Scenario(run, {"val_check_interval": 2, "num_sanity_val_steps": 1}, net=TransferNet)
    stock, _ = run_traced(scenario, tmp_path, [])
    ahead, _ = run_traced(scenario, tmp_path, [PrefetchCallback(2, summary=False)])
    assert_same(stock, ahead)
    expected, actual = (sorted(call[:2] for call in net.transfers) for net in nets)
    assert actual == expected
    assert {thread for _, _, thread in nets[1].transfers} == {"MainThread", "fastio-prefetch"}


def test_hooks_wrapped_on_the_instance_are_not_passed_over(tmp_path: Path, backend: RecordingBackend) -> None:
    batches = []

    def run(trainer: Trainer, net: Net) -> None:
        original = net.transfer_batch_to_device

        def timed(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            batches.append(int(batch.min()))
            return original(batch, device, dataloader_idx)

        net.transfer_batch_to_device = timed  # type: ignore[method-assign]
        trainer.fit(net, load(5))

    run_traced(Scenario(run, {"max_epochs": 1}), tmp_path, [PrefetchCallback(summary=False)])
    assert batches == [0, 2, 4, 6, 8]


def test_with_on_before_batch_transfer_nothing_is_copied_ahead(
    tmp_path: Path, backend: RecordingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    class BeforeNet(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    with caplog.at_level(logging.INFO, "lightning_fastio"):
        run_traced(
            Scenario(lambda trainer, net: trainer.fit(net, load(4)), net=BeforeNet), tmp_path, [PrefetchCallback()]
        )
    assert backend.calls == []
    assert "on_before_batch_transfer is overridden" in caplog.text


def test_hooks_of_a_data_module_are_used(tmp_path: Path, backend: RecordingBackend) -> None:
    class Data(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.moved: list[int] = []

        def train_dataloader(self) -> Any:
            return load(4)

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.moved.append(int(batch.min()))
            return batch + 1

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch * 10

    data = Data()
    scenario = Scenario(lambda trainer, net: trainer.fit(net, datamodule=data), {"max_epochs": 1})
    stock, _ = run_traced(scenario, tmp_path, [])
    ahead, _ = run_traced(scenario, tmp_path, [PrefetchCallback(summary=False)])
    assert_same(stock, ahead)
    assert data.moved == [0, 2, 4, 6] * 2


def test_precision_plugins_convert_what_is_copied_ahead(tmp_path: Path, backend: RecordingBackend) -> None:
    dtypes: list[torch.dtype] = []

    class DoubleNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            dtypes.append(batch.dtype)
            return super().training_step(batch, batch_idx)

    scenario = Scenario(
        lambda trainer, net: trainer.fit(net, load(4)), {"precision": "64-true", "max_epochs": 1}, net=DoubleNet
    )
    run_traced(scenario, tmp_path, [PrefetchCallback(summary=False)])
    assert dtypes == [torch.float64] * 4


def test_the_device_of_the_strategy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def open_double(device: torch.device) -> RecordingBackend:
        devices.append(device)
        return RecordingBackend()

    monkeypatch.setattr(prefetch, "open_backend", open_double)
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda:1"))
    callback = PrefetchCallback()
    callback.setup(trainer, Net(None), "fit")  # type: ignore[arg-type]
    assert devices == [torch.device("cuda:1")]


def test_the_host_never_waits_for_the_device(tmp_path: Path, backend: RecordingBackend) -> None:
    # The double has no way to synchronise, so any attempt would have been an AttributeError.
    callback = PrefetchCallback(summary=False)
    run_traced(SCENARIOS["all stages"], tmp_path, [callback])
    assert callback.waits["copy_wait_s"].tolist() == [0.0] * 6
    assert backend.bound
    assert set(backend.bound) == {"fastio-prefetch"}


def test_copy_times_belong_to_their_batches(tmp_path: Path, backend: RecordingBackend) -> None:
    backend.all_passed = True
    callback = PrefetchCallback(summary=False)
    run_traced(Scenario(lambda trainer, net: trainer.fit(net, load(6))), tmp_path, [callback])
    assert (callback.waits["copy_s"] > 0).all()
    assert (callback.waits["copy_wait_s"] > 0).all()


# Measurements


def test_waits_of_every_step_and_metrics_at_the_cadence_of_the_trainer(tmp_path: Path) -> None:
    callback = PrefetchCallback(summary=False)
    scenario = Scenario(
        lambda trainer, net: trainer.fit(net, load(5), load(2)), {"log_every_n_steps": 2, "num_sanity_val_steps": 1}
    )
    _, trainer = run_traced(scenario, tmp_path, [callback])
    waits = callback.waits
    assert waits["epoch"].tolist() == [0] * 5 + [1] * 5
    assert waits["step"].tolist() == list(range(1, 11))
    assert waits["is_first"].tolist() == ([True] + [False] * 4) * 2
    assert waits["num_rows"].tolist() == [2] * 10
    assert (waits["data_wait_s"] > 0).all()
    assert (waits["step_s"] > waits["data_wait_s"]).all()
    assert (waits["read_s"] > 0).all()
    evaluations = callback.wait_stats.evaluations
    assert {stage: entry.num_batches for stage, entry in evaluations.items()} == {"sanity check": 1, "validate": 4}
    logger = trainer.logger
    assert isinstance(logger, ListLogger)
    assert [step for step, _ in logger.fastio] == [1, 3, 5, 7, 9]
    first, second = logger.fastio[0][1], logger.fastio[1][1]
    assert first["fastio/first_batch_wait_s"] == waits["data_wait_s"][0]
    assert first["fastio/data_wait_s"] == waits["data_wait_s"][1]
    assert second["fastio/data_wait_s"] == pytest.approx(waits["data_wait_s"][2:4].mean())
    assert second["fastio/data_wait_max_s"] == waits["data_wait_s"][2:4].max()
    assert second["fastio/step_s"] == pytest.approx(waits["step_s"][2:4].mean())
    assert second["fastio/samples_per_s"] == pytest.approx(4 / waits["step_s"][2:4].sum())
    assert set(second) == {
        "fastio/data_wait_s",
        "fastio/data_wait_max_s",
        "fastio/data_wait_fraction",
        "fastio/copy_wait_s",
        "fastio/step_s",
        "fastio/read_s",
        "fastio/samples_per_s",
    }


def test_metrics_reach_a_real_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    run_traced(
        Scenario(lambda trainer, net: trainer.fit(net, load(4)), {"logger": logger}),
        tmp_path,
        [PrefetchCallback(summary=False)],
    )
    header = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0]
    assert "fastio/data_wait_s" in header
    assert "fastio/samples_per_s" in header


def test_the_summary_names_stages_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = PrefetchCallback()
    run_traced(Scenario(lambda trainer, net: trainer.fit(net, load(4), load(2))), tmp_path, [callback])
    text = capsys.readouterr().out
    assert "Data wait per batch" in text
    assert "validate" in text
    verdict = callback.verdict()
    assert verdict is not None
    assert verdict.bound in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_summary_is_printed_once_however_fit_ends(
    error: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ends(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    callback = PrefetchCallback()
    trainer = quiet_trainer(tmp_path, callback)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((SystemExit, ValueError)):
            trainer.fit(Ends(Trace()), load(5))
    finally:
        # Lightning leaves Ctrl-C switched off.
        signal.signal(signal.SIGINT, handler)
    text = capsys.readouterr().out
    assert len(callback.waits) == 3
    assert text.count("Data wait per batch") == 1
    verdict = callback.verdict()
    assert verdict is not None
    assert verdict.bound in text


class FailsToTest(Rowless):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        raise ValueError("test")


def test_an_error_outside_of_fit_prints_no_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(tmp_path, PrefetchCallback())
    trainer.fit(Rowless(), load(3))
    assert "Data wait per batch" in capsys.readouterr().out
    with pytest.raises(ValueError, match="test"):
        trainer.test(FailsToTest(), load(2), verbose=False)
    assert "Data wait per batch" not in capsys.readouterr().out


def test_a_new_fit_starts_new_waits_and_evaluation_adds_to_them(tmp_path: Path) -> None:
    callback = PrefetchCallback(summary=False)
    trainer, net = quiet_trainer(tmp_path, callback), Rowless()
    trainer.fit(net, load(3))
    trainer.test(net, load(2), verbose=False)
    assert len(callback.waits) == 3
    assert callback.wait_stats.evaluations["test"].num_batches == 2
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, load(4))
    assert len(callback.waits) == 4
    assert callback.wait_stats.evaluations == {}


# Random numbers


def test_a_dataset_that_draws_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scenario = Scenario(lambda trainer, net: trainer.fit(net, load(5, NoisyRows)))
    with caplog.at_level(logging.WARNING, "lightning_fastio"):
        run_traced(scenario, tmp_path, [PrefetchCallback(summary=False)])
    notices = [record.message for record in caplog.records if "draws random numbers" in record.message]
    assert len(notices) == 1
    assert "keep_randomness=False" in notices[0]


def test_without_keep_randomness_every_batch_is_fetched_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads: set[str] = set()

    class Where(Rows):
        def __getitem__(self, row: int) -> torch.Tensor:
            threads.add(threading.current_thread().name)
            return super().__getitem__(row) + torch.rand(1)

    scenario = Scenario(lambda trainer, net: trainer.fit(net, load(4, Where)))
    run_traced(scenario, tmp_path, [PrefetchCallback(keep_randomness=False, summary=False)])
    assert threads == {"fastio-prefetch"}
    assert "draws random numbers" not in caplog.text


# Ends


class Endless(IterableDataset[torch.Tensor]):
    """Stuck in its fourth row until the test lets it go on."""

    def __init__(self) -> None:
        self.is_stuck = threading.Event()
        self.let_go = threading.Event()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(4):
            if row == 3:
                self.is_stuck.set()
                self.let_go.wait()
            yield torch.full((4,), float(row))


def test_an_interrupt_does_not_wait_for_a_stuck_loader(tmp_path: Path) -> None:
    data = Endless()

    class Interrupts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                data.is_stuck.wait()
                os.kill(os.getpid(), signal.SIGINT)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(tmp_path, PrefetchCallback(2))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Interrupts(Trace()), DataLoader(data, batch_size=1))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "fastio-prefetch")
    data.let_go.set()
    thread.join()


def test_nothing_refers_to_batches_or_data_after_the_run(tmp_path: Path, backend: RecordingBackend) -> None:
    batches: list[weakref.ref[torch.Tensor]] = []

    class Watched(Rows):
        def __getitem__(self, row: int) -> torch.Tensor:
            sample = super().__getitem__(row)
            batches.append(weakref.ref(sample))
            return sample

    data = Watched(20)
    watched = weakref.ref(data)
    trainer = quiet_trainer(tmp_path, PrefetchCallback(3, summary=False), limit_train_batches=4)
    trainer.fit(Rowless(), DataLoader(data, batch_size=1))
    backend.recorded.clear()
    assert batches
    assert not any(batch() is not None for batch in batches)
    del data, trainer
    gc.collect()
    assert watched() is None


def test_look_ahead_stops_at_limits(tmp_path: Path) -> None:
    rows: list[int] = []

    class Counted(Rows):
        def __getitem__(self, row: int) -> torch.Tensor:
            rows.append(row)
            return super().__getitem__(row)

    scenario = Scenario(
        lambda trainer, net: trainer.fit(net, load(6, Counted)), {"limit_train_batches": 3, "max_epochs": 1}
    )
    run_traced(scenario, tmp_path, [PrefetchCallback(4, summary=False)])
    assert rows == [0, 1, 2, 3, 4, 5]


def test_several_trainers_in_one_process(tmp_path: Path) -> None:
    callbacks = [PrefetchCallback(summary=False) for _ in range(2)]
    nets = [Rowless(), Rowless()]
    trainers = [quiet_trainer(tmp_path, callback, max_epochs=2) for callback in callbacks]

    class Nested(Rowless):
        def on_train_epoch_end(self) -> None:
            trainers[1].fit_loop.max_epochs = (trainers[1].fit_loop.max_epochs or 0) + 1
            trainers[1].fit(nets[1], load(3))

    trainers[0].fit(Nested(), load(4))
    assert len(callbacks[0].waits) == 8
    assert callbacks[1].waits["epoch"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("inner", ["fit", "validate", "validate nothing"])
def test_a_trainer_inside_a_step_of_another_one_on_the_same_data(inner: str, ahead: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(64 * 4, dtype=np.float32).reshape(64, 4))
    np.save(tmp_path / "v.npy", np.arange(16 * 4, dtype=np.float32).reshape(16, 4))
    data = NumpyDataModule({"x": tmp_path / "x.npy"}, {"x": tmp_path / "v.npy"}, batch_size=8, num_workers=2)

    def make_trainer() -> Trainer:
        callbacks = [PrefetchCallback(summary=False)] if ahead else []
        limits = {"limit_val_batches": 0} if inner == "validate nothing" and nets else {}
        return quiet_trainer(tmp_path, *callbacks, max_epochs=2, num_sanity_val_steps=0, **limits)

    class Counts(Rowless):
        def __init__(self) -> None:
            super().__init__()
            self.num_rows = {"train": 0, "val": 0}
            nets.append(self)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.num_rows["train"] += len(batch["x"])
            return super().training_step(batch["x"], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.num_rows["val"] += len(batch["x"])

    class Outer(Counts):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2 and self.current_epoch == 0:
                run = getattr(make_trainer(), inner.split()[0])
                run(Counts(), datamodule=data, **({"verbose": False} if inner != "fit" else {}))
            return super().training_step(batch, batch_idx)

    nets: list[Counts] = []
    trainer = make_trainer()
    trainer.fit(Outer(), datamodule=data)
    inner_rows = {"fit": {"train": 128, "val": 32}, "validate": {"train": 0, "val": 16}}
    assert nets[0].num_rows == {"train": 128, "val": 32}
    assert nets[1].num_rows == inner_rows.get(inner, {"train": 0, "val": 0})
    assert not len(data._loaders)


# The object


def test_the_constructor_only_stores(tmp_path: Path) -> None:
    callback = PrefetchCallback(3, max_bytes=10, keep_randomness=False, summary=False)
    assert callback.state_dict() == {}
    assert callback.verdict() is None
    copy = pickle.loads(pickle.dumps(callback))
    assert (copy.depth, copy.max_bytes, copy.keep_randomness, copy.summary) == (3, 10, False, False)


@pytest.mark.parametrize(("options", "message"), [({"depth": 0}, "depth=0"), ({"max_bytes": -1}, "max_bytes=-1")])
def test_arguments_are_checked(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefetchCallback(**options)
