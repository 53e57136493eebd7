"""What went wrong for others with prefetchers and batch hooks, and the right behaviour."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_fastio.callbacks import MemoryHygieneCallback, PrefetchCallback, prefetch
from lightning_fastio.staging import Stager, tensors_in
from tests.callbacks.traced_runs import QUIET, Net, Rows, Scenario, Trace, assert_same, load, run_traced, stream
from tests.recording_backend import RecordingBackend

pytestmark = QUIET

Point = namedtuple("Point", ["x", "label"])


class Movable:
    """A batch of a user's own kind."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.num_moves = 0

    def to(self, device: Any) -> Movable:
        self.values = self.values.to(device)
        self.num_moves += 1
        return self


class Bare(Net):
    def __init__(self) -> None:
        super().__init__(Trace())


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


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> RecordingBackend:
    double = RecordingBackend()
    monkeypatch.setattr(prefetch, "open_backend", lambda device: double)
    return double


def test_c1_every_tensor_of_a_nested_batch_is_recorded_on_the_stream_that_uses_it() -> None:
    backend = RecordingBackend("meta")
    batch = {"list": [torch.ones(1)], "tuple": (torch.ones(2),), "point": Point(torch.ones(3), "a"), "x": torch.ones(4)}
    moved = Stager(backend).stage(batch).ready()
    assert sorted(tensor.numel() for tensor in backend.recorded) == [1, 2, 3, 4]
    assert {id(tensor) for tensor in backend.recorded} == {id(tensor) for tensor in tensors_in(moved)}
    wait = backend.calls.index(("wait", 2, "compute"))
    assert all(call[0] != "record_stream" for call in backend.calls[:wait])


def test_c4_a_new_epoch_starts_clean_after_an_early_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    scenario = Scenario(lambda trainer, net: trainer.fit(net, load(6)), {"limit_train_batches": 2, "max_epochs": 3})
    trace, _ = run_traced(scenario, tmp_path, [PrefetchCallback(3, summary=False)])
    firsts = [event[2][0] for event in trace.events if event[0] == "training_step"]
    assert firsts == [0.0, 2.0] * 3
    assert set(threading.enumerate()) == before


def test_c5_no_leaf_becomes_none(backend: RecordingBackend) -> None:
    moved = Stager(backend).stage([torch.ones(1), (torch.ones(2), {"x": torch.ones(3)})]).ready()
    assert moved[0].tolist() == [1]
    assert moved[1][0].tolist() == [1, 1]
    assert moved[1][1]["x"].tolist() == [1, 1, 1]


def test_c6_batches_go_to_the_device_of_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(prefetch, "open_backend", devices.append)
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda:1"))
    PrefetchCallback().setup(trainer, Bare(), "fit")
    assert devices == [torch.device("cuda:1")]


def test_c7_a_source_is_kept_until_its_copy_is_done() -> None:
    backend = RecordingBackend("meta")
    stager = Stager(backend)
    source = Movable(torch.ones(8))
    held = weakref.ref(source)
    # The loader pinned it in its own way, which torch's allocator of pinned memory knows nothing of.
    stager.stage({"x": source}).ready()
    del source
    gc.collect()
    assert held() is not None
    backend.all_passed = True
    stager.stage(None)
    gc.collect()
    assert held() is None


