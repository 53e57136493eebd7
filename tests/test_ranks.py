"""Several gloo processes under a real Trainer, and runs that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def train(folder: Path, *arguments: Any, codes: tuple[int, ...] = (0,)) -> list[dict[str, list[list[int]]]]:
    """Run the script; what each rank saw."""
    for old in folder.glob("rank*.json"):
        old.unlink()
    command = [sys.executable, "-m", "tests.scripts.train_ranks", str(folder), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode in codes, run.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def epoch_rows(ranks: list[dict[str, list[list[int]]]], stage: str, start: int, stop: int | None) -> list[int]:
    return sorted(row for rank in ranks for row in flat(rank[stage][start:stop]))


@pytest.mark.parametrize(
    ("devices", "block", "extra"),
    [(2, 0, ["--no-distributed-sampler"]), (2, 10, ["--strategy", "ddp_spawn"]), (4, 0, ["--prefetch", "2"])],
)
def test_ranks_are_even_disjoint_and_complete(tmp_path: Path, devices: int, block: int, extra: list[str]) -> None:
    ranks = train(tmp_path, "--devices", devices, "--block", block, *extra)
    assert len(ranks) == devices
    lengths = {len(rank["train"]) for rank in ranks}
    assert len(lengths) == 1
    half = lengths.pop() // 2
    for start, stop in ((0, half), (half, None)):
        assert epoch_rows(ranks, "train", start, stop) == list(range(145))
    assert len({len(rank["val"]) for rank in ranks}) == 1
    assert epoch_rows(ranks, "val", 0, len(ranks[0]["val"]) // 2) == list(range(21))


@pytest.mark.parametrize("block", [0, 10])
def test_resume_with_another_number_of_ranks_sees_the_rest(tmp_path: Path, block: int) -> None:
    before = train(tmp_path, "--devices", 2, "--block", block, "--save-at", 6, "--epochs", 1)
    seen = epoch_rows(before, "train", 0, 6)
    after = train(tmp_path, "--devices", 1, "--batch-size", 10, "--block", block, "--resume", "--epochs", 1)
    assert sorted(seen + epoch_rows(after, "train", 0, None)) == list(range(145))


@pytest.mark.parametrize("prefetch", [[], ["--prefetch", "3"]])
def test_a_killed_run_goes_on_where_its_checkpoint_was(tmp_path: Path, prefetch: list[str]) -> None:
    train(tmp_path, "--save-at", 8, "--signal-at", 27, *prefetch, codes=(-signal.SIGKILL,))
    resumed = train(tmp_path, "--resume", *prefetch)[0]["train"]
    whole = train(tmp_path)[0]["train"]
    assert resumed == whole[24:]


def test_a_terminated_run_saves_and_goes_on_with_the_unseen_rows(tmp_path: Path) -> None:
    # Lightning ends the run at the end of the step; its exit code depends on the release.
    ends = (0, 128 + signal.SIGTERM)
    train(tmp_path, "--signal-at", 24, "--signal", int(signal.SIGTERM), "--prefetch", 2, codes=ends)
    stopped = json.loads((tmp_path / "rank0.json").read_text())["train"]
    resumed = train(tmp_path, "--resume", "--prefetch", 2)[0]["train"]
    whole = train(tmp_path)[0]["train"]
    assert stopped + resumed == whole
    assert 24 <= len(stopped) < len(whole)
