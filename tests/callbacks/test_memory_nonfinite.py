"""The first loss that is not finite is reported once, with its step, rows and fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_fastio.callbacks.memory import MemoryHygieneCallback, nonfinite
from lightning_fastio.callbacks.memory.batch_fields import describe_values, num_samples, tensors_of
from lightning_fastio.callbacks.memory.nonfinite import NonFiniteWatch, Place
from lightning_fastio.loader import BatchLoader
from tests.callbacks.small_runs import QUIET, Net, make_trainer
from tests.memory import MemoryReader

pytestmark = QUIET


def test_the_report_names_step_rows_and_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = np.arange(160, dtype=np.float32).reshape(20, 8)
    values[13, 2] = np.nan
    loader = BatchLoader(MemoryReader({"x": values}), batch_size=4, batch_as="tuple")
    make_trainer(tmp_path, [MemoryHygieneCallback()], limit_val_batches=0).fit(Net(), loader)
    (message,) = [record.message for record in caplog.records if record.name == "lightning_fastio"]
    assert message.splitlines() == [
        "the loss became nan in train batch 3 of epoch 0, at step 3 (32-true)",
        "  rows 12, 13, 14, 15",
        "  batch[0]: float32 (4, 8), 1 of 32 not finite, 96 to 127",
        "  The data itself is not finite in batch[0]: mend or mask these rows.",
    ]


def test_a_validation_loss_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Overflows(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": torch.tensor([1.0, float("-inf") if batch_idx == 1 else 2.0])}

    loader = BatchLoader(MemoryReader({"x": np.ones((20, 8), np.float32)}), batch_size=4, batch_as="tuple")
    make_trainer(tmp_path, [MemoryHygieneCallback()]).validate(Overflows(), loader, verbose=False)
    (message,) = [record.message for record in caplog.records if record.name == "lightning_fastio"]
    assert message.startswith("the loss became -inf in validate batch 1 of epoch 0, at step 0")


class SlowCopy:
    """A copy that arrives when the test says so."""

    arrived = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor

    @property
    def is_ready(self) -> bool:
        return SlowCopy.arrived

    def wait(self) -> None:
        SlowCopy.arrived = True


def watch_of(monkeypatch: pytest.MonkeyPatch) -> NonFiniteWatch:
    monkeypatch.setattr(nonfinite, "HostCopy", SlowCopy)
    monkeypatch.setattr(SlowCopy, "arrived", False)
    return NonFiniteWatch(lambda place: [7, 8], "16-mixed")


def place(step: int, size: int = 4) -> Place:
    return Place("train", 0, step, step, {"x": torch.ones(size)})


def test_a_late_loss_is_reported_at_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(monkeypatch)
    places = [place(step) for step in range(4)]
    for step, here in enumerate(places):
        watch.watch(torch.tensor(float("inf") if step == 2 else 1.0), here)
        assert watch.report() is None
    # The newest batch alone is kept for its description.
    assert [here.batch is None for here in places] == [True, True, True, False]
    SlowCopy.arrived = True
    report = watch.report()
    assert report is not None
    assert report.splitlines()[:2] == [
        "the loss became inf in train batch 2 of epoch 0, at step 2 (16-mixed)",
        "  rows 7, 8",
    ]
    assert "float16 ends at 65504" in report
    watch.watch(torch.tensor(float("nan")), place(5))
    assert watch.report() is None


def test_the_last_losses_are_waited_for_where_a_stage_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(monkeypatch)
    watch.watch(torch.tensor(float("nan")), place(7))
    assert watch.report() is None
    report = watch.report(wait=True)
    assert report is not None
    assert "at step 7" in report


def test_a_large_batch_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "HELD_BATCH_BYTES", 100)
    watch = watch_of(monkeypatch)
    small, large = place(0, size=25), place(1, size=26)
    watch.watch(torch.tensor(1.0), small)
    assert watch.report() is None
    assert small.batch is not None
    watch.watch(torch.tensor(1.0), large)
    assert watch.report() is None
    assert large.batch is None


@pytest.mark.parametrize("loss", [None, 3.0, {"a": 1}, torch.tensor(3)])
def test_what_is_no_loss_is_passed_over(loss: Any) -> None:
    watch = NonFiniteWatch(lambda place: None, "32-true")
    watch.watch(loss, place(0))
    assert watch.report() is None


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


def test_tensors_are_named_by_the_python_that_gets_them() -> None:
    batch = {"p": Pair(torch.zeros(2, 3), "a"), "list": [torch.zeros(1), None], 5: torch.zeros(4)}
    found = dict(tensors_of(batch))
    assert list(found) == ["batch['p'].image", "batch['list'][0]", "batch[5]"]
    for name, tensor in found.items():
        assert eval(name) is tensor
    assert num_samples(batch) == 2
    assert num_samples(["text"]) is None


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1, 5, 3]), "int64 (3,), 1 to 5"),
        (torch.tensor([True, False]), "bool (2,), False to True"),
        (torch.tensor([float("nan")] * 2), "float32 (2,), 2 of 2 not finite"),
        (torch.tensor([0.5, float("inf")], dtype=torch.float16), "float16 (2,), 1 of 2 not finite, 0.5 to 0.5"),
        (torch.empty(0, 3), "float32 (0, 3)"),
        (torch.eye(2).to_sparse(), "float32 (2, 2)"),
    ],
)
def test_values_are_described(tensor: torch.Tensor, expected: str) -> None:
    assert describe_values(tensor) == expected
