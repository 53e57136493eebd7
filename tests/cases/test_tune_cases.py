"""What went wrong for others who tuned loaders by hand or by measuring, and what `tune` does about it."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_fastio import BatchLoader, NumpyDataModule, tune
from lightning_fastio.cli import main
from lightning_fastio.tuning import Tuning


def add_noise(batch: Any, rng: np.random.Generator) -> Any:
    batch["x"] = batch["x"] + torch.from_numpy(rng.random(batch["x"].shape, dtype=np.float32))
    return batch


@pytest.fixture
def rows(tmp_path: Path) -> str:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((200, 4), np.float32))
    return str(tmp_path / "x.npy")


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_d8_no_workers_take_options_of_workers(rows: str, tmp_path: Path, worker_type: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"train: {rows}\nnum_workers: 0\nprefetch_factor: 4\npersistent_workers: true\nworker_type: {worker_type}\n"
    )
    data = NumpyDataModule(**yaml.safe_load(config.read_text()))
    data.setup("fit")
    assert sum(len(batch["x"]) for batch in data.train_dataloader()) == 200
    assert tune(data, seconds=0.2).settings.num_workers >= 1
    data.teardown()


def test_d13_tuning_starts_no_cuda(rows: str) -> None:
    script = (
        "import sys, torch\n"
        "from lightning_fastio import NumpyDataModule, tune\n"
        "from lightning_fastio.bench import bench\n"
        "tune(NumpyDataModule(train=sys.argv[1]), seconds=0.5)\n"
        "bench(sys.argv[1], seconds=0.5)\n"
        "print(torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, rows], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "False"


def random_states() -> list[Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - users' code draws from it
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest]


def check_left_alone(data: NumpyDataModule, seconds: float) -> Tuning:
    """Tune, and see that everything is as it was before."""
    before = random_states()
    threads, open_files = set(threading.enumerate()), os.listdir("/proc/self/fd")
    torch_threads, files_mapped = torch.get_num_threads(), Path("/proc/self/maps").read_text().count("x.npy")
    tuning = tune(data, seconds=seconds)
    assert random_states() == before
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) == threads
    assert torch.get_num_threads() == torch_threads
    assert data.trainer is None
    assert Path("/proc/self/maps").read_text().count("x.npy") == files_mapped
    if tuning.settings.worker_type == "thread":
        assert len(os.listdir("/proc/self/fd")) <= len(open_files) + 2  # Python's fork server, where processes ran.
    return tuning


def test_d16_tuning_leaves_everything_as_it_was(rows: str) -> None:
    data = NumpyDataModule(train=rows, batch_size=16)
    tuning = check_left_alone(data, seconds=0.5)
    data.setup("fit")
    loader = BatchLoader(data.stages.reader("train"), batch_size=16, **tuning.changes)
    assert sum(len(batch["x"]) for batch in loader) == 200
    data.teardown()


def test_d16_tuning_leaves_no_worker_processes(rows: str) -> None:
    data = NumpyDataModule(train=rows, batch_size=16, transform=add_noise)
    tuning = check_left_alone(data, seconds=8.0)
    assert {each.settings.worker_type for each in tuning.tried} == {"thread", "process"}


def test_d16_the_order_of_training_is_that_without_tuning(rows: str) -> None:
    def first_epoch(*, tuned: bool) -> list[list[float]]:
        data = NumpyDataModule(train=rows, batch_size=16, seed=3)
        if tuned:
            tune(data, seconds=0.5).apply(data)
        data.setup("fit")
        batches = [batch["x"].flatten().tolist() for batch in data.train_dataloader()]
        data.teardown()
        return batches

    assert first_epoch(tuned=True) == first_epoch(tuned=False)


def test_d16_an_error_in_a_transform_is_shown_and_leaves_nothing(rows: str) -> None:
    def broken(batch: Any) -> Any:
        raise KeyError("no such field")

    before = random_states()
    with pytest.raises(KeyError, match="no such field"):
        tune(NumpyDataModule(train=rows, transform=broken), seconds=0.5)
    assert random_states() == before
    assert multiprocessing.active_children() == []


def test_a_mistake_on_the_command_line_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", str(tmp_path / "nothing.npy")]) == 1
    assert "nothing.npy" in capsys.readouterr().err
