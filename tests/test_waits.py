"""Waits of each step, metrics, the verdict and its advice."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightning_fastio.staging import CopyTimes
from lightning_fastio.verdict import LoaderFacts, Verdict, judge, summary_table
from lightning_fastio.waits import STEP, WaitStats


def steps(num_steps: int, *, first_wait_s: float = 0.0, waits: WaitStats | None = None, **values: Any) -> WaitStats:
    """An epoch whose steps are all alike but for the first wait."""
    waits = waits or WaitStats()
    record = {"data_wait_s": 0.0, "step_s": 0.01, "num_rows": 4, **values}
    for number in range(num_steps):
        is_first = number == 0
        wait_s = first_wait_s if is_first else record["data_wait_s"]
        step_s = record["step_s"] + (first_wait_s if is_first else 0.0)
        waits.add(**{**record, "data_wait_s": wait_s, "step_s": step_s}, is_first=is_first)
    return waits


def verdict_of(waits: WaitStats, **facts: Any) -> Verdict:
    verdict = judge(waits, LoaderFacts("DataLoader", **facts))
    assert verdict is not None
    return verdict


# Records


def test_records_are_kept_beyond_the_first_block() -> None:
    waits = WaitStats()
    for number in range(1000):
        waits.add(data_wait_s=number, step_s=number + 1, num_rows=number, is_first=number == 0, epoch=2)
    assert waits.steps.dtype == STEP
    assert waits.steps["data_wait_s"].tolist() == list(range(1000))
    assert waits.steps["step"].tolist() == list(range(1000))
    assert set(waits.steps["epoch"]) == {2}
    assert waits.data_wait_fraction == pytest.approx(sum(range(1000)) / sum(range(1, 1001)))


def test_copy_times_come_later_and_in_order() -> None:
    waits = WaitStats()
    for number in range(4):
        waits.add(data_wait_s=0, step_s=1, num_rows=1, is_first=number == 0, is_copied=number > 0)
    waits.add_copies([CopyTimes(0.1, 0.01), CopyTimes(0.2, 0.02)])
    waits.add_copies([])
    waits.add_copies([CopyTimes(0.3, 0.03)])
    assert waits.steps["copy_s"].tolist() == [0.0, 0.1, 0.2, 0.3]
    assert waits.steps["copy_wait_s"].tolist() == [0.0, 0.01, 0.02, 0.03]


def test_copies_that_an_epoch_did_not_report_are_not_those_of_the_next() -> None:
    waits = WaitStats()
    for is_first in (True, False, True, False):
        waits.add(data_wait_s=0, step_s=1, num_rows=1, is_first=is_first, is_copied=True)
    waits.add_copies([CopyTimes(0.3, 0.0), CopyTimes(0.4, 0.0)])
    assert waits.steps["copy_s"].tolist() == [0.0, 0.0, 0.3, 0.4]


# Metrics


def test_metrics_are_means_since_the_last_log() -> None:
    waits = WaitStats()
    for wait_s in (1.0, 3.0):
        waits.add(data_wait_s=wait_s, step_s=10.0, num_rows=20, is_first=False, read_s=wait_s / 2)
    assert waits.since_last_log() == {
        "fastio/data_wait_s": 2.0,
        "fastio/data_wait_max_s": 3.0,
        "fastio/data_wait_fraction": 0.2,
        "fastio/copy_wait_s": 0.0,
        "fastio/step_s": 10.0,
        "fastio/read_s": 1.0,
        "fastio/samples_per_s": 2.0,
    }
    assert waits.since_last_log() == {}
    waits.add(data_wait_s=5.0, step_s=10.0, num_rows=20, is_first=False)
    assert waits.since_last_log()["fastio/data_wait_s"] == 5.0


def test_the_first_batch_is_a_metric_of_its_own() -> None:
    waits = steps(1, first_wait_s=7.0)
    assert waits.since_last_log() == {"fastio/first_batch_wait_s": 7.0}
    waits = steps(3, first_wait_s=7.0, data_wait_s=0.001)
    metrics = waits.since_last_log()
    assert metrics["fastio/first_batch_wait_s"] == 7.0
    assert metrics["fastio/data_wait_max_s"] == 0.001


# Verdict


def test_no_steps_no_verdict() -> None:
    assert judge(WaitStats(), LoaderFacts("DataLoader")) is None


def test_compute_bound() -> None:
    verdict = verdict_of(steps(50, data_wait_s=0.0005))
    assert verdict.bound == "COMPUTE-BOUND"
    assert verdict.evidence == "of the training time, data waits took 4.9 %, copies 0.0 %, starts of epochs 0.0 %"


def test_input_bound_names_the_workers_that_would_hide_it() -> None:
    # 31 ms of reading in 2 threads; 12 ms of step besides the wait.
    waits = steps(50, data_wait_s=0.0035, step_s=0.0155, read_s=0.031)
    verdict = verdict_of(waits, num_workers=2, worker_type="thread", measures_itself=True, max_workers=8)
    assert verdict.bound == "INPUT-BOUND"
    assert "reading takes 31 ms per batch with 2 threads, the rest of the step 12 ms" in verdict.evidence
    assert verdict.advice == "num_workers=3 would hide it."


def test_threads_that_wait_for_a_cpu_are_not_told_to_read_faster() -> None:
    waits = steps(50, data_wait_s=0.002, step_s=0.006, read_s=0.000016)
    verdict = verdict_of(waits, num_workers=1, worker_type="thread", measures_itself=True, max_workers=2)
    assert verdict.bound == "INPUT-BOUND"
    assert verdict.advice.startswith("Reading is fast enough to be hidden, so the threads waited for a CPU")


def test_work_of_other_loaders_is_told_from_the_step() -> None:
    # In this process a batch takes what fetching took; workers that never idle take their number times the step.
    inline = verdict_of(steps(50, data_wait_s=0.03, step_s=0.04, read_s=0.035), num_workers=0, max_workers=8)
    assert inline.advice == "num_workers=4 would hide it."
    workers = verdict_of(steps(50, data_wait_s=0.03, step_s=0.04, read_s=0.001), num_workers=2, max_workers=8)
    assert workers.advice == "num_workers=8 would hide it."


def test_beyond_the_cpus_the_advice_is_another() -> None:
    slow = steps(50, data_wait_s=0.09, step_s=0.1, read_s=0.2)
    reading = verdict_of(slow, num_workers=2, worker_type="thread", measures_itself=True, max_workers=2)
    assert "fastio convert" in reading.advice
    hint = "Field 'image': lists decode value by value"
    stored = verdict_of(
        slow, num_workers=2, worker_type="thread", measures_itself=True, max_workers=2, slow_layout=hint
    )
    assert stored.advice == f"{hint}."
    plain = verdict_of(slow, num_workers=2, max_workers=2)
    assert "NumpyDataModule" in plain.advice
    some = verdict_of(slow, num_workers=2, max_workers=4)
    assert some.advice.startswith("num_workers=4 helps")
    unknown = verdict_of(slow)
    assert "NumpyDataModule" in unknown.advice


def test_slow_transforms_are_told_from_slow_reading() -> None:
    waits = steps(50, data_wait_s=0.09, step_s=0.1, read_s=0.01, transform_s=0.3)
    verdict = verdict_of(waits, num_workers=4, worker_type="thread", measures_itself=True, max_workers=4)
    assert "transforming takes 310 ms" in verdict.evidence
    assert 'worker_type="process"' in verdict.advice


@pytest.mark.parametrize(("is_pinned", "advice"), [(False, "pin_memory=True"), (True, "Send fewer bytes")])
def test_copy_bound(is_pinned: bool, advice: str) -> None:
    waits = WaitStats()
    for number in range(50):
        waits.add(data_wait_s=0.0, step_s=0.01, num_rows=4, is_first=number == 0, is_copied=True)
    waits.add_copies([CopyTimes(0.004, 0.003)] * 50)
    verdict = verdict_of(waits, is_pinned=is_pinned)
    assert verdict.bound == "COPY-BOUND"
    assert "4 ms per batch" in verdict.evidence
    assert advice in verdict.advice


@pytest.mark.parametrize(
    ("facts", "num_epochs", "advice"),
    [
        ({"num_workers": 2, "persistent_workers": False}, 3, "persistent_workers=True"),
        ({"num_workers": 2}, 3, 'worker_type="thread"'),
        ({"num_workers": 0}, 3, "Epochs are short"),
        ({"num_workers": 0}, 1, "Nothing to do"),
    ],
)
def test_start_up_bound(facts: dict[str, Any], num_epochs: int, advice: str) -> None:
    waits = WaitStats()
    for _ in range(num_epochs):
        steps(5, first_wait_s=0.5, waits=waits)
    verdict = verdict_of(waits, **facts)
    assert verdict.bound == "START-UP-BOUND"
    assert f"the first batches of {num_epochs} epochs" in verdict.evidence
    assert "500 ms each" in verdict.evidence
    assert advice in verdict.advice


def test_the_table_shows_every_stage_and_fits_a_terminal() -> None:
    waits = steps(101, first_wait_s=1.5, data_wait_s=0.004)
    waits.add_evaluation("validate", 0.2, 0.4)
    waits.add_evaluation("validate", 0.0, 0.4)
    text = io.StringIO()
    verdict = verdict_of(waits, num_workers=0, max_workers=4)
    Console(file=text, width=80).print(summary_table(waits, verdict))
    lines = text.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    (train,) = (line for line in lines if line.startswith("│ train"))
    assert [cell.strip() for cell in train.split("│")[2:7]] == ["100", "4 ms", "4 ms", "4 ms", "4 ms"]
    (first,) = (line for line in lines if line.startswith("│ epoch start"))
    assert "1.50 s" in first
    (validate,) = (line for line in lines if line.startswith("│ validate"))
    assert [cell.strip() for cell in validate.split("│")[2:8]] == ["2", "100 ms", "", "", "200 ms", "25.0 %"]
    assert verdict.bound in text.getvalue()


def test_shares_are_of_the_whole_training_time() -> None:
    waits = steps(11, first_wait_s=0.1, data_wait_s=0.005)
    total_s = float(waits.steps["step_s"].sum())
    assert total_s == pytest.approx(0.11 + 0.1)
    assert waits.data_wait_fraction == pytest.approx((0.1 + 10 * 0.005) / total_s)
    assert np.isclose(waits.steps["data_wait_s"][0], 0.1)
