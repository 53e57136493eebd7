"""The command line: where options come from, what training commands take, what `inspect` shows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml

import lightning_fastio
from lightning_fastio import open_writer
from lightning_fastio.cli import main
from lightning_fastio.trainer_cli import with_environment

MODEL = """
import torch
from lightning.pytorch import LightningModule

seen = []

class Net(LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(3, width)

    def training_step(self, batch, batch_idx):
        seen.append(batch["x"].shape)
        return self.layer(batch["x"]).sum()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch["x"]).sum())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)
"""

CONFIG = """
seed_everything: 1
model: my_project.Net
data:
  class_path: NumpyDataModule
  init_args:
    train: rows.npy
    fields: {x: rows}
    val_split: 4
    test_split: 4
    batch_size: 8
    num_workers: 1
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: PrefetchCallback
    - class_path: lightning_fastio.MemoryHygieneCallback
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model, data and a configuration, in which the commands run."""
    (tmp_path / "my_project.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG)
    np.save(tmp_path / "rows.npy", np.arange(120, dtype=np.float32).reshape(40, 3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    with mock.patch.dict(os.environ):
        yield tmp_path
    sys.modules.pop("my_project", None)


def printed_config(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    """The configuration that a command would run with."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *options, "--print_config"])
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    return yaml.safe_load(captured.out)


