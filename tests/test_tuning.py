"""`tune`: the search on simulated machines whose best settings are known, steps that run out of memory, real runs."""

from __future__ import annotations

import io
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from lightning_fastio import (
    FastIODataModule,
    HDF5DataModule,
    MemoryHygieneCallback,
    NumpyDataModule,
    open_writer,
    tune,
)
from lightning_fastio.cli import main
from lightning_fastio.errors import ConfigError
from lightning_fastio.tuning import Settings, Tuning
from lightning_fastio.tuning.race import Race
from lightning_fastio.tuning.ranks import Ranks
from lightning_fastio.tuning.search import Finding, Measurement, Search
from lightning_fastio.tuning.settings import Space
from lightning_fastio.tuning.step import Step, StepProbe, doublings

START = Settings(batch_size=64, num_workers=4, cache_bytes=1 << 20)


def alone(number: float) -> float:
    return number


@dataclass
class SimulatedMachine:
    """A probe whose true rates are known: it adds what disturbs a real machine, and moves a clock of its own.

    Measurements scatter by 5 %, one in ten is disturbed by another job, and the whole machine gets slower and faster
    again by a tenth over a minute.
    """

    true_rate: Callable[[Settings], float]
    rng: random.Random
    now: float = 0.0
    probed: list[Settings] = field(default_factory=list)
    started: set[Settings] = field(default_factory=set)

    def __call__(self, settings: Settings) -> Measurement:
        if settings not in self.started:
            self.now += 2.0 if settings.worker_type == "process" else 0.05
            self.started.add(settings)
        self.now += 0.2
        self.probed.append(settings)
        rate = self.true_rate(settings) * math.exp(self.rng.gauss(0, 0.05)) * (1 + 0.1 * math.sin(self.now / 10))
        return Measurement(rate * (self.rng.uniform(0.4, 0.9) if self.rng.random() < 0.1 else 1.0))

    def release(self) -> None:
        self.started.clear()

    def search(self, space: Space, *, seconds: float = 60.0, needed: float | None = None) -> Finding:
        search = Search(self, clock=lambda: self.now, ends_at=seconds, agree=alone, needed_rows_per_s=needed)
        return search.run(START, space)


def reads_in_parallel(limit: int) -> Callable[[Settings], float]:
    """Storage that serves a number of readers at the same time, whatever they are."""
    return lambda each: 1000.0 * min(each.num_workers, limit)


def holds_the_gil(each: Settings) -> float:
    """A transform in Python: threads take turns, processes do not."""
    return 1000.0 if each.worker_type == "thread" else 900.0 * each.num_workers


def wants_queues(each: Settings) -> float:
    """Storage with long pauses, that four batches for each of two threads bridge."""
    return 1000.0 * min(each.num_workers, 2) * (1.0 if each.prefetch_factor >= 4 else 0.75)


def decodes_again(each: Settings) -> float:
    """Blocks that are decoded more than once unless the cache has four times the size."""
    return 1000.0 * min(4, each.cache_bytes >> 20) * (1 if each.num_workers > 1 else 0.6)


def copies_faster_when_pinned(each: Settings) -> float:
    return 1000.0 * (1.5 if each.pin_memory else 1.0)


