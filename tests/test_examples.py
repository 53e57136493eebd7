"""The examples run as they are given."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_fastio.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def working_directory(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fastio-demo").symlink_to(demo_folder / "fastio-demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.parametrize("name", ["train.py", "subclass_datamodule.py"])
def test_trains(name: str):
    trainer = runpy.run_path(str(EXAMPLES / name))["main"](max_epochs=3)
    assert trainer.current_epoch == 3
    assert trainer.callback_metrics["val_accuracy"] > 0.7


def test_augmentation_shifts_whole_images():
    example = runpy.run_path(str(EXAMPLES / "subclass_datamodule.py"))
    data = example["ShiftedDigits"](train="fastio-demo/digits.h5", batch_size=8)
    image = torch.zeros(8, 8, 8)
    image[:, 4, 4] = 1
    shifted = [
        data.transform_batch({"image": image}, "train", generator=torch.Generator().manual_seed(seed))["image"]
        for seed in range(20)
    ]
    places = {tuple(each[0].nonzero()[0].tolist()) for each in shifted}
    assert places <= {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert len(places) > 3
    assert data.transform_batch({"image": image}, "val")["image"] is image


@pytest.mark.filterwarnings("ignore:::lightning")
def test_a_loop_with_fabric(capsys: pytest.CaptureFixture[str]):
    assert runpy.run_path(str(EXAMPLES / "fabric.py"))["main"](max_epochs=3) < 1.5
    assert "of the time for data" in capsys.readouterr().out


def test_custom_storage():
    assert runpy.run_path(str(EXAMPLES / "custom_storage.py"))["main"]() == [(256, 28, 28)] * 3 + [(132, 28, 28)]


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:No seed found")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs(config: Path):
    assert len(CONFIGS) == 3
    assert main(["fit", "-c", str(config), "--trainer.max_epochs=1"]) == 0
    saved = next(Path().glob("lightning_logs/*/run_config.yaml"))
    assert yaml.safe_load(saved.read_text())["data"]["init_args"]["train"].startswith("fastio-demo/digits")
