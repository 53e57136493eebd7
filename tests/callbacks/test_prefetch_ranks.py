"""PrefetchCallback on several gloo processes under a real Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_ranks_see_the_same_and_the_slowest_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.scripts.prefetch_ranks", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(ranks) == 2
    for stock, ahead in ranks:
        assert len([step for step in stock["seen"] if step[0] == "train"]) == 12
        assert ahead == stock
    rows = sorted(row for (stock, _) in ranks for step in stock["seen"][:9] if step[0] == "train" for row in step[1])
    assert len(rows) == len(set(rows))
    assert run.stdout.count("Data wait per batch") == 1
    assert run.stdout.count("Of 2 ranks, rank ") == 1
