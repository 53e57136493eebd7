"""What the order of an epoch costs, from 10^3 to 10^9 rows."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_fastio.plan.order import GlobalShuffle

_BATCH_SIZE = 256
_NUM_BATCHES = 4000
_MOST_ROWS_IN_RAM = 10**8
"""NumPy's permutation of more rows needs several GB."""


def run(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Measure the global shuffle against `numpy.random.Generator.permutation`."""
    table = Table(title="The order of a shuffled epoch", title_justify="left")
    for heading in ("rows", "start of the epoch [ms]", "per row [ns]", "NumPy: start of the epoch [ms]"):
        table.add_column(heading, justify="right")
    figures = []
    for exponent in range(3, 10):
        num_rows = 10**exponent
        rounds = [_measure(num_rows, seed) for seed in range(3)]
        start_s, row_s = median(each[0] for each in rounds), median(each[1] for each in rounds)
        numpy_s = _measure_numpy(num_rows) if num_rows <= _MOST_ROWS_IN_RAM else None
        figures.append({"rows": num_rows, "start_s": start_s, "row_s": row_s, "numpy_start_s": numpy_s})
        numpy_ms = "not tried" if numpy_s is None else f"{1e3 * numpy_s:,.2f}"
        table.add_row(f"{num_rows:,}", f"{1e3 * start_s:,.2f}", f"{1e9 * row_s:.0f}", numpy_ms)
    console.print(table)
    return figures


def _measure(num_rows: int, seed: int) -> tuple[float, float]:
    """Seconds to the first batch, and seconds per row of the batches after it."""
    start = perf_counter()
    order = GlobalShuffle(num_rows, seed)
    order.take(0, min(_BATCH_SIZE, num_rows))
    started = perf_counter()
    num_batches = max(1, min(_NUM_BATCHES, num_rows // _BATCH_SIZE))
    for batch in range(num_batches):
        order.take(batch * _BATCH_SIZE, (batch + 1) * _BATCH_SIZE)
    return started - start, (perf_counter() - started) / (num_batches * _BATCH_SIZE)


def _measure_numpy(num_rows: int) -> float:
    start = perf_counter()
    np.random.default_rng(0).permutation(num_rows)
    return perf_counter() - start
