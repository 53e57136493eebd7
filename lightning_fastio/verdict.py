"""What a run was bound by, the evidence for it, and one thing to do about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_fastio.waits import WaitStats

Bound = Literal["COMPUTE-BOUND", "INPUT-BOUND", "COPY-BOUND", "START-UP-BOUND"]

SIGNIFICANT_FRACTION = 0.1
"""Share of the training time from which a wait is worth doing something about."""


@dataclass(frozen=True)
class LoaderFacts:
    """What advice needs to know about a loader."""

    name: str
    """Name of its class."""
    num_workers: int | None = None
    """Reader threads or worker processes; None where the loader has no such thing."""
    worker_type: Literal["thread", "process"] = "process"
    persistent_workers: bool = True
    """Whether workers live from one epoch to the next."""
    measures_itself: bool = False
    """Whether read and transform seconds are the loader's own busy time, as of a `BatchLoader`."""
    max_workers: int = 1
    """Workers that the CPU allowance has room for."""
    is_pinned: bool = True
    """Whether batches came in pinned memory."""
    slow_layout: str = ""
    """What in the files makes them slow to read, and what rewrites it; empty where there is nothing to gain."""


@dataclass(frozen=True)
class Verdict:
    """What training was bound by."""

    bound: Bound
    evidence: str
    """The numbers behind it."""
    advice: str
    """One concrete next step."""

    def __str__(self) -> str:
        return f"{self.bound}: {self.evidence}. {self.advice}"


def judge(waits: WaitStats, loader: LoaderFacts) -> Verdict | None:
    """What training was bound by; None where not a single step was taken."""
    steps = waits.steps
    total_s = float(steps["step_s"].sum())
    if total_s <= 0:
        return None
    first = steps["is_first"]
    steady = steps[~first]
    shares: dict[Bound, float] = {
        "START-UP-BOUND": float(steps["data_wait_s"][first].sum()) / total_s,
        "INPUT-BOUND": float(steady["data_wait_s"].sum()) / total_s,
        "COPY-BOUND": float(steady["copy_wait_s"].sum()) / total_s,
    }
    bound = max(shares, key=lambda name: shares[name])
    share = shares[bound]
    if share < SIGNIFICANT_FRACTION:
        return Verdict(
            "COMPUTE-BOUND",
            "of the training time, data waits took {}, copies {}, starts of epochs {}".format(
                *(format_percent(shares[name]) for name in ("INPUT-BOUND", "COPY-BOUND", "START-UP-BOUND"))
            ),
            "Data is not the limit: a faster step is what helps (mixed precision, torch.compile, a larger batch).",
        )
    if bound == "START-UP-BOUND":
        num_epochs = int(first.sum())
        evidence = (
            f"the first batches of {num_epochs} epochs took {format_percent(share)} of the time, "
            f"{format_seconds(share * total_s / max(1, num_epochs))} each"
        )
        return Verdict(bound, evidence, _advise_start(loader, num_epochs))
    if bound == "COPY-BOUND":
        evidence = (
            f"the device stood still {format_percent(share)} of the time for copies, which take "
            f"{format_seconds(float(steady['copy_s'].mean()))} per batch"
        )
        return Verdict(bound, evidence, _advise_copy(loader))
    return _judge_input(steady, share, loader)


