"""The record of a run as Parquet, and the page that is made of it."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_fastio import cli
from lightning_fastio.callbacks import PrefetchCallback
from lightning_fastio.errors import FileAccessError, FormatError, MissingDependencyError
from lightning_fastio.report import Record, load_record, save_record, write_report
from lightning_fastio.report.figures import binned_waits, step_parts_ms
from lightning_fastio.staging import CopyTimes
from lightning_fastio.verdict import LoaderFacts, judge
from lightning_fastio.waits import WaitStats
from tests.callbacks.traced_runs import QUIET, FailsAt, Scenario, load, run_traced

pytestmark = QUIET


def measured(num_steps: int = 40, wait_s: float = 0.004) -> WaitStats:
    waits = WaitStats()
    for number in range(num_steps):
        waits.add(
            data_wait_s=0.5 if number == 0 else wait_s,
            step_s=0.5 if number == 0 else wait_s + 0.01,
            num_rows=8,
            is_first=number == 0,
            read_s=0.02,
            is_copied=True,
        )
    waits.add_copies([CopyTimes(0.003, 0.002)] * num_steps)
    waits.add_evaluation("validate", 0.1, 0.5)
    return waits


def record(name: str = "run", **options: Any) -> Record:
    waits = measured(**options)
    return Record(name, waits.steps, waits.evaluations, judge(waits, LoaderFacts("DataLoader", 1, max_workers=8)))


class Page(HTMLParser):
    """Tags that are open, and the text."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


# Record


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    waits = measured()
    verdict = judge(waits, LoaderFacts("DataLoader", 1, max_workers=8))
    path = tmp_path / "logs" / "version_3" / "fastio_waits.parquet"
    save_record(path, waits, verdict)
    for place in (path, path.parent, tmp_path):
        loaded = load_record(place)
        assert loaded.name == "logs/version_3"
        assert loaded.steps.dtype == waits.steps.dtype
        np.testing.assert_array_equal(loaded.steps, waits.steps)
        assert loaded.evaluations == waits.evaluations
        assert loaded.verdict == verdict


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match=r"save=True"):
        load_record(tmp_path)
    with pytest.raises(FileAccessError, match="no such file"):
        load_record(tmp_path / "gone.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(FormatError, match="not a record"):
        load_record(tmp_path / "other.parquet")


def test_the_callback_writes_the_record_also_after_an_error(tmp_path: Path) -> None:
    callback = PrefetchCallback(save=True, summary=False)
    run_traced(Scenario(lambda trainer, net: trainer.fit(net, load(4), load(2))), tmp_path / "whole", [callback])
    whole = load_record(tmp_path / "whole")
    np.testing.assert_array_equal(whole.steps, callback.waits)
    assert whole.evaluations.keys() == {"sanity check", "validate"}
    failing = Scenario(
        lambda trainer, net: trainer.fit(net, load(6, lambda rows, start: FailsAt(rows, 9))),  # type: ignore[arg-type]
        error=OSError,
    )
    run_traced(failing, tmp_path / "failed", [PrefetchCallback(save=True, summary=False)])
    assert len(load_record(tmp_path / "failed").steps) == 4


# Page


@pytest.mark.parametrize("names", [["run"], ["one", "other"]])
def test_the_page_is_whole_and_needs_no_other(names: list[str], tmp_path: Path) -> None:
    path = write_report([record(name, wait_s=0.04 / (number + 1)) for number, name in enumerate(names)], tmp_path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 3
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "prefers-color-scheme: dark" in text
    assert "#10161c" not in text.partition("</style>")[2]
    assert page.words.count("INPUT-BOUND") == len(names)
    for words in ("wait for data [ms]", "share of steps [%]", "training batch", "mean step", *names):
        assert words in page.words
    ids = re.findall(r' id="([^"]+)"', text)
    assert ids
    assert len(ids) == len(set(ids))
    for name in ("step", "waits", "histogram"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_names_are_escaped(tmp_path: Path) -> None:
    text = write_report([record("<b>&")], tmp_path).read_text(encoding="utf-8")
    assert "<b>&</" not in text
    assert "&lt;b&gt;&amp;" in text


def test_runs_of_one_step_or_without_waits_are_drawn(tmp_path: Path) -> None:
    assert write_report([record(num_steps=1), record(wait_s=0.0)], tmp_path).exists()


def test_parts_of_a_step_add_up_to_it() -> None:
    wait_ms, copy_ms, compute_ms = step_parts_ms(record())
    assert (wait_ms, copy_ms) == (pytest.approx(4.0), pytest.approx(2.0))
    assert wait_ms + copy_ms + compute_ms == pytest.approx(14.0)


def test_long_runs_are_drawn_in_bins_that_keep_the_longest_wait() -> None:
    waits = measured(10_000)
    waits.steps["data_wait_s"][7000] = 9.0
    number, mean_ms, max_ms = binned_waits(Record("long", waits.steps, {}, None))
    assert len(number) == len(mean_ms) == len(max_ms) == 400
    assert max_ms.max() == 9000.0
    assert number[max_ms.argmax()] == pytest.approx(7001, abs=13)
    assert mean_ms.max() < 9000 / 20


def test_the_callback_draws_its_own_run(tmp_path: Path) -> None:
    callback = PrefetchCallback(summary=False)
    run_traced(Scenario(lambda trainer, net: trainer.fit(net, load(4))), tmp_path, [callback])
    page = callback.plot(tmp_path / "report")
    assert page == tmp_path / "report" / "report.html"
    assert "this run" in page.read_text(encoding="utf-8")


def test_the_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        save_record(tmp_path / name / "fastio_waits.parquet", measured(), None)
    output = tmp_path / "page"
    code = cli.main(["report", str(tmp_path / "one"), "--compare", str(tmp_path / "two"), "--output", str(output)])
    assert code == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path.name}/one: no verdict" in printed
    assert f"Written: {output / 'report.html'}" in printed
    assert cli.main(["report", str(tmp_path / "three")]) == 1
    assert "no such file or folder" in capsys.readouterr().err


def test_without_matplotlib_the_install_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install"):
        write_report([record()], tmp_path)
