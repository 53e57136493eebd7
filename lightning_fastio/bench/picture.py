"""The picture of a benchmark: three bars."""

from __future__ import annotations

from pathlib import Path

from lightning_fastio.bench.measure import Benchmark
from lightning_fastio.drawing import new_figure

_COLORS = ("#c0504d", "#1f77b4", "#9e9e9e")
_LONGEST = 0.65
"""Share of the width that the longest bar takes; the rest is for its label."""


def draw(benchmark: Benchmark, path: str | Path) -> Path:
    """Draw a benchmark.

    Args:
        benchmark: What was measured.
        path: The PNG to write; its folder is made where there is none.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure("the picture", 7.2, 2.4)
    axes = figure.subplots()
    contenders = benchmark.contenders
    rates = [each.rows_per_s for each in contenders]
    bars = axes.barh([each.name for each in contenders], rates, color=_COLORS[: len(contenders)], height=0.6)
    labels = [
        f" {rate:,.0f} rows/s\n {1e3 * benchmark.batch_s(each):.3g} ms a batch"
        for rate, each in zip(rates, contenders, strict=True)
    ]
    axes.bar_label(bars, labels, fontsize="small")
    axes.set_xscale("log")
    least, most = min(rates) / 3, max(rates)
    axes.set_xlim(least, least * (most / least) ** (1 / _LONGEST))
    axes.invert_yaxis()
    axes.set_xlabel(f"rows of {benchmark.row_bytes:,} bytes per second, batches of {benchmark.batch_size}")
    axes.spines[["top", "right"]].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