@pytest.mark.parametrize(
    ("true_rate", "space", "best"),
    [
        *(
            (reads_in_parallel(limit), Space(cpus=8, tries_processes=False), {"num_workers": limit})
            for limit in (1, 2, 4, 8, 16)
        ),
        (reads_in_parallel(4), Space(cpus=8, tries_processes=True), {"num_workers": 4, "worker_type": "thread"}),
        (holds_the_gil, Space(cpus=4, tries_processes=True), {"num_workers": 4, "worker_type": "process"}),
        (wants_queues, Space(cpus=2, tries_processes=False), {"num_workers": 2, "prefetch_factor": 4}),
        (
            decodes_again,
            Space(cpus=2, tries_processes=False, max_cache_bytes=1 << 30),
            {"num_workers": 2, "cache_bytes": 4 << 20},
        ),
        (copies_faster_when_pinned, Space(cpus=2, tries_processes=False, to_cuda=True), {"pin_memory": True}),
    ],
    ids=["1", "2", "4", "8", "16", "with transform", "gil", "prefetch", "cache", "pinned"],
)
def test_known_best_settings_are_found(
    true_rate: Callable[[Settings], float], space: Space, best: dict[str, Any]
) -> None:
    found = 0
    for seed in range(20):
        finding = SimulatedMachine(true_rate, random.Random(seed)).search(space)
        expected = {"num_workers": 1, "worker_type": "thread", "prefetch_factor": 2, "pin_memory": False} | best
        found += all(getattr(finding.settings, name) == value for name, value in expected.items())
    assert found >= 19


def test_time_is_kept() -> None:
    for seconds in (1.0, 5.0, 20.0):
        machine = SimulatedMachine(holds_the_gil, random.Random(0))
        finding = machine.search(Space(cpus=16, tries_processes=True), seconds=seconds)
        assert machine.now <= seconds + 0.2  # One measurement that had begun.
        assert finding.settings in machine.probed


def test_search_stops_as_soon_as_the_step_has_enough() -> None:
    machine = SimulatedMachine(reads_in_parallel(8), random.Random(1))
    finding = machine.search(Space(cpus=8, tries_processes=True), needed=1300.0)
    assert finding.is_enough
    assert finding.settings.num_workers == 2
    assert {each.num_workers for each in machine.probed} == {1, 2}
    assert finding.decided == ("num_workers", "worker_type")


def test_search_goes_on_where_the_step_needs_more_than_there_is() -> None:
    finding = SimulatedMachine(reads_in_parallel(4), random.Random(1)).search(
        Space(cpus=4, tries_processes=False), needed=1e6
    )
    assert not finding.is_enough
    assert finding.settings.num_workers == 4


def test_clearly_worse_settings_are_dropped() -> None:
    rates = {"a": 100.0, "b": 10.0, "c": 60.0, "d": 100.0}
    asked: list[str] = []

    def measure(name: str) -> float:
        asked.append(name)
        return rates[name]

    race = Race(list("cbda"), measure, is_over=lambda: False)
    assert race.run().setting == "d"
    assert asked.count("b") == 1
    assert asked.count("c") == 2
    assert asked.count("a") == asked.count("d") == 7
    assert [runner.is_out for runner in race.runners] == [True, True, False, False]


def test_settings_that_cannot_run_are_left_out() -> None:
    def probe(settings: Settings) -> float:
        if settings.worker_type == "process":
            raise ConfigError("a lambda cannot be sent to a process")
        return 1000.0

    finding = SimulatedMachine(probe, random.Random(0)).search(Space(cpus=2, tries_processes=True))
    assert finding.settings.worker_type == "thread"
    obstacles = [each.obstacle for each in finding.tried if each.settings.worker_type == "process"]
    assert obstacles == ["a lambda cannot be sent to a process"] * 2


def test_nothing_that_can_run_is_an_error() -> None:
    def probe(settings: Settings) -> float:
        raise ConfigError("the transform returned None")

    with pytest.raises(ConfigError, match="no setting of the loader can run: the transform returned None"):
        SimulatedMachine(probe, random.Random(0)).search(Space(cpus=1, tries_processes=False))


@pytest.mark.parametrize(
    ("space", "workers"),
    [
        (Space(cpus=1, tries_processes=False), ["1 thread", "2 threads", "4 threads"]),
        (Space(cpus=0.5, tries_processes=True), ["1 thread", "2 threads", "4 threads", "1 process"]),
        (
            Space(cpus=3, tries_processes=True),
            ["1 thread", "2 threads", "4 threads", "6 threads", "1 process", "2 processes", "3 processes"],
        ),
        (Space(cpus=128, tries_processes=False), ["1 thread", "2 threads", "4 threads", "8 threads", "16 threads"]),
    ],
)
def test_threads_come_before_processes_and_few_before_many(space: Space, workers: list[str]) -> None:
    choice = next(space.choices(START))
    candidates = choice.candidates(replace(START, cache_bytes=0))
    assert [str(each) for each in candidates] == [f"{text} x 2" for text in workers]


