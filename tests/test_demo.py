"""The demo: real digits through three formats."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lightning_fastio import open_reader
from lightning_fastio.cli import main


@pytest.mark.parametrize("file", ["digits", "digits.h5", "digits.parquet"])
def test_files_hold_the_digits(file: str, demo_folder: Path):
    reader = open_reader(demo_folder / "fastio-demo" / file)
    digits = load_digits()
    batch = reader.read(np.arange(len(reader)))
    reader.close()
    assert batch["image"].shape == (1797, 8, 8)
    assert np.array_equal(batch["image"].numpy(), digits.images)
    assert batch["label"].tolist() == digits.target.tolist()


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    threads = threading.active_count()
    assert main(["demo", "--epochs=6"]) == 0
    assert threading.active_count() == threads
    text = capsys.readouterr().out
    for name in ("NumPy", "HDF5", "Parquet"):
        cells = next(line for line in text.splitlines() if f"│ {name} " in line).split("│")
        assert float(cells[-2].strip().rstrip("%")) >= 95
        assert float(cells[4].strip().rstrip("x")) > 1
    assert "fastio-demo" in text
    files = sorted(path.name for path in (tmp_path / "fastio-demo").iterdir())
    assert files == ["data_wait.png", "digits", "digits.h5", "digits.parquet"]
    assert (tmp_path / "fastio-demo" / "data_wait.png").read_bytes().startswith(b"\x89PNG")