def _judge_input(steady: np.ndarray, share: float, loader: LoaderFacts) -> Verdict:
    step_s = float(steady["step_s"].mean())
    compute_s = max(step_s - float(steady["data_wait_s"].mean()), 1e-6)
    read_s, transform_s = float(steady["read_s"].mean()), float(steady["transform_s"].mean())
    workers = loader.num_workers or 0
    # Workers that never idle need their number times the step for a batch.
    busy_s = read_s + transform_s if loader.measures_itself or not workers else workers * step_s
    needed = math.ceil(busy_s / compute_s)
    kind = "threads" if loader.worker_type == "thread" else "workers"
    work = "transforming" if transform_s > read_s else "reading" if loader.measures_itself else "loading"
    evidence = (
        f"steps waited {format_percent(share)} of the time for data; {work} takes {format_seconds(busy_s)} per batch "
        f"with {workers} {kind}, the rest of the step {format_seconds(compute_s)}"
    )
    if loader.num_workers is not None and workers < needed <= loader.max_workers:
        return Verdict("INPUT-BOUND", evidence, f"num_workers={needed} would hide it.")
    if loader.measures_itself and workers and needed <= workers:
        advice = (
            "Reading is fast enough to be hidden, so the threads waited for a CPU: something else uses the CPUs of "
            "this run, often torch itself (torch.set_num_threads, OMP_NUM_THREADS), or another process."
        )
        return Verdict("INPUT-BOUND", evidence, advice)
    if transform_s > read_s and loader.worker_type == "thread":
        advice = (
            "If the transform is Python code that holds the GIL, use "
            f'worker_type="process" with num_workers={loader.max_workers}; otherwise move it to the device, into '
            "on_after_batch_transfer."
        )
    elif loader.slow_layout:
        advice = f"{loader.slow_layout}."
    elif loader.measures_itself:
        advice = (
            f"More than the {loader.max_workers} CPUs of this run can hide: `fastio inspect` shows which fields are "
            "slow to read, and `fastio convert` rewrites them uncompressed."
        )
    elif loader.num_workers is not None and workers < loader.max_workers:
        advice = f"num_workers={loader.max_workers} helps; more than that this run has no CPUs for."
    else:
        advice = (
            "The loader cannot go faster on the CPUs of this run: read whole batches from arrays with "
            "NumpyDataModule, HDF5DataModule or ParquetDataModule (`fastio convert` writes the files)."
        )
    return Verdict("INPUT-BOUND", evidence, advice)


def _advise_start(loader: LoaderFacts, num_epochs: int) -> str:
    if loader.num_workers and loader.worker_type == "process":
        if not loader.persistent_workers and num_epochs > 1:
            return "persistent_workers=True starts the workers once instead of in each epoch."
        return 'Worker processes take long to start: fewer of them, or reader threads (worker_type="thread").'
    if num_epochs > 1:
        return "Epochs are short: repeat the data inside an epoch, so that there are fewer starts."
    return "Nothing to do for a long run: the start is paid once. Train longer before you compare speeds."


def _advise_copy(loader: LoaderFacts) -> str:
    if not loader.is_pinned:
        return "Batches are not pinned: pass pin_memory=True to the loader."
    return (
        "Send fewer bytes: keep images as uint8 and values as 16-bit floats in the batch, and convert them on the "
        "device in on_after_batch_transfer."
    )


def summary_table(waits: WaitStats, verdict: Verdict | None) -> RenderableType:
    """What is printed at the end of a fit: waits by stage, and the verdict."""
    table = Table(title="Data wait per batch", title_justify="left")
    for name in ("stage", "batches", "mean", "median", "95 %", "max", "share"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    steps = waits.steps
    total_s = float(steps["step_s"].sum())
    for stage, chosen in (("train", steps[~steps["is_first"]]), ("epoch start", steps[steps["is_first"]])):
        if len(chosen):
            wait_s = chosen["data_wait_s"]
            median_s, high_s = np.percentile(wait_s, [50, 95])
            numbers = map(format_seconds, (float(wait_s.mean()), float(median_s), float(high_s), float(wait_s.max())))
            table.add_row(stage, f"{len(chosen):,}", *numbers, format_percent(float(wait_s.sum()) / total_s))
    for stage, evaluation in waits.evaluations.items():
        mean_s = evaluation.data_wait_s / evaluation.num_batches
        share = evaluation.data_wait_s / evaluation.total_s if evaluation.total_s else 0.0
        row = (format_seconds(mean_s), "", "", format_seconds(evaluation.max_wait_s), format_percent(share))
        table.add_row(stage, f"{evaluation.num_batches:,}", *row)
    if verdict is None:
        return table
    text = Text.assemble((verdict.bound, "bold"), f": {verdict.evidence}. ", (verdict.advice, "italic"))
    return Group(table, text)


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that fits them."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def format_percent(fraction: float) -> str:
    """A share in percent."""
    return f"{fraction * 100:.1f} %"
