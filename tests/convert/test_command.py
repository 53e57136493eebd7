"""``fastio convert`` and ``fastio verify`` as people type them."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest

from lightning_fastio.cli import main
from lightning_fastio.convert import convert
from lightning_fastio.convert.command import add_arguments, argument_docs, with_options
from lightning_fastio.convert.options import RunOptions, SourceOptions
from tests.convert.pictures import noise, read_all, save


def test_convert_and_verify(tmp_path, capsys):
    for index in range(3):
        save(tmp_path / "in" / "cat" / f"{index}.png", noise(index, (20, 30, 3)))
    (tmp_path / "in" / "cat" / "broken.png").write_bytes(b"")
    out = str(tmp_path / "out.h5")
    arguments = ["convert", str(tmp_path / "in"), out, "--size", "10", "12", "--resize", "stretch", "--num-workers=0"]
    assert main(arguments) == 1
    assert "cat/broken.png: the file is empty" in capsys.readouterr().err
    assert main([*arguments, "--on-error=skip", "--no-paths"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"out\.h5: 3 rows in 1 file, [\d.]+ kB", printed)
    assert "image: uint8[10, 12, 3]" in printed
    assert "classes: 1" in printed
    assert "skipped: 1, listed in" in printed
    assert list(read_all(tmp_path / "out.h5")) == ["image", "label"]
    assert main(["verify", out]) == 0
    assert "3 rows in 1 file, every byte as written" in capsys.readouterr().out
    Path(out).write_bytes(Path(out).read_bytes()[:-1])
    assert main(["verify", out]) == 1
    assert "the manifest says" in capsys.readouterr().err


def test_tables_with_fields_casts_and_fills(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n,4\n")
    (tmp_path / "b.csv").write_text("a,b\n5,6\n")
    assert main(
        [
            *("convert", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), str(tmp_path / "out")),
            *("--format=numpy", "--fields", "b", "a", "--dtypes", "b=int8", "--null-fill", "a=-1", "--num-workers=0"),
        ]
    ) == 0  # fmt: skip
    rows = read_all(tmp_path / "out")
    assert list(rows) == ["b", "a"]
    assert rows["b"].dtype == np.int8
    assert rows["a"].tolist() == [1, -1, 5]


def test_every_argument_is_on_the_command_line_with_its_help():
    parser = ArgumentParser()
    add_arguments(parser)
    offered = {action.dest: action.help for action in parser._actions}
    names = set(inspect.signature(convert).parameters) - {"fn"}
    assert names <= set(offered)
    assert all(offered[name] for name in names)
    assert set(argument_docs(convert)) == names | {"fn"}


def test_defaults_are_the_same_everywhere():
    parameters = inspect.signature(convert).parameters
    for name, option in SourceOptions.__dataclass_fields__.items():
        assert parameters[name].default == option.default, name
    assert set(RunOptions.__dataclass_fields__) < set(parameters)


def test_values_that_cannot_be_read_are_refused(tmp_path, capsys):
    for option in (["--shard-bytes", "much"], ["--dtypes", "x"], ["--format", "csv"]):
        with pytest.raises(SystemExit):
            main(["convert", "in", "out", *option])
    assert "FIELD=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("give format='numpy', 'hdf5'", "give format='numpy' (--format), 'hdf5'"),
        ("size=(height, width), or ragged=True", "size=(height, width) (--size), or ragged=True (--ragged)"),
        ("more than max_skipped=3; the", "more than max_skipped=3 (--max-skipped); the"),
        ("convert without classes=", "convert without classes= (--classes)"),
        ("resume=True (--resume) goes on", "resume=True (--resume) goes on"),
        ("in/size=3/a.png, size=3/a.png", "in/size=3/a.png, size=3/a.png"),
        ("a function of your own with fn=", "a function of your own with fn="),
    ],
)
def test_messages_name_options(message, shown):
    assert with_options(message) == shown


def test_errors_name_options(tmp_path, capsys):
    save(tmp_path / "a.png", noise(0, (4, 4, 3)))
    assert main(["convert", str(tmp_path / "a.png"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == (
        f"fastio convert: {tmp_path}/out: which format? End the name in .npy, .npz, .h5 or .parquet, or for a folder "
        "give format='numpy' (--format), 'hdf5' or 'parquet'\n"
    )


def test_one_row_is_one_row(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert main(["convert", str(tmp_path / "a.csv"), str(tmp_path / "out.h5"), "--num-workers=0"]) == 0
    assert "out.h5: 1 row in 1 file, " in capsys.readouterr().out


@pytest.fixture
def long_run(tmp_path):
    """A conversion in a process of its own, that has finished its first shard and has many to go."""
    save(tmp_path / "a.png", noise(0, (600, 600, 3)), compress_level=1)
    (tmp_path / "in").mkdir()
    for index in range(3000):
        os.link(tmp_path / "a.png", tmp_path / "in" / f"{index}.png")
    command = [sys.executable, "-m", "lightning_fastio.cli", "convert", "in", "out", "--format=parquet"]
    options = ["--shard-bytes=1M", "--size", "100", "100", "--num-workers=1"]
    with subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        journal = tmp_path / ".out.partial" / "journal.jsonl"
        while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 1):
            pass
        yield process


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(long_run, tmp_path):
    long_run.send_signal(signal.SIGINT)
    _, errors = long_run.communicate(timeout=60)
    assert long_run.returncode == 130
    assert "--resume goes on" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_workers_do_not_outlive_a_killed_conversion(long_run):
    children = Path(f"/proc/{long_run.pid}/task/{long_run.pid}/children").read_text().split()
    assert children
    long_run.kill()
    # They have inherited its standard error, which ends when the last of them closes it, on its way out.
    long_run.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(map(is_running, children)) and time.monotonic() < deadline:
        pass
    assert not [child for child in children if is_running(child)]


def is_running(process_id: str) -> bool:
    """Whether a process is there, and not just waiting to be reaped."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
