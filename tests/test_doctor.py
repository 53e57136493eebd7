"""`diagnose` and ``fastio doctor`` as a whole."""

from __future__ import annotations

import json
import os
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_fastio.doctor import Finding, Machine, add_arguments, command, diagnose, diagnosis, layout, main
from lightning_fastio.doctor.machine import installed_version
from lightning_fastio.errors import CorruptFileError, FormatError
from lightning_fastio.formats.base import FieldLayout
from tests.memory import MemoryReader


def doctor(*options: str) -> int:
    parser = ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(options))


class SlowReader(MemoryReader):
    """A reader that has advice about one of its fields."""

    def layout(self) -> list[FieldLayout]:
        return [
            FieldLayout("x", "uint8 (90, 100), chunks (90, 1), gzip", "chunks", "one row needs 100 chunks: convert"),
            FieldLayout("y", "int64 (90,)", "memory map"),
        ]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "train.h5"
    path.write_bytes(bytes(8 << 20))
    reader = SlowReader({"x": np.zeros((90, 100), np.uint8), "y": np.zeros(90, np.int64)})
    monkeypatch.setattr(layout, "open_data", lambda _: reader)
    return path


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in findings}


def test_data_gets_its_storage_layout_and_rate(data: Path) -> None:
    found = by_check(diagnose(data, batch_size=1 << 20, num_workers=3))
    slow = found[f"layout of {data}"]
    assert slow.severity == "warning"
    assert slow.finding == "x: uint8 (90, 100), chunks (90, 1), gzip, read by chunks"
    assert slow.fix == "one row needs 100 chunks: convert"
    assert found[f"read rate of {data}"].finding.endswith("rows a second on first reading")
    assert {f"storage of {data}", f"free space at {data}"} <= set(found)
    # 108 bytes a row, 2^20 rows a batch, 3 workers with 2 batches each.
    assert "3 workers x 2 batches x 108.0 MiB = 648.0 MiB" in found["/dev/shm"].finding


def test_rates_can_be_left_out(data: Path) -> None:
    assert not [each for each in diagnose(data, measure=False) if each.check.startswith("read rate")]


@pytest.mark.parametrize(
    ("error", "severity"), [(CorruptFileError("x.h5: cut short"), "error"), (FormatError("no rows in it"), "info")]
)
def test_data_that_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, severity: str
) -> None:
    def fail(path: Path) -> Any:
        raise error

    monkeypatch.setattr("lightning_fastio.formats.open_reader", fail)
    found = by_check(diagnose(tmp_path, measure=False))[f"data at {tmp_path}"]
    assert (found.severity, found.why) == (severity, str(error))


def test_an_empty_root_gives_no_error_and_no_exception(tmp_path: Path) -> None:
    machine = Machine(tmp_path, environ={}, version=installed_version)
    findings = diagnose(machine=machine)
    assert not [each for each in findings if each.check == "doctor" or each.severity == "error"]


def test_one_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(machine: Machine) -> Iterator[Finding]:
        yield Finding("swap", "first")
        raise ValueError("an odd number")

    monkeypatch.setattr(diagnosis.memory, "check_swap", odd)
    found = by_check(diagnose())
    assert found["doctor"].why == "ValueError: an odd number"
    assert "open files" in found


def test_nothing_is_left_behind(data: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), os.environ.copy()
    diagnose(data)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), os.environ.copy()) == before


FINDINGS = [
    Finding("swap", "none"),
    Finding("GPU [0]", "no [bold] driver", "training runs on the CPU", "install it", "error"),
    Finding("PCIe", "x4 of x16", "slow", "another slot", "warning"),
]


@pytest.mark.parametrize(("findings", "code"), [(FINDINGS, 1), (FINDINGS[::2], 0), ([], 0)])
def test_exit_code_tells_errors(
    findings: list[Finding], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda *paths, **options: findings)
    assert doctor("--json") == code
    assert json.loads(capsys.readouterr().out) == [vars(each) for each in findings]


def test_options_reach_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(command, "diagnose", lambda *paths, **options: seen.append((paths, options)) or [])
    assert doctor("a.npy", "b", "--batch-size=8", "--num-workers=3", "--prefetch-factor=1", "--no-measure") == 0
    assert seen == [
        (
            ("a.npy", "b"),
            {"batch_size": 8, "num_workers": 3, "prefetch_factor": 1, "measure": False, "gpu": False},
        )
    ]


def test_the_table_has_the_gravest_first_and_keeps_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    command.print_table(FINDINGS)
    text = capsys.readouterr().out
    assert text.index("GPU [0]") < text.index("PCIe") < text.index("swap")
    assert "no [bold] driver" in text
    assert text.endswith("1 error, 1 warning, 0 hints\n")
