"""What PrefetchCallback gains and costs, whether its advice helps, and how well reader threads adjust themselves.

Loaders and steps block for a set time, as a disk or a GPU would, so that the figures do not depend on the machine.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from lightning_fastio import BatchLoader, PrefetchCallback, open_reader

_COST_STEPS = 2000
_NUM_CPUS = 8
"""Blocked threads need no CPU: as many as here may be used wherever it runs."""


class Blocks(LightningModule):
    """A step that takes a set time; notes when each began."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step_s = step_s
        self.began: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.began.append(perf_counter())
        if self.step_s:
            sleep(self.step_s)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class SlowRows(Dataset[torch.Tensor]):
    """Each row takes a set time to read."""

    def __init__(self, num_rows: int, row_s: float) -> None:
        self.num_rows, self.row_s = num_rows, row_s

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        sleep(self.row_s)
        return torch.zeros(4)


class InMemory:
    """The same batch again and again, for nothing."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.batch = {"x": torch.zeros(256, 64), "y": torch.zeros(256)}

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.num_batches))


def train(loader: Iterable[Any], step_s: float, callback: PrefetchCallback | None, max_epochs: int = 1) -> Blocks:
    """Train quietly."""
    module = Blocks(step_s)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module


def run(folder: Path, console: Console) -> dict[str, Any]:
    """Measure all of it; about two minutes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    with mock.patch("lightning_fastio.callbacks.prefetch.cpu_allowance", return_value=_NUM_CPUS):
        return {
            "overlap": _overlap(console),
            "cost": _cost(folder, console),
            "advice": _advice(console),
            "adjusting": _adjusting(folder, console),
        }


def _overlap(console: Console) -> list[dict[str, float]]:
    table = Table(title="A step of 10 ms behind a loader in the same process", title_justify="left")
    for heading in ("batch takes, ms", "step without", "step with", "wait left"):
        table.add_column(heading, justify="right")
    figures = []
    for batch_ms in (2, 5, 9, 20):
        times_ms = {}
        callback = PrefetchCallback(summary=False)
        for name, used in (("without", None), ("with", callback)):
            module = train(DataLoader(SlowRows(400, batch_ms / 4e3), batch_size=4), 0.010, used)
            times_ms[name] = 1e3 * float(np.median(np.diff(module.began)))
        wait_ms = 1e3 * float(np.median(callback.waits["data_wait_s"][2:]))
        figures.append({"batch_ms": batch_ms, **times_ms, "wait_ms": wait_ms})
        table.add_row(str(batch_ms), f"{times_ms['without']:.1f}", f"{times_ms['with']:.1f}", f"{wait_ms:.2f}")
    console.print(table)
    return figures


def _cost(folder: Path, console: Console) -> dict[str, float]:
    """CPU time of the training thread for each step, with the callback less without it.

    A thread that waits gives its core away; where that core sleeps meanwhile, as a virtual one does, the thread goes on
    with cold caches. On a single core none sleeps, so that what the callback itself takes is seen.
    """
    table = Table(title="Cost of the callback, CPU time of the training thread", title_justify="left")
    for heading in ("loader", "µs per step"):
        table.add_column(heading)
    cores = os.sched_getaffinity(0)
    figures = {}
    for name, used in (("any, both threads on one core", {min(cores)}), ("any, two cores", cores)):
        os.sched_setaffinity(0, used)
        figures[name] = _cost_us(lambda: InMemory(_COST_STEPS))
        os.sched_setaffinity(0, cores)
    np.save(folder / "cost.npy", np.zeros((_COST_STEPS * 256, 64), np.float32))
    reader = open_reader(folder / "cost.npy")
    figures["reader threads, two cores"] = _cost_us(lambda: BatchLoader(reader, 256, num_workers=2))
    for name, cost_us in figures.items():
        table.add_row(name, f"{cost_us:.0f}")
    console.print(table)
    return figures


def _cost_us(make_loader: Callable[[], Iterable[Any]]) -> float:
    rounds = []
    for _ in range(5):
        seconds = []
        for callback in (None, PrefetchCallback(summary=False)):
            loader = make_loader()
            began = thread_time()
            train(loader, 0.0, callback)
            seconds.append(thread_time() - began)
        rounds.append((seconds[1] - seconds[0]) / _COST_STEPS * 1e6)
    return median(rounds)


def _advice(console: Console) -> list[dict[str, Any]]:
    table = Table(title="Advice, followed", title_justify="left")
    for heading in ("situation", "verdict", "advice", "wait before", "wait after"):
        table.add_column(heading)
    figures = []
    situations: tuple[tuple[str, dict[str, Any], int, int], ...] = (
        ("slow dataset in the process", {"num_workers": 0}, 240, 1),
        ("too few workers", {"num_workers": 1}, 480, 1),
        ("workers start in each epoch", {"num_workers": 1, "worker_init_fn": _start_slowly}, 64, 6),
    )
    for name, options, num_rows, num_epochs in situations:
        row_s = 0.0075 if num_epochs == 1 else 0.001
        before, after = PrefetchCallback(summary=False), PrefetchCallback(summary=False)
        train(DataLoader(SlowRows(num_rows, row_s), batch_size=4, **options), 0.012, before, num_epochs)
        verdict = before.verdict()
        assert verdict is not None
        workers = re.search(r"num_workers=(\d+) would", verdict.advice)
        options |= {"num_workers": int(workers[1])} if workers else {"persistent_workers": True}
        train(DataLoader(SlowRows(num_rows, row_s), batch_size=4, **options), 0.012, after, num_epochs)
        shares = [callback.wait_stats.data_wait_fraction for callback in (before, after)]
        figures.append({"situation": name, "verdict": str(verdict), "before": shares[0], "after": shares[1]})
        table.add_row(name, verdict.bound, verdict.advice, *(f"{share:.0%}" for share in shares))
    console.print(table)
    return figures


def _start_slowly(worker: int) -> None:
    """As workers do that import much, or open many files."""
    sleep(0.3)


def _adjusting(folder: Path, console: Console) -> list[dict[str, Any]]:
    np.save(folder / "rows.npy", np.zeros((2400, 4), np.float32))
    table = Table(title="Step of 10 ms: median of steps 200 to 300, in ms", title_justify="left")
    numbers = (1, 2, 4, 8)
    for heading in ("reader", *(f"{number} threads" for number in numbers), "auto", "auto / best"):
        table.add_column(heading, justify="left" if heading == "reader" else "right")
    figures = []
    for name, times_ms in (("fast, 3 ms", (3, 3)), ("slow, 35 ms", (35, 35)), ("3 ms, then 35 ms", (3, 35))):
        steps_ms = [_step_ms(folder, times_ms, number) for number in (*numbers, "auto")]
        ratio = steps_ms[-1] / min(steps_ms[:-1])
        figures.append({"reader": name, "step_ms": dict(zip((*numbers, "auto"), steps_ms, strict=True))})
        table.add_row(name, *(f"{each:.1f}" for each in steps_ms), f"{ratio:.2f}")
    console.print(table)
    return figures


def _step_ms(folder: Path, times_ms: tuple[float, float], num_workers: Any) -> float:
    num_read = 0

    def read(batch: Any) -> Any:
        nonlocal num_read
        num_read += 1
        sleep(times_ms[num_read > 100] / 1e3)
        return batch

    loader = BatchLoader(open_reader(folder / "rows.npy"), 8, num_workers=num_workers, transform=read)
    module = train(loader, 0.010, PrefetchCallback(summary=False))
    loader.close()
    return 1e3 * float(np.median(np.diff(module.began)[200:300]))
