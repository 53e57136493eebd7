"""Contenders measured in turns, their medians, and the table that compares them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Role = Literal["today", "expert", "fastio", "limit"]
_COMPARED_WITH: tuple[Role, ...] = ("limit", "expert", "today")


@dataclass
class Contender:
    """One way to get batches."""

    name: str
    role: Role
    """What people do today, what an expert writes by hand, this package, or what the machine can do at best."""
    batches: Callable[[], Iterable[Any]]
    """Starts an epoch."""
    rates: list[float] = field(default_factory=list)
    """Rows per second of each round."""

    @property
    def rows_per_s(self) -> float:
        """The median of the rounds."""
        return median(self.rates)


@dataclass
class Comparison:
    """Contenders that deliver the same rows."""

    title: str
    row_bytes: int
    batch_size: int
    contenders: list[Contender]
    note: str = ""
    prepare: Callable[[], None] | None = None
    """Called before each measurement, without being timed."""

    def run(self, *, num_rounds: int = 5, round_s: float = 0.5) -> None:
        """Measure every contender once in each round, each for ``round_s`` seconds; the first round warms up."""
        for round_number in range(num_rounds + 1):
            for contender in self.contenders:
                if self.prepare is not None:
                    self.prepare()
                rate = _rate(contender.batches, round_s)
                if round_number:
                    contender.rates.append(rate)

    def times(self, contender: Contender, role: Role) -> float | None:
        """How many times as fast a contender is as the best one with a role; None if there is none.

        The median over the rounds of the ratio in a round, so that a noise that lasts for some rounds counts little.
        """
        others = [each.rates for each in self.contenders if each.role == role]
        best = [max(rates) for rates in zip(*others, strict=True)]
        return median(rate / other for rate, other in zip(contender.rates, best, strict=True)) if best else None

    def as_dict(self) -> dict[str, Any]:
        """Figures and ratios in types that JSON has."""
        contenders = [
            {
                "name": each.name,
                "role": each.role,
                "rows_per_s": each.rows_per_s,
                "rounds": each.rates,
                **{f"times_{role}": self.times(each, role) for role in _COMPARED_WITH},
            }
            for each in self.contenders
        ]
        figures = {"title": self.title, "row_bytes": self.row_bytes, "batch_size": self.batch_size, "note": self.note}
        return {**figures, "contenders": contenders}

    def show(self, console: Console) -> None:
        """Print the table."""
        table = Table(title=self.title, caption=self.note or None, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        table.title_justify = table.caption_justify = "left"
        table.add_column("", no_wrap=True)
        for heading in ("rows/s", "GB/s", "µs/batch", "x limit", "x expert", "x today"):
            table.add_column(heading, justify="right", no_wrap=True)
        for each in self.contenders:
            rate = each.rows_per_s
            table.add_row(
                each.name,
                _short(rate),
                f"{rate * self.row_bytes / 1e9:.3f}",
                f"{1e6 * self.batch_size / rate:,.0f}",
                *(_times(self.times(each, role)) for role in _COMPARED_WITH),
                style="bold" if each.role == "fastio" else None,
            )
        console.print(table)


def _rate(start_epoch: Callable[[], Iterable[Any]], duration_s: float) -> float:
    """Rows per second, the start of each epoch included."""
    num_rows, start = 0, perf_counter()
    while True:
        for batch in start_epoch():
            num_rows += _num_rows(batch)
            elapsed = perf_counter() - start
            if elapsed >= duration_s:
                return num_rows / elapsed


def _short(rate: float) -> str:
    return f"{rate / 1e6:.3g} M" if rate >= 1e6 else f"{rate / 1e3:.3g} k" if rate >= 1e3 else f"{rate:.0f}"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _num_rows(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


def run_all(comparisons: Iterable[Comparison], console: Console, **timing: Any) -> list[dict[str, Any]]:
    """Measure one comparison after the other, and print each table as soon as it is there."""
    figures = []
    for comparison in comparisons:
        comparison.run(**timing)
        comparison.show(console)
        figures.append(comparison.as_dict())
    return figures


def describe_machine() -> dict[str, Any]:
    """Where figures come from."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "date": date.today().isoformat(),
        "cpu": cpu,
        "cores": torch.get_num_threads(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
