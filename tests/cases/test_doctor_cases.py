"""What went wrong for others with workers, limits and CUDA, and what the doctor says about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fastio.doctor.limits import check_shared_memory
from lightning_fastio.doctor.machine import Load, Machine
from lightning_fastio.loader import BatchLoader
from tests.memory import MemoryReader

MIB = 1 << 20


@pytest.mark.parametrize(("size_bytes", "severity"), [(64 * MIB, "warning"), (8 << 30, "ok")])
def test_d1_small_shared_memory_is_found_with_numbers(size_bytes: int, severity: str) -> None:
    machine = Machine(disk_space=lambda path: (size_bytes, size_bytes))
    (finding,) = check_shared_memory(machine, Load(num_workers=4, prefetch_factor=2, batch_bytes=32 * MIB))
    assert finding.severity == severity
    assert "4 workers x 2 batches x 32.0 MiB = 256.0 MiB" in finding.finding
    if severity == "warning":
        assert finding.finding.startswith("64.0 MiB free of 64.0 MiB")
        assert "docker run --shm-size=1g" in finding.fix


def test_d1_missing_shared_memory(tmp_path: Path) -> None:
    (finding,) = check_shared_memory(Machine(tmp_path), Load())
    assert (finding.severity, finding.finding) == ("warning", "missing")


def run(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_d2_few_open_files_are_found() -> None:
    out = run(
        "import resource\n"
        "from lightning_fastio.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "main(['doctor', '--json'])\n"
    )
    (finding,) = [each for each in json.loads(out) if each["check"] == "open files"]
    assert finding["severity"] == "warning"
    assert finding["finding"] == "at most 64"
    assert "ulimit -n 65535" in finding["fix"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_d12_pinning_is_off_without_a_gpu() -> None:
    loader = BatchLoader(MemoryReader({"x": np.arange(8)}), batch_size=4, pin_memory="auto")
    batches = list(loader)
    assert loader.pin_memory is False
    assert [batch["x"].is_pinned() for batch in batches] == [False, False]


def test_d13_import_and_doctor_start_no_cuda(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 4), np.float32))
    out = run(
        "import sys, torch\n"
        "import lightning_fastio\n"
        "from lightning_fastio.callbacks.memory import MemoryHygieneCallback\n"
        "MemoryHygieneCallback()\n"
        "from lightning_fastio.doctor import diagnose\n"
        "diagnose(sys.argv[1])\n"
        "print(torch.cuda.is_initialized())\n",
        str(tmp_path / "x.npy"),
    )
    assert out.splitlines()[-1] == "False"
