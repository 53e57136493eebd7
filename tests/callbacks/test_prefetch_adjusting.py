"""Reader threads of a BatchLoader are adjusted while training; the batches stay the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_fastio.adjusting import WorkerAdjuster
from lightning_fastio.callbacks import PrefetchCallback, loader_facts, prefetch
from lightning_fastio.callbacks.loader_facts import adjuster_of, facts_of
from lightning_fastio.formats import open_reader
from lightning_fastio.loader import BatchLoader
from tests.callbacks.traced_runs import QUIET, Net, Scenario, assert_same, load, run_traced
from tests.memory import MemoryReader, counting_reader

pytestmark = QUIET


def make_loader(**options: Any) -> BatchLoader:
    return BatchLoader(counting_reader(160), 4, shuffle="global", **options)


class Sums(Net):
    """Trains on the batches of `counting_reader`."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch["x"].float().reshape(-1, 1).expand(-1, 4)
        return super().training_step(x / 1e3, batch_idx)


def test_the_threads_follow_and_the_batches_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(trainer: Trainer, net: Net) -> None:
        loaders.append(make_loader())
        trainer.fit(net, loaders[-1])

    loaders: list[BatchLoader] = []
    scenario = Scenario(fit, net=Sums)
    stock, _ = run_traced(scenario, tmp_path, [])
    plan = {10: 4, 20: 1, 30: 3}
    num_steps = 0

    def add(self: WorkerAdjuster, wait_s: float, step_s: float, busy_s: float) -> str | None:
        nonlocal num_steps
        num_steps += 1
        assert step_s > wait_s >= 0
        assert busy_s > 0
        if num_steps not in plan:
            return None
        self.num_workers = plan[num_steps]
        return f"now {self.num_workers}"

    monkeypatch.setattr(WorkerAdjuster, "add", add)
    with caplog.at_level(logging.INFO, "lightning_fastio"):
        ahead, _ = run_traced(scenario, tmp_path, [PrefetchCallback(summary=False)])
    assert_same(stock, ahead)
    assert [record.message for record in caplog.records if record.message.startswith("now")] == [
        "now 4",
        "now 1",
        "now 3",
    ]
    assert loaders[1].num_workers == 3


def test_only_a_number_that_was_left_open_is_adjusted() -> None:
    assert adjuster_of([make_loader()], max_workers=8) is not None
    assert adjuster_of([make_loader(num_workers=2)], max_workers=8) is None
    assert adjuster_of([make_loader(worker_type="process")], max_workers=8) is None
    assert adjuster_of([make_loader(), make_loader()], max_workers=8) is None
    assert adjuster_of([load(3)], max_workers=8) is None


def test_cpus_and_memory_bound_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader()
    ahead_bytes = loader.prefetch_factor * loader.batch_size * loader.reader.schema.row_bytes
    monkeypatch.setattr(loader_facts, "memory_allowance", lambda: 4 * 3 * ahead_bytes)
    adjuster = adjuster_of([loader], max_workers=8)
    assert adjuster is not None
    assert adjuster.max_workers == 3
    monkeypatch.setattr(loader_facts, "memory_allowance", lambda: None)
    adjuster = adjuster_of([loader], max_workers=8)
    assert adjuster is not None
    assert adjuster.max_workers == 8


def test_ranks_of_a_machine_share_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def note(loaders: Any, *, max_workers: int) -> None:
        limits.append(max_workers)

    monkeypatch.setattr(prefetch, "adjuster_of", note)
    monkeypatch.setattr(prefetch, "cpu_allowance", lambda: 9.5)
    monkeypatch.setattr(Trainer, "num_devices", 4)
    run_traced(Scenario(lambda trainer, net: trainer.fit(net, load(3))), tmp_path, [PrefetchCallback(summary=False)])
    assert limits == [2]


def test_facts_of_loaders() -> None:
    reader = MemoryReader(counting_reader(8).columns)
    facts = facts_of([BatchLoader(reader, 2, num_workers=3)], max_workers=5)
    assert (facts.name, facts.num_workers, facts.worker_type, facts.measures_itself, facts.max_workers) == (
        "BatchLoader",
        3,
        "thread",
        True,
        5,
    )
    assert facts.slow_layout == ""
    facts = facts_of([load(2)], max_workers=5)
    assert (facts.name, facts.num_workers, facts.worker_type, facts.measures_itself) == (
        "DataLoader",
        0,
        "process",
        False,
    )
    assert facts_of([iter([])], max_workers=5).num_workers is None


def test_the_field_that_could_be_stored_better_is_named(tmp_path: Path) -> None:
    columns = {"label": pa.array([1.5, 2.5]), "image": pa.array([[1.0, 2.0], [3.0, 4.0]])}
    pq.write_table(pa.table(columns), tmp_path / "lists.parquet")
    facts = facts_of([BatchLoader(open_reader(tmp_path / "lists.parquet"), 2)], max_workers=1)
    assert facts.slow_layout.startswith("Field 'image': lists decode value by value; fastio convert")