def test_a_cache_never_shrinks() -> None:
    space = Space(cpus=1, tries_processes=False, max_cache_bytes=5 << 20)
    options = [choice.options for choice in space.choices(START) if "cache_bytes" in choice.names]
    assert options == [[{"cache_bytes": 1 << 20}, {"cache_bytes": 2 << 20}, {"cache_bytes": 4 << 20}]]


# The training step


class Net(LightningModule):
    """Counts its steps; runs out of memory with more than a number of rows."""

    def __init__(self, max_rows: int = 10**9) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.max_rows = max_rows
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(len(batch["x"]))
        if len(batch["x"]) > self.max_rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.log("loss", 0.0)
        return self.layer(batch["x"]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def data(tmp_path: Path) -> NumpyDataModule:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((200, 3), np.float32))
    return NumpyDataModule(train=str(tmp_path / "x.npy"), batch_size=16)


def step_probe(model: LightningModule, data: FastIODataModule) -> StepProbe:
    data.setup("fit")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    return StepProbe(model, data, trainer=trainer, step_s=0.01, depth=2, agree=alone)


def fixed_steps(probe: StepProbe, steps: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps take given times; returns the list of the batch sizes that will be measured."""
    asked: list[int] = []

    def fit(batch_size: int) -> float:
        asked.append(batch_size)
        if batch_size not in steps:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return steps[batch_size]

    monkeypatch.setattr(probe, "_fit", fit)
    return asked


@pytest.mark.filterwarnings("ignore:::lightning")
def test_a_step_is_measured_on_a_copy(data: NumpyDataModule) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = step_probe(model, data)(8)
    assert step.fits
    assert step.rows_per_s == 8 / step.step_s
    assert model.seen == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "train_dataloader" not in vars(data)


@pytest.mark.filterwarnings("ignore:::lightning")
def test_a_step_is_measured_in_the_precision_that_training_will_have(data: NumpyDataModule) -> None:
    dtypes = set()

    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            dtypes.add(self.layer(batch["x"]).dtype)
            return super().training_step(batch, batch_idx)

    data.setup("fit")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[MemoryHygieneCallback(precision="bf16-mixed")],
        logger=False,
        enable_checkpointing=False,
    )
    probe = StepProbe(Watched(), data, trainer=trainer, step_s=0.01, depth=2, agree=alone)
    assert probe(8).fits
    assert dtypes == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:::lightning")
def test_running_out_of_memory_is_an_answer(data: NumpyDataModule) -> None:
    probe = step_probe(Net(max_rows=32), data)
    step, steps = probe.find_batch_size([16, 32, 64, 128], lambda: False)
    assert [each.batch_size for each in steps] == [16, 32, 64]
    assert [each.fits for each in steps] == [True, True, False]
    assert step.batch_size in (16, 32)


@pytest.mark.filterwarnings("ignore:::lightning")
def test_other_errors_of_a_step_are_errors(data: NumpyDataModule) -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        step_probe(Broken(), data)(8)
    assert "train_dataloader" not in vars(data)


def test_the_smallest_batch_size_as_fast_as_the_fastest(data: NumpyDataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = step_probe(Net(), data)
    # Rows per second: 800, 1600, 3100, 3200, then out of memory.
    asked = fixed_steps(probe, {8: 0.01, 16: 0.01, 32: 32 / 3100, 64: 0.02}, monkeypatch)
    step, steps = probe.find_batch_size([8, 16, 32, 64, 128, 256], lambda: False)
    assert step.batch_size == 32
    assert asked == [8, 16, 32, 64, 128]
    assert steps[-1] == Step(128, 0.0)


def test_larger_batches_are_not_tried_once_they_bring_nothing(
    data: NumpyDataModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = step_probe(Net(), data)
    asked = fixed_steps(probe, {size: size / 1000 for size in (8, 16, 32, 64, 128)}, monkeypatch)
    step, _ = probe.find_batch_size([8, 16, 32, 64, 128], lambda: False)
    assert (step.batch_size, asked) == (8, [8, 16, 32])


def test_a_batch_size_that_never_fits_is_an_error(data: NumpyDataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = step_probe(Net(), data)
    fixed_steps(probe, {}, monkeypatch)
    with pytest.raises(ConfigError, match="out of memory with batch_size=16 already"):
        probe.find_batch_size([16, 32], lambda: False)


def test_batch_sizes_go_up_to_a_quarter_of_the_rows() -> None:
    assert doublings(64, 1000) == [8, 16, 32, 64, 128]
    assert doublings(4, 40) == [4, 8]
    assert doublings(64, 80) == [8, 16, 32, 64]


# Several ranks

RANK_SCRIPT = """
import json, sys
import numpy as np
import torch.distributed as dist
from lightning_fastio import NumpyDataModule, tune
from tests.test_tuning import Net

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
tuning = tune(NumpyDataModule(train=f"{folder}/x.npy", batch_size=16), Net(), seconds=1.0, batch_sizes=[8, 16])
result = tuning.as_dict()
json.dump([result["settings"], result["rows_per_s"], result["step"]], open(f"{folder}/rank{rank}.json", "w"))
dist.destroy_process_group()
"""


def test_all_ranks_come_to_one_decision(data: NumpyDataModule, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT, str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=100)
        assert run.returncode == 0, errors[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second


# All of it


@pytest.mark.filterwarnings("ignore:::lightning")
def test_tune_with_a_model(data: NumpyDataModule) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    tuning = tune(data, Net(), trainer=trainer, seconds=1.0, batch_sizes=[8, 16])
    assert tuning.step is not None
    assert tuning.step.batch_size in (8, 16)
    assert tuning.headroom == tuning.rows_per_s / tuning.step.rows_per_s
    assert set(tuning.changes) >= {"batch_size", "num_workers", "worker_type"}

    tuning.apply(data)
    loader = data.train_dataloader()
    assert loader.batch_size == data.hparams["batch_size"] == tuning.step.batch_size
    assert loader.num_workers == tuning.settings.num_workers
    assert sum(len(batch["x"]) for batch in loader) == 200
    data.teardown()

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tuning.report())
    assert f"{tuning.verdict}." in console.export_text()
    assert json.loads(json.dumps(tuning.as_dict()))["settings"] == tuning.changes


def test_the_cache_of_a_block_shuffle_is_tuned(tmp_path: Path) -> None:
    with open_writer(tmp_path / "rows.h5", compression="gzip", rows_per_block=100) as writer:
        writer.write({"x": np.random.default_rng(0).integers(0, 9, (4000, 64), np.uint8)})
    data = HDF5DataModule(train=str(tmp_path / "rows.h5"), batch_size=50, cache_bytes=32_000)
    tuning = tune(data, seconds=2.0)
    tried = {each.settings.cache_bytes for each in tuning.tried}
    assert tried == {32_000, 64_000, 128_000, 256_000}
    assert data.reader_options["cache_bytes"] == 32_000

    tuning.apply(data)
    data.setup("fit")
    assert data.stages.reader("train").cache_bytes == tuning.changes["cache_bytes"]
    assert sum(len(batch["x"]) for batch in data.train_dataloader()) == 4000
    data.teardown()


def test_the_verdict_says_who_waits_for_whom() -> None:
    def verdict(step_s: float) -> str:
        return Tuning(START, (), 6400.0, Step(64, step_s), [], [], []).verdict

    assert verdict(0.1) == (
        "The loader gives 6,400 rows/s with 4 threads x 2, cache 1 MiB, the step takes 640 (100 ms a batch): "
        "10 times what it needs"
    )
    assert verdict(0.011).endswith("just enough, so that a busy machine may make it wait")
    assert verdict(0.008).endswith("it waits for data 20% of the time")


def test_tune_refuses_what_it_cannot_do(data: NumpyDataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="takes a FastIODataModule, not int"):
        tune(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give model="):
        tune(data, batch_sizes="auto")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 ranks run this, but they cannot agree"):
        tune(data)


def test_one_rank_agrees_with_itself() -> None:
    assert Ranks().smallest(3.5) == 3.5
    assert Ranks().per_node == 1


def test_unknown_settings_are_refused(data: NumpyDataModule) -> None:
    with pytest.raises(ConfigError, match=r"\['workers'\]"):
        data.configure(workers=3)


@pytest.mark.filterwarnings("ignore:::lightning")
def test_tuned_yaml_is_taken_by_fit(
    data: NumpyDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net_of_tuning.py").write_text(
        "from tests.test_tuning import Net as Base\n\n\nclass Net(Base):\n    def __init__(self) -> None:\n"
        "        super().__init__()\n"
    )
    (tmp_path / "config.yaml").write_text(
        "model: net_of_tuning.Net\n"
        "data: {class_path: NumpyDataModule, init_args: {train: x.npy, batch_size: 16}}\n"
        "trainer: {accelerator: cpu, max_epochs: 1, logger: false, enable_checkpointing: false,\n"
        "          enable_progress_bar: false, enable_model_summary: false}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fastio"])
    assert main(["tune", "-c", "config.yaml", "--seconds", "1", "--json", "--", "--data.batch_size=8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["batch_size"] == 8
    assert found["settings"]["worker_type"] == "thread"
    assert main(["fit", "-c", "config.yaml", "-c", "tuned.yaml"]) == 0

    assert main(["tune", "-c", "config.yaml", "--seconds", "1", "--loader-only", "--output", "new/loader.yaml"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "without a model it is not known what the step needs" in out
    assert "Use it: fastio fit -c config.yaml -c new/loader.yaml" in out
    assert main(["tune", "-c", "config.yaml", "--batch-size", "big"]) == 1
    assert "--batch-size big: expected auto, keep, or sizes such as 64,128,256" in capsys.readouterr().err
    assert main(["tune", "-c", "config.yaml", "--", "--data=lightning.pytorch.demos.boring_classes.BoringDataModule"])
    assert "BoringDataModule has no settings to tune" in capsys.readouterr().err


_PROBES_PROCESSES = """
import sys
from multiprocessing import active_children, forkserver

import torch

from lightning_fastio import NumpyDataModule
from lightning_fastio.tuning.probe import LoaderProbe
from lightning_fastio.tuning.settings import Settings

if __name__ == "__main__":
    data = NumpyDataModule(train=sys.argv[1], batch_size=8, transform=torch.nn.Identity())
    data.setup("fit")
    probe = LoaderProbe(data, probe_s=0.05, device=torch.device("cpu"))
    assert probe(Settings(8, 1, "process")).rows_per_s > 0
    probe.release()
    assert active_children() == [] and forkserver._forkserver._forkserver_pid is None
    print("nothing left")
"""


def test_no_process_stays_behind_where_worker_processes_were_measured(tmp_path: Path) -> None:
    """In a program of its own, since other tests may have a fork server."""
    np.save(tmp_path / "x.npy", np.zeros((100, 2), np.float32))
    (tmp_path / "program.py").write_text(_PROBES_PROCESSES)
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "x.npy")]
    found = subprocess.run(program, capture_output=True, text=True, check=False)
    assert found.stdout == "nothing left\n", found.stderr
