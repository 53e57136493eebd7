"""``fastio bench``: what is measured on which data, the arithmetic, the table, the JSON and the picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fastio import open_reader, open_writer
from lightning_fastio.bench import Benchmark, bench, command
from lightning_fastio.bench.measure import Contender, measure_in_turns
from lightning_fastio.bench.picture import draw
from lightning_fastio.bench.plain import plain_loader
from lightning_fastio.cli import main
from lightning_fastio.errors import MissingDependencyError

COLUMNS = {"image": np.arange(50 * 12, dtype=np.uint8).reshape(50, 3, 4), "label": np.arange(50)}


class Clock:
    """Moves on by what contenders say that a batch takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, seconds: list[float]) -> Contender:
        """One whose batches of 10 rows take the given seconds, an epoch after the other; epochs have 4 batches."""
        times = iter(seconds)

        def epoch() -> Iterator[int]:
            batch_s = next(times, seconds[-1])
            for _ in range(4):
                self.now += batch_s
                yield 10

        return Contender(name, epoch)


def test_rates_are_rows_over_seconds_and_the_first_round_does_not_count() -> None:
    clock = Clock()
    slow, fast = clock.contender("slow", [5.0, 1.0]), clock.contender("fast", [0.5, 0.1])
    measure_in_turns([slow, fast], ends_at=12.0, clock=clock)
    assert slow.rates == pytest.approx([10.0] * len(slow.rates))
    assert fast.rates == pytest.approx([100.0] * len(fast.rates))
    assert len(slow.rates) >= 1


def test_each_is_measured_although_the_time_is_up() -> None:
    clock = Clock()
    contenders = [clock.contender(name, [10.0]) for name in "abc"]
    measure_in_turns(contenders, ends_at=1.0, clock=clock)
    assert [len(each.rates) for each in contenders] == [1, 1, 1]


def test_figures() -> None:
    plain, fastio, limit = (Contender(str(rate), list, [rate, rate, 1e9]) for rate in (100.0, 2000.0, 4000.0))
    benchmark = Benchmark("x", 1000, 12, 50, "", plain, fastio, limit)
    assert (benchmark.speedup, benchmark.share_of_limit) == (20.0, 0.5)
    assert benchmark.batch_s(fastio) == 0.025
    assert Benchmark("x", 1000, 12, 50, "", plain, fastio, None).share_of_limit is None


def write(folder: Path, name: str) -> Path:
    with open_writer(folder / name) as writer:
        writer.write(COLUMNS)
    return folder / name


@pytest.mark.parametrize("name", ["rows", "rows.npz", "rows.h5"])
def test_the_usual_loader_reads_the_same_rows(tmp_path: Path, name: str) -> None:
    source = write(tmp_path, name)
    reader = open_reader(source)
    loader, how = plain_loader(str(source), reader, 16, len(reader))
    assert how == "each library's own indexing"
    batches = list(loader)
    order = torch.cat([batch["label"] for batch in batches])
    assert sorted(order.tolist()) == list(range(50))
    assert order.tolist() != list(range(50))
    images = torch.cat([batch["image"] for batch in batches])
    assert torch.equal(images, torch.from_numpy(COLUMNS["image"])[order])
    del loader
    reader.close()


def test_sources_that_take_more_are_read_by_this_package_row_by_row(tmp_path: Path) -> None:
    source = str(write(tmp_path, "rows.h5").parent / "*.h5")
    reader = open_reader(source)
    loader, how = plain_loader(source, reader, 16, len(reader))
    assert how == "this package's reader, row by row"
    assert [len(batch[""]["label"]) for batch in loader] == [16, 16, 16, 2]
    reader.close()


def test_the_table_has_units_that_suit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    contenders = [Contender(name, list, [rate]) for name, rate in (("a", 100.0), ("b", 2e5), ("c", 1e8))]
    monkeypatch.setattr(command, "bench", lambda *_, **__: Benchmark("x", 1, 12, 50, "", *contenders))
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "x", "--no-picture"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "1 row of 12 bytes, batches of 50"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["a", "100", "1.2 kB", "500"],
        ["b", "200,000", "2.4 MB", "0.25"],
        ["c", "100,000,000", "1.2 GB", "0.0005"],
    ]
    assert "An epoch has 1 batch here, so that" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.parquet", "rows.npz"])
def test_bench_of_every_format(tmp_path: Path, name: str) -> None:
    source = write(tmp_path, name)
    state = torch.get_rng_state()
    benchmark = bench(str(source), batch_size=16, seconds=0.3)
    assert torch.equal(torch.get_rng_state(), state)
    assert (benchmark.num_rows, benchmark.row_bytes, benchmark.batch_size) == (50, 20, 16)
    assert [each.name for each in benchmark.contenders] == [
        "DataLoader, one sample at a time",
        "lightning_fastio",
        "limit: gather in memory",
    ]
    assert all(each.rows_per_s > 0 for each in benchmark.contenders)


def test_fields_in_part_and_mappings(tmp_path: Path) -> None:
    folder = write(tmp_path, "rows")
    assert bench(str(folder), ["label"], seconds=0.1).row_bytes == 8
    assert bench({"a": str(folder / "label.npy")}, seconds=0.1).num_rows == 50


def test_text_has_no_limit_to_compare_with(tmp_path: Path) -> None:
    with open_writer(tmp_path / "text.parquet") as writer:
        writer.write({"text": ["one", "two", "three"]})
    benchmark = bench(str(tmp_path / "text.parquet"), seconds=0.1)
    assert benchmark.limit is None
    assert len(benchmark.contenders) == 2


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, picture = str(write(tmp_path, "rows.h5")), tmp_path / "new" / "bench.png"
    assert main(["bench", source, "--seconds", "0.2", "--batch-size", "16", "--output", str(picture)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "50 rows of 20 bytes, batches of 16" in out
    assert "An epoch has 4 batches here" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", source, "--seconds", "0.2", "--json", "--no-picture"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == figures["batch_size"] == 50
    assert figures["speedup"] == figures["fastio"]["rows_per_s"] / figures["plain"]["rows_per_s"]
    assert len(figures["limit"]["rounds"]) >= 1


def test_command_takes_a_field_from_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, "rows")
    sources = [f"a={folder / 'label.npy'}", f"b={folder / 'image.npy'}"]
    assert main(["bench", *sources, "--seconds", "0.1", "--json", "--no-picture"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["rows"], figures["row_bytes"]) == (50, 20)


@pytest.mark.parametrize("rates", [(1e5, 5e5, 3e7), (3.0, 1e5, 2.5e7), (3e7, 3.1e7, 3.2e7), (0.01, 1e8, 1e9)])
def test_labels_stay_in_the_picture(tmp_path: Path, rates: tuple[float, ...]) -> None:
    from matplotlib.image import imread

    contenders = [Contender("lightning_fastio", list, [rate]) for rate in rates]
    pixels = imread(draw(Benchmark("x", 1, 12345678, 256, "", *contenders), tmp_path / "x.png"))
    assert pixels.shape == (360, 1080, 4)
    assert np.all(pixels[:, -5:] == 1.0)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    contender = Contender("", list, [1.0])
    with pytest.raises(MissingDependencyError, match="pip install"):
        draw(Benchmark("x", 1, 1, 1, "", contender, contender, None), tmp_path / "x.png")
