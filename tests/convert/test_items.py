"""A user's own function, the engines that run it, the dry run and the progress line."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fastio.convert import convert
from lightning_fastio.convert.progress import Progress, duration
from lightning_fastio.convert.source import Loaded, Skipped, Task
from lightning_fastio.errors import ConfigError, CorruptFileError, FastIOError
from tests.convert.pictures import DESTINATIONS, destination_options, noise, read_all, save
from tests.convert.test_output import tree


def make_row(item: int) -> dict[str, object] | None:
    """A row of every kind; every third item is left out."""
    if item % 3 == 2:
        return None
    return {
        "x": np.full((2, 3), item, np.float32),
        "t": torch.full((2,), item),
        "n": item,
        "word": f"w{item}",
        "raw": bytes([item % 256]) * (item % 5 + 1),
        "bag": list(range(item % 4)),
    }


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 0) for name in DESTINATIONS), ("out.h5", 2)])
def test_rows_of_a_function(tmp_path, name, num_workers):
    manifest = convert(range(200), tmp_path / name, fn=make_row, num_workers=num_workers, **destination_options(name))
    rows = read_all(tmp_path / name)
    kept = [item for item in range(200) if item % 3 != 2]
    assert manifest.num_rows == len(kept)
    np.testing.assert_array_equal(rows["x"][:, 1, 2], np.array(kept, np.float32))
    assert rows["t"].tolist() == [[item, item] for item in kept]
    assert rows["n"].tolist() == kept
    assert rows["word"] == [f"w{item}" for item in kept]
    assert [bytes(raw) for raw in rows["raw"]] == [bytes([item % 256]) * (item % 5 + 1) for item in kept]
    assert [bag.tolist() for bag in rows["bag"]] == [list(range(item % 4)) for item in kept]


def test_a_stream_of_items_and_a_seed(tmp_path):
    convert(iter(range(100)), tmp_path / "stream.h5", fn=make_row, num_workers=0)
    convert(range(100), tmp_path / "mixed.h5", fn=make_row, num_workers=0, shuffle_seed=1)
    stream, mixed = read_all(tmp_path / "stream.h5")["n"], read_all(tmp_path / "mixed.h5")["n"]
    assert stream.tolist() == [item for item in range(100) if item % 3 != 2]
    assert mixed.tolist() != stream.tolist()
    assert sorted(mixed.tolist()) == stream.tolist()


def fails(item: int) -> dict[str, int]:
    """Fails at one item."""
    return {"x": 1 // (item - 70)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_the_function_name_item_and_line(tmp_path, num_workers):
    with pytest.raises(CorruptFileError, match=r"^70: fn raised ZeroDivisionError.*test_items\.py:\d+"):
        convert(range(100), tmp_path / "out.h5", fn=fails, num_workers=num_workers)
    manifest = convert(range(100), tmp_path / "out.h5", fn=fails, num_workers=num_workers, on_error="skip")
    assert manifest.num_rows == 99
    assert [entry.item for entry in manifest.skipped] == ["70"]


def dies(item: int) -> dict[str, int]:
    """Takes its process down."""
    os._exit(3)


def test_a_worker_that_dies_is_reported_and_nothing_is_left(tmp_path):
    with pytest.raises(FastIOError, match="a worker process died"):
        convert(range(3), tmp_path / "out.h5", fn=dies, num_workers=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": 1}, {"b": 1}], r"fields \['a'\] for 0, but \['b'\] for 1"),
        ([{"a": 1}, {"a": 1.5}], "int64 .* for 0, but float64 .* for 1"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(3)}], r"\(2,\) for 0, but float64 \(3,\) for 1; return a list"),
        ([{"a": "x"}, {"a": b"x"}], "str for 0, but bytes for 1"),
    ],
)
def test_rows_that_do_not_fit_together_are_named(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        convert(range(2), tmp_path / "out.h5", fn=rows.__getitem__, num_workers=0)


def test_functions_that_cannot_travel_and_sources_that_are_no_items(tmp_path):
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        convert([1], tmp_path / "out.h5", fn=lambda item: {"x": item})
    with pytest.raises(ConfigError, match="an iterable of items"):
        convert("folder", tmp_path / "out.h5", fn=make_row)


SCRIPT = """
    import sys
    from pathlib import Path
    import ray
    from lightning_fastio.convert import convert
    source, folder = map(Path, sys.argv[1:])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    for name, options in {"ray": {"engine": "ray", "num_workers": 2}, "local": {"num_workers": 0}}.items():
        convert(source, folder / name, format="parquet", shard_bytes=200_000, size=(16, 16), **options)
    ray.shutdown()
"""


def test_ray_writes_the_same_bytes(tmp_path):
    import subprocess

    for index in range(400):
        save(tmp_path / "in" / f"{index % 2}" / f"{index}.png", noise(index, (20, 20, 3)))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(
        [sys.executable, str(script), str(tmp_path / "in"), str(tmp_path)], env=environment, check=True, timeout=100
    )
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert len(list((tmp_path / "ray").glob("*.parquet"))) == 2


def test_the_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path, capsys):
    for index in range(300):
        save(tmp_path / "in" / f"{index}.png", noise(index, (16, 16, 3)))
    (tmp_path / "in" / "5.png").write_bytes(b"")
    manifest = convert(tmp_path / "in", tmp_path / "out.h5", dry_run=True, size=(8, 8), num_workers=0)
    text = capsys.readouterr().out
    assert f"would write {tmp_path / 'out.h5'} (hdf5)" in text
    assert "image: uint8[8, 8, 3]" in text
    assert "path: string" in text
    assert "299 rows, about 0.1 MiB" in text
    assert "would skip 5.png: the file is empty" in text
    assert manifest.fields == {"image": "uint8[8, 8, 3]", "path": "string"}
    assert manifest.shards == []
    assert os.listdir(tmp_path) == ["in"]


class Counted:
    """As much of a source as progress looks at."""

    num_items = 1000
    num_bytes = None
    skipped = ()


def test_progress_counts_rate_time_left_and_skips(capsys):
    progress = Progress(Counted(), shown=False)
    progress.pass_over(Task(None, 400, 4_000_000))
    progress.add(Task(None, 100, 1_000_000), Loaded({"x": np.zeros(98)}, [Skipped("a", "b"), Skipped("c", "d")]))
    assert progress.text(2.0) == "500 of 1,000, 50/s, 5.0 MB read, 10 s left, 2 skipped"
    assert progress.fraction == 0.5
    with progress:
        pass
    assert capsys.readouterr() == ("", "")


def test_progress_is_drawn_when_asked_for(tmp_path, capsys):
    save(tmp_path / "in" / "0.png", noise(0))
    convert(tmp_path / "in", tmp_path / "out.h5", progress=True, num_workers=0)
    assert "converting" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5 s"), (65, "1 min 05 s"), (3700, "1 h 01 min")])
def test_durations_as_a_person_says_them(seconds, text):
    assert duration(seconds) == text