def test_c8_batches_of_strings_none_and_objects(tmp_path: Path, backend: RecordingBackend) -> None:
    custom = [Movable(torch.full((4,), float(number))) for number in range(5)]
    seen: list[Any] = []

    def collate(rows: list[int]) -> dict[str, Any]:
        (row,) = rows
        return {
            "x": custom[row].values,
            "meta": ["a", "b"],
            "n": row,
            "none": None,
            "point": Point(torch.ones(2), "label"),
            "custom": custom[row],
        }

    class Takes(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch)
            return self.layer(batch["x"]).mean()

    trainer = quiet_trainer(tmp_path, PrefetchCallback(summary=False))
    trainer.fit(Takes(), DataLoader(range(5), collate_fn=collate))  # type: ignore[arg-type]
    assert [batch["n"] for batch in seen] == list(range(5))
    for number, batch in enumerate(seen):
        assert batch["x"].tolist() == [number] * 4
        assert (batch["meta"], batch["none"]) == (["a", "b"], None)
        assert isinstance(batch["point"], Point)
        assert batch["point"].label == "label"
        assert batch["custom"] is custom[number]
        assert custom[number].num_moves == 1


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_c9_batches_that_are_not_pinned_are_named_once(
    num_epochs: int, tmp_path: Path, backend: RecordingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(tmp_path, PrefetchCallback(summary=False), max_epochs=num_epochs)
    trainer.fit(Bare(), load(4))
    (notice,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert "pin_memory=True" in notice
    assert len(backend.pinned) == 4 * num_epochs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [load, stream])
def test_c10_and_l7_no_more_than_depth_and_one_batches_live(
    depth: int, make: Any, tmp_path: Path, backend: RecordingBackend
) -> None:
    batches: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Counts(Bare):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            copy = batch.clone()
            batches.append(weakref.ref(copy))
            return copy

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            backend.recorded.clear()
            alive.append(sum(reference() is not None for reference in batches))
            return self.layer(batch).mean()

    quiet_trainer(tmp_path, PrefetchCallback(depth, summary=False)).fit(Counts(), make(8))
    assert len(alive) == 8
    assert max(alive) <= depth + 1


def test_l5_after_hooks_run_once_and_other_values_stay(tmp_path: Path, backend: RecordingBackend) -> None:
    word = "the same object"
    seen: list[Any] = []

    class Adds(Bare):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "x": batch["x"] + 1}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch)
            return self.layer(batch["x"]).mean()

    def collate(rows: list[int]) -> dict[str, Any]:
        return {"x": torch.full((4,), float(rows[0])), "word": word, "custom": Movable(torch.ones(1))}

    trainer = quiet_trainer(tmp_path, PrefetchCallback(summary=False))
    trainer.fit(Adds(), DataLoader(range(5), collate_fn=collate))  # type: ignore[arg-type]
    assert [batch["x"][0].item() for batch in seen] == [1, 2, 3, 4, 5]
    assert all(batch["word"] is word for batch in seen)
    assert [batch["custom"].num_moves for batch in seen] == [1] * 5


def test_l8_loaders_of_several_lengths(tmp_path: Path) -> None:
    scenario = Scenario(lambda trainer, net: trainer.fit(net, {"long": load(3), "short": load(1, start=90)}))
    stock, _ = run_traced(scenario, tmp_path, [])
    ahead, _ = run_traced(scenario, tmp_path, [PrefetchCallback(summary=False)])
    assert_same(stock, ahead)


def test_l10_all_callbacks_without_a_logger_in_every_stage(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, MemoryHygieneCallback(), PrefetchCallback())
    net = Bare()
    trainer.fit(net, load(3), load(2))
    trainer.validate(net, load(2), verbose=False)
    trainer.test(net, load(2), verbose=False)
    assert len(trainer.predict(net, load(2)) or []) == 2


def test_l11_nothing_is_kept_after_validation_with_limits(tmp_path: Path) -> None:
    class Data(Rows):
        pass

    data = Data(40)
    held = weakref.ref(data)
    trainer = quiet_trainer(tmp_path, PrefetchCallback(3, summary=False), limit_val_batches=2)
    trainer.validate(Bare(), DataLoader(data, batch_size=2), verbose=False)
    del data, trainer
    gc.collect()
    assert held() is None


def test_l12_look_ahead_stops_at_the_limit(tmp_path: Path) -> None:
    rows: list[int] = []

    class Counted(Rows):
        def __getitem__(self, row: int) -> torch.Tensor:
            rows.append(row)
            return super().__getitem__(row)

    trainer = quiet_trainer(tmp_path, PrefetchCallback(4, summary=False), limit_train_batches=2)
    trainer.fit(Bare(), load(6, Counted))
    assert rows == [0, 1, 2, 3]
