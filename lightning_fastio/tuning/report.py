"""`Tuning`: what was found, as a table, as YAML, and in a data module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.tuning.race import ENOUGH
from lightning_fastio.tuning.search import Tried
from lightning_fastio.tuning.settings import Settings
from lightning_fastio.tuning.step import Step


@dataclass(frozen=True)
class Tuning:
    """Loader settings that suit a machine, a data module and a model, and what was measured to find them."""

    settings: Settings
    """The cheapest that are as fast as the fastest, or clearly faster than the step."""
    decided: tuple[str, ...]
    """Names of the settings that were decided; the others are as they were."""
    rows_per_s: float
    """Rows that the loader gives per second with these settings."""
    step: Step | None
    """The training step; None without a model."""
    tried: Sequence[Tried]
    """Loader settings that were measured, in this order."""
    steps: Sequence[Step]
    """Batch sizes that were measured."""
    notes: Sequence[str]
    """What was left out and why."""

    @property
    def changes(self) -> dict[str, Any]:
        """Arguments of the data module that were decided, by name."""
        return {name: value for name, value in asdict(self.settings).items() if name in self.decided}

    @property
    def headroom(self) -> float | None:
        """How many times faster the loader is than the step; None without a model."""
        return None if self.step is None else self.rows_per_s / self.step.rows_per_s

    def apply(self, datamodule: FastIODataModule) -> None:
        """Set a data module to what was found, from its next loader on."""
        datamodule.configure(**self.changes)

    def save(self, path: str | Path) -> Path:
        """Write YAML that LightningCLI takes after your own: ``fastio fit -c config.yaml -c tuned.yaml``."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Numbers, booleans and names: JSON writes them as YAML does.
        lines = [f"  {name}: {json.dumps(value)}" for name, value in self.changes.items()]
        path.write_text("\n".join([f"# {self.verdict}.", "data:", *lines, ""]))
        return path

    def as_dict(self) -> dict[str, Any]:
        """Everything in types that JSON has."""
        return {
            "settings": self.changes,
            "rows_per_s": self.rows_per_s,
            "step": None if self.step is None else {**asdict(self.step), "rows_per_s": self.step.rows_per_s},
            "headroom": self.headroom,
            "verdict": self.verdict,
            "tried": [
                {
                    **asdict(each.settings),
                    "rows_per_s": each.rows_per_s,
                    "rounds": [one.rows_per_s for one in each.measurements],
                    "cpu_s_per_s": _cpus(each),
                    "memory_bytes": _memory(each),
                    "obstacle": each.obstacle,
                }
                for each in self.tried
            ],
            "batch_sizes": [{**asdict(each), "rows_per_s": each.rows_per_s} for each in self.steps],
            "notes": list(self.notes),
        }

    @property
    def verdict(self) -> str:
        """What the step needs against what the loader gives, in a sentence."""
        gives = f"The loader gives {self.rows_per_s:,.0f} rows/s with {self.settings}"
        if self.step is None or self.headroom is None:
            return f"{gives}; without a model it is not known what the step needs"
        needs = f"the step takes {self.step.rows_per_s:,.0f} ({1e3 * self.step.step_s:.3g} ms a batch)"
        if self.headroom >= ENOUGH:
            return f"{gives}, {needs}: {_round(self.headroom)} times what it needs"
        if self.headroom >= 1:
            return f"{gives}, {needs}: just enough, so that a busy machine may make it wait"
        return f"{gives}, {needs}: it waits for data {1 - self.headroom:.0%} of the time"

    def report(self) -> RenderableType:
        """Tables of what was measured, the settings, and the verdict, for a rich console."""
        parts: list[RenderableType] = []
        if self.steps:
            parts.append(_table_of_steps(self.steps, self.settings.batch_size))
        parts.append(_table_of_loaders(self.tried, self.settings))
        parts += [Text(note, style="dim") for note in self.notes]
        parts.append(Text(f"{self.verdict}."))
        parts.append(Text(", ".join(f"{name}={value!r}" for name, value in self.changes.items()), style="bold"))
        return Group(*parts)


def _table_of_steps(steps: Sequence[Step], chosen: int) -> Table:
    table = Table(title="Training step", title_justify="left")
    for heading in ("batch size", "ms", "rows/s"):
        table.add_column(heading, justify="right")
    for step in steps:
        numbers = (f"{1e3 * step.step_s:.3g}", f"{step.rows_per_s:,.0f}") if step.fits else ("out of memory", "")
        table.add_row(f"{step.batch_size:,}", *numbers, style="bold" if step.batch_size == chosen else None)
    return table


def _table_of_loaders(tried: Sequence[Tried], chosen: Settings) -> Table:
    table = Table(title="Loader", title_justify="left")
    table.add_column("workers x prefetch")
    for heading in ("rows/s", "CPUs", "MiB", "rounds"):
        table.add_column(heading, justify="right")
    for each in tried:
        style = "bold" if each.settings == chosen else "dim" if each.is_out else None
        if each.obstacle:
            table.add_row(str(each.settings), "cannot run", style="dim")
            continue
        numbers = (f"{each.rows_per_s:,.0f}", f"{_cpus(each):.1f}", f"{_memory(each) / 2**20:,.0f}")
        table.add_row(str(each.settings), *numbers, str(len(each.measurements)), style=style)
    return table


def _cpus(tried: Tried) -> float:
    return median(each.cpu_s_per_s for each in tried.measurements) if tried.measurements else 0.0


def _memory(tried: Tried) -> int:
    return max((each.memory_bytes for each in tried.measurements), default=0)


def _round(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.1f}"