class TestOptions:
    def test_variables_stand_between_files_and_command_line(self):
        environ = {
            "FASTIO_FIT__DATA__BATCH_SIZE": "64",
            "FASTIO_FIT__DATA": "NumpyDataModule",
            "FASTIO_FIT__CONFIG": "base.yaml",
            "FASTIO_TEST__TRAINER__DEVICES": "2",
            "HOME": "/root",
        }
        argv = ["fit", "--model=Net", "-c", "mine.yaml", "--trainer.max_epochs", "3", "--config=last.yaml"]
        assert with_environment(argv, environ) == [
            "fit",
            "--config=base.yaml",
            "--config=mine.yaml",
            "--config=last.yaml",
            "--data=NumpyDataModule",
            "--data.batch_size=64",
            "--model=Net",
            "--trainer.max_epochs",
            "3",
        ]

    @pytest.mark.parametrize("option", ["--help", "-h", "--data.help", "--data.help=NumpyDataModule"])
    def test_help_is_not_disturbed_by_variables(self, option: str):
        assert with_environment(["fit", option], {"FASTIO_FIT__MODEL__WIDTH": "4"}) == ["fit", option]

    def test_later_places_win(self, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        def settings(*options: str) -> tuple[int, int, float]:
            config = printed_config(capsys, "-c", "config.yaml", *options)
            arguments = config["data"]["init_args"]
            return config["trainer"]["max_epochs"], arguments["batch_size"], config["model"]["init_args"]["lr"]

        assert settings() == (1, 8, 0.1)
        variables = (
            "FASTIO_FIT__TRAINER__MAX_EPOCHS",
            "FASTIO_FIT__DATA__INIT_ARGS__BATCH_SIZE",
            "FASTIO_FIT__MODEL__LR",
        )
        (project / ".env").write_text("".join(f"{name}=2\n" for name in variables))
        monkeypatch.setenv(variables[1], "3")
        monkeypatch.setenv(variables[2], "3")
        assert settings("--model.lr=4") == (2, 3, 4.0)

    def test_print_config_round_trip(self, project: Path, capsys: pytest.CaptureFixture[str]):
        first = printed_config(capsys, "-c", "config.yaml")
        (project / "printed.yaml").write_text(yaml.safe_dump(first))
        assert printed_config(capsys, "-c", "printed.yaml") == first

    def test_data_help_explains_every_argument(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            main(["fit", "--data.help=ParquetDataModule"])
        text = capsys.readouterr().out
        for argument in ("train", "null_fill", "filters", "batch_size", "shuffle", "val_split", "cache_bytes"):
            assert f"--data.{argument} " in text
        assert "Bytes of decoded blocks" in text


class TestMisspelled:
    """The last line of an error says what is wrong, and which name was probably meant."""

    @pytest.mark.parametrize(
        ("options", "last_line"),
        [
            (["--data=NumpyDataModul"], "there is no class 'NumpyDataModul'; did you mean NumpyDataModule?"),
            (
                ["--data.batchsize=3"],
                "lightning_fastio.NumpyDataModule has no argument 'batchsize'; did you mean batch_size?",
            ),
            (["--model=my_project.Nett"], "my_project has no class 'Nett'; did you mean Net?"),
            (["--model=my_projct.Net"], "there is no module 'my_projct', where my_projct.Net was looked for"),
            (["--model.widht=3"], "my_project.Net has no argument 'widht'; did you mean width?"),
            (
                ["--data=Xyzzy"],
                "there is no class 'Xyzzy'; a class of your own needs the path of its module, as in my_project.MyModel",
            ),
            (
                ["--trainer.max_epoks=1"],
                "there is no option --trainer.max_epoks; did you mean --trainer.max_epochs?",
            ),
            (["--dta.batch_size=1"], "there is no option --dta; did you mean --data?"),
            (["--trainr.max_epochs=1"], "there is no option --trainr; did you mean --trainer?"),
            (["more.yaml"], "a configuration file needs -c before it: -c more.yaml"),
            (["--zzz=1"], "there is no option --zzz"),
            (
                ["--trainer.callbacks+=PrefetchCallbak"],
                "there is no class 'PrefetchCallbak'; did you mean PrefetchCallback?",
            ),
            (["-c", "nothing.yaml"], "Parser key \"config\": File does not exist: '{folder}/nothing.yaml'"),
        ],
    )
    def test_options(self, options: list[str], last_line: str, project: Path, capsys: pytest.CaptureFixture[str]):
        assert last_line_of_error(capsys, "fit", "-c", "config.yaml", *options) == "fastio fit: " + last_line.format(
            folder=project
        )

    @pytest.mark.parametrize(
        ("right", "wrong", "last_line"),
        [
            ("NumpyDataModule", "NumpyDataModul", "there is no class 'NumpyDataModul'; did you mean NumpyDataModule?"),
            ("max_epochs", "max_epoch", "there is no option --trainer.max_epoch; did you mean --trainer.max_epochs?"),
            ("data:", "dta:", "there is no option --dta; did you mean --data?"),
            (
                "batch_size",
                "batchsize",
                "lightning_fastio.NumpyDataModule has no argument 'batchsize'; did you mean batch_size?",
            ),
        ],
    )
    @pytest.mark.parametrize("command", ["fit", "tune"])
    def test_configuration_files(
        self, command: str, right: str, wrong: str, last_line: str, capsys: pytest.CaptureFixture[str]
    ):
        Path("wrong.yaml").write_text(CONFIG.replace(right, wrong))
        assert last_line_of_error(capsys, command, "-c", "wrong.yaml") == f"fastio {command}: {last_line}"

    def test_a_short_error_is_not_said_twice(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            main(["fit", "-c", "config.yaml", "--trainer.max_epoks=1"])
        error = "fastio fit: there is no option --trainer.max_epoks; did you mean --trainer.max_epochs?\n"
        assert capsys.readouterr().err == error

    def test_no_model(self, capsys: pytest.CaptureFixture[str]):
        assert last_line_of_error(capsys, "fit") == (
            "fastio fit: which model? Give --model=my_project.MyModel, or a configuration file that names it: "
            "-c config.yaml"
        )

    def test_other_errors_stay_whole(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            main(["fit", "-c", "config.yaml", "--trainer.max_epochs=many"])
        error = capsys.readouterr().err
        assert error.startswith('fastio fit: Parser key "trainer.max_epochs":\n')
        assert error.endswith("Given value: many\n")


def last_line_of_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


class TestTraining:
    def test_fit_from_yaml(self, project: Path):
        assert main(["fit", "-c", "config.yaml"]) == 0
        assert (project / "config.yaml").read_text() == CONFIG
        assert [tuple(shape) for shape in sys.modules["my_project"].seen] == [(8, 3)] * 4

    def test_fit_from_options_alone(self):
        options = [
            *CONFIG_AS_OPTIONS,
            "--data.max_rows=20",
            "--data.val_split=4",
            "--trainer.callbacks+=PrefetchCallback",
        ]
        assert main(["fit", *options]) == 0
        assert [tuple(shape) for shape in sys.modules["my_project"].seen] == [(8, 3), (8, 3)]

    @pytest.mark.parametrize("command", ["validate", "test", "predict"])
    def test_other_stages(self, command: str):
        assert main([command, "-c", "config.yaml"]) == 0

    def test_the_configuration_is_saved_beside_the_logs(self, project: Path):
        for _ in range(2):
            assert main(["fit", "-c", "config.yaml", "--trainer.default_root_dir=runs"]) == 0
        saved = yaml.safe_load((project / "runs" / "run_config.yaml").read_text())
        assert saved["data"]["init_args"]["batch_size"] == 8


CONFIG_AS_OPTIONS = [
    "--seed_everything=1",
    "--model=my_project.Net",
    "--data=NumpyDataModule",
    "--data.train=rows.npy",
    "--data.fields={x: rows}",
    "--data.batch_size=8",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
]


class TestInspect:
    def test_table(self, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("COLUMNS", "200")
        assert main(["inspect", "rows.npy"]) == 0
        text = capsys.readouterr().out
        assert "rows.npy: 40 rows of 12 bytes" in text
        assert "float32[3]" in text
        assert "memory map" in text

    @pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.parquet"])
    def test_json(self, name: str, project: Path, capsys: pytest.CaptureFixture[str]):
        (project / "out").mkdir()
        with open_writer(project / "out" / name) as writer:
            writer.write({"image": np.zeros((5, 2, 3), np.uint8), "label": np.arange(5), "text": list("abcde")})
        assert main(["inspect", f"out/{name}", "--json"]) == 0
        contents = json.loads(capsys.readouterr().out)
        assert contents["rows"] == 5
        delivered = [(field["name"], field["dtype"], field["shape"]) for field in contents["fields"]]
        assert sorted(delivered) == [("image", "uint8", [2, 3]), ("label", "int64", []), ("text", "string", [])]
        assert all(field["stored"] and field["read_path"] for field in contents["fields"])

    def test_chosen_fields(self, project: Path, capsys: pytest.CaptureFixture[str]):
        with open_writer(project / "rows.h5") as writer:
            writer.write({"x": np.zeros(5), "y": np.zeros(5)})
        assert main(["inspect", "rows.h5", "--json", "--fields", "y"]) == 0
        assert [field["name"] for field in json.loads(capsys.readouterr().out)["fields"]] == ["y"]

    def test_several_files_are_one_source(self, capsys: pytest.CaptureFixture[str]):
        for number in range(3):
            np.save(f"part-{number}.npy", np.zeros((4, 2)))
        assert main(["inspect", "part-0.npy", "part-1.npy", "part-2.npy", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 12

    def test_files_of_several_fields(
        self, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("COLUMNS", "200")
        np.save("y.npy", np.zeros(40, np.int64))
        assert main(["inspect", "x=rows.npy", "label=y.npy", "--json"]) == 0
        fields = json.loads(capsys.readouterr().out)["fields"]
        assert [(field["name"], field["dtype"], field["shape"]) for field in fields] == [
            ("x", "float32", [3]),
            ("label", "int64", []),
        ]
        assert main(["inspect", "x=rows.npy", "label=y.npy"]) == 0
        assert "x=rows.npy label=y.npy: 40 rows of 20 bytes" in capsys.readouterr().out

    def test_one_row_of_one_byte(self, capsys: pytest.CaptureFixture[str]):
        np.save("[bold]one.npy", np.zeros(1, np.uint8))
        assert main(["inspect", "[bold]one.npy"]) == 0
        assert "[bold]one.npy: 1 row of 1 byte " in capsys.readouterr().out

    def test_quality_of_a_block_shuffle(self, project: Path, capsys: pytest.CaptureFixture[str]):
        with open_writer(project / "rows.parquet", block_bytes=1 << 12) as writer:
            for _ in range(64):
                writer.write({"x": np.zeros((16, 256), np.uint8)})
        assert main(["inspect", "rows.parquet", "--json", "--cache-bytes", str(1 << 16)]) == 0
        blocks = json.loads(capsys.readouterr().out)["blocks"]
        assert blocks["shuffle"] == "block"
        assert blocks["number"] > 1
        assert blocks["class_imbalance"] > blocks["class_imbalance_uniform"] > 0

    def test_errors_are_one_message(self, capsys: pytest.CaptureFixture[str]):
        assert main(["inspect", "missing.npy"]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("fastio inspect: ")
        assert "missing.npy" in captured.err


class TestCommands:
    def test_version(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit) as stop:
            main(["--version"])
        assert stop.value.code == 0
        assert lightning_fastio.__version__ in capsys.readouterr().out

    def test_help_names_every_command(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            main(["--help"])
        text = capsys.readouterr().out
        for command in ("fit", "validate", "test", "predict", "demo", "inspect"):
            assert f"    {command} " in text

    def test_without_a_command_the_help_is_shown(self, capsys: pytest.CaptureFixture[str]):
        assert main([]) == 2
        shown = capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["--help"])
        assert shown == capsys.readouterr().out

    def test_tune_says_what_to_give(self, capsys: pytest.CaptureFixture[str]):
        assert main(["tune"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("fastio tune: which model and data?")
        assert "fastio tune -c config.yaml; " in error

    @pytest.mark.parametrize("argv", [["nothing"], ["inspect"]])
    def test_wrong_use_is_explained(self, argv: list[str], capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        assert "usage: fastio" in capsys.readouterr().err
