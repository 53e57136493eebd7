"""Conversions appear whole or not at all, resume byte for byte, and prove what they are."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_fastio import open_reader
from lightning_fastio.convert import convert, verify
from lightning_fastio.convert.manifest import Manifest
from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError, ResumeError
from tests.convert import killed_run
from tests.convert.pictures import DESTINATIONS, destination_options, noise, read_all, save

FORMATS = ("numpy", "hdf5", "parquet")


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def kill_at(item: int, destination: Path, format: str) -> None:
    """Run a conversion in a process that is killed when it reaches an item."""
    done = subprocess.run([sys.executable, killed_run.__file__, str(destination), str(item), format], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("format", FORMATS)
def test_resuming_after_kill_gives_the_bytes_of_an_uninterrupted_run(tmp_path, format):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    killed_run.run(str(whole), format=format)
    kill_at(700, resumed, format)
    assert not resumed.exists()
    kept = len((tmp_path / ".resumed.partial" / "journal.jsonl").read_text().splitlines()) - 1
    assert kept >= 2
    manifest = killed_run.run(str(resumed), format=format, resume=True)
    assert tree(resumed) == tree(whole)
    assert sorted(os.listdir(tmp_path)) == ["resumed", "whole"]
    expected = [item for item in range(killed_run.NUM_ITEMS) if item % 10 and item % 50 != 7]
    reader = open_reader(resumed)
    assert reader.read(np.arange(len(reader)))["n"].tolist() == expected
    reader.close()
    assert manifest.num_rows == len(expected)
    assert [entry.item for entry in manifest.skipped] == [str(item) for item in range(7, 1000, 50)]
    assert manifest.statistics["n"]["mean"] == pytest.approx(np.mean(expected), rel=1e-12)


def test_a_kill_in_the_middle_of_the_journal_is_survived(tmp_path):
    kill_at(700, tmp_path / "out", "parquet")
    killed_run.run(str(tmp_path / "whole"), format="parquet")
    journal = tmp_path / ".out.partial" / "journal.jsonl"
    text = journal.read_text()
    journal.write_text(text[:-30])
    killed_run.run(str(tmp_path / "out"), format="parquet", resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_unfinished_conversion_is_neither_continued_nor_thrown_away_unasked(tmp_path):
    kill_at(700, tmp_path / "out", "parquet")
    with pytest.raises(ConfigError, match=r"unfinished conversion.*resume=True.*overwrite=True"):
        killed_run.run(str(tmp_path / "out"), format="parquet")
    with pytest.raises(ResumeError, match="differs in compression;"):
        killed_run.run(str(tmp_path / "out"), format="parquet", resume=True, compression="zstd")
    killed_run.run(str(tmp_path / "out"), format="parquet", overwrite=True)
    assert verify(tmp_path / "out").num_rows == 880
    assert os.listdir(tmp_path) == ["out"]


def test_shards_that_changed_in_between_are_not_resumed(tmp_path):
    kill_at(700, tmp_path / "out", "parquet")
    shard = tmp_path / ".out.partial" / "data" / "part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ResumeError, match=r"part-00000\.parquet: changed"):
        killed_run.run(str(tmp_path / "out"), format="parquet", resume=True)


@pytest.mark.parametrize("format", FORMATS)
def test_worker_processes_and_threads_write_the_same_bytes(tmp_path, format):
    folder = tmp_path / "in"
    for index in range(300):
        save(folder / f"{index}.png", noise(index, (40, 40, 3)))
    for name, options in {
        "inline": {"num_workers": 0},
        "processes": {"num_workers": 2},
        "threads": {"num_workers": 3, "engine": "thread"},
    }.items():
        manifest = convert(folder, tmp_path / name, format=format, shard_bytes=500_000, size=(32, 32), **options)
        assert len(manifest.shards) >= 1
        assert manifest.num_rows == 300
    assert tree(tmp_path / "processes") == tree(tmp_path / "inline")
    assert tree(tmp_path / "threads") == tree(tmp_path / "inline")


@pytest.mark.parametrize("name", DESTINATIONS)
def test_a_failed_run_leaves_older_data_as_it_was(tmp_path, name):
    folder = tmp_path / "in"
    save(folder / "a.png", noise(0))
    convert(folder, tmp_path / name, num_workers=0, **destination_options(name))
    before = tree(tmp_path)
    (folder / "b.png").write_bytes(b"broken")
    with pytest.raises(CorruptFileError, match=r"b\.png"):
        convert(folder, tmp_path / name, num_workers=0, overwrite=True, **destination_options(name))
    assert tree(tmp_path) == {**before, "in/b.png": b"broken"}
    verify(tmp_path / name)


@pytest.mark.parametrize("name", DESTINATIONS)
def test_existing_data_is_replaced_only_when_asked(tmp_path, name):
    folder = tmp_path / "in"
    save(folder / "a.png", noise(0))
    options = {"num_workers": 0, **destination_options(name)}
    convert(folder, tmp_path / name, **options)
    with pytest.raises(ConfigError, match=r"exists already.*overwrite=True"):
        convert(folder, tmp_path / name, **options)
    new = save(folder / "a.png", noise(1))
    convert(folder, tmp_path / name, overwrite=True, **options)
    np.testing.assert_array_equal(read_all(tmp_path / name)["image"], new[None])
    assert verify(tmp_path / name).num_rows == 1
    assert not [file for file in os.listdir(tmp_path) if file.startswith(".")]


def interrupt(item: int) -> dict[str, int]:
    """A row, until somebody presses Ctrl-C."""
    if item == 500:
        raise KeyboardInterrupt
    return {"x": item}


def test_ctrl_c_keeps_finished_shards_and_says_how_to_go_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lightning_fastio"), pytest.raises(KeyboardInterrupt):
        convert(range(1000), tmp_path / "out", fn=interrupt, format="parquet", shard_bytes=1000, num_workers=0)
    assert os.listdir(tmp_path) == [".out.partial"]
    assert "3 finished shards are kept" in caplog.text
    assert "resume=True" in caplog.text


def test_two_conversions_to_one_destination_do_not_meet(tmp_path):
    seen = []

    def convert_again(item: int) -> dict[str, int]:
        if not seen:
            seen.append(item)
            with pytest.raises(FileAccessError, match="another process is converting"):
                convert(range(3), tmp_path / "out.parquet", fn=identity, num_workers=0, resume=True)
        return {"x": item}

    convert_again.__qualname__ = "identity"
    convert_again.__module__ = __name__
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        convert(range(3), tmp_path / "out.parquet", fn=convert_again)
    convert(range(3), tmp_path / "out.parquet", fn=CallsAgain(convert_again), num_workers=0)
    assert seen == [0]
    assert verify(tmp_path / "out.parquet").num_rows == 3


def identity(item: int) -> dict[str, int]:
    """The item as a row."""
    return {"x": item}


class CallsAgain:
    """A function that pickles, and calls one that does not."""

    inner = None

    def __init__(self, inner):
        CallsAgain.inner = staticmethod(inner)

    def __call__(self, item):
        return CallsAgain.inner(item)


@pytest.mark.parametrize("name", DESTINATIONS)
def test_verify_finds_every_kind_of_damage(tmp_path, name):
    folder = tmp_path / "in"
    for index in range(20):
        save(folder / f"{index}.png", noise(index))
    convert(folder, tmp_path / name, num_workers=0, **destination_options(name))
    manifest = verify(tmp_path / name)
    assert manifest == Manifest.load(tmp_path / name)
    [shard] = manifest.shards
    root = tmp_path / name if (tmp_path / name).is_dir() else tmp_path
    file = root / max(shard.files, key=lambda entry: shard.files[entry]["bytes"])
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for damaged, message in ((bytes(flipped), "checksum"), (good[:-1], "bytes, the manifest says")):
        file.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=message):
            verify(tmp_path / name)
    file.unlink()
    with pytest.raises(CorruptFileError, match=f"{file.name}: missing"):
        verify(tmp_path / name) if root == tmp_path / name else verify(tmp_path / f"{name}.manifest.json")
    file.write_bytes(good)
    verify(tmp_path / name)


def test_verify_without_a_manifest_says_so(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(FileAccessError, match="no manifest"):
        verify(tmp_path / "x.npy")


def test_nothing_is_written_where_every_input_was_skipped(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    with pytest.raises(FormatError, match="all 1 inputs were skipped"):
        convert(folder, tmp_path / "out.h5", on_error="skip", num_workers=0)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("format", FORMATS)
def test_moved_shards_still_verify(tmp_path, format):
    killed_run.run(str(tmp_path / "out"), format=format)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    manifest = verify(tmp_path / "moved")
    assert [Path(shard.path).stem for shard in manifest.shards] == [
        f"part-{number:05d}" for number in range(len(manifest.shards))
    ]
    assert len(manifest.shards) > 3


@pytest.mark.parametrize(
    ("destination", "options", "message"),
    [
        ("out", {}, "which format"),
        ("out.zip", {}, "which format"),
        ("out.h5", {"format": "parquet"}, "the suffix says hdf5"),
        ("out.h5", {"shard_bytes": 10}, "needs a folder"),
        ("out", {"format": "csv"}, "format='csv'"),
        ("out.h5", {"engine": "dask"}, "engine='dask'"),
        ("out.h5", {"on_error": "ignore"}, "on_error='ignore'"),
        ("out.h5", {"size": (3, 3)}, "size: means nothing"),
    ],
)
def test_contradictions_are_refused_before_any_work(tmp_path, destination, options, message):
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "x.npy", tmp_path / destination, **options)
    assert os.listdir(tmp_path) == ["x.npy"]
