"""Puts the figures of a run into the docs: the picture of the README, and the tables of docs/benchmarks.md.

python -m benchmarks formats cold rows memory plan --json docs/benchmarks.json
python -m benchmarks.publish
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_DOCS = Path(__file__).parent.parent / "docs"

# Readable on a light and on a dark page.
_TODAY, _FASTIO, _TEXT = "#c0605a", "#2f81d6", "#808890"


def draw(comparisons: list[dict[str, Any]], path: Path) -> None:
    """Draw what people do today and this package as shares of what memory allows.

    Args:
        comparisons: The figures under ``formats``.
        path: The SVG to write.
    """
    figure = Figure(figsize=(9, 0.62 * len(comparisons) + 0.9), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    for row, comparison in enumerate(comparisons):
        best = {each["role"]: each for each in reversed(comparison["contenders"])}
        for role, color, offset in (("today", _TODAY, -0.19), ("fastio", _FASTIO, 0.19)):
            each = best[role]
            share = each["times_limit"]
            gb_per_s = each["rows_per_s"] * comparison["row_bytes"] / 1e9
            text = (f"{gb_per_s:.2g} GB/s" if gb_per_s >= 0.01 else f"{1e3 * gb_per_s:.1g} MB/s") + (
                f", {each['times_today']:,.0f} times as much" if role == "fastio" else ""
            )
            axes.barh(row + offset, share, height=0.36, color=color)
            inside = share > 0.5
            axes.text(
                share + (-0.008 if inside else 0.008),
                row + offset,
                text,
                ha="right" if inside else "left",
                va="center",
                fontsize=8,
                color="white" if inside else _TEXT,
            )
    axes.axvline(1, color=_TEXT, linestyle="--", linewidth=1)
    axes.set_yticks(np.arange(len(comparisons)), [each["title"].rpartition(", batches")[0] for each in comparisons])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
    axes.set_xlabel("share of the rate at which memory gives shuffled rows", color=_TEXT, fontsize=9)
    axes.tick_params(colors=_TEXT, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    title = axes.set_title("sample by sample, as most projects read", color=_TODAY, fontsize=10, loc="left")
    title.set_fontweight("bold")
    axes.set_title("lightning_fastio", color=_FASTIO, fontsize=10, loc="right", weight="bold")
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def tables(figures: dict[str, Any]) -> str:
    """The figures as Markdown, with the machine they come from."""
    machine = figures["machine"]
    lines = [
        f"Measured on {machine['date']}: {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, torch "
        f"{machine['torch'].partition('+')[0]}."
    ]
    for name in ("formats", "rows", "cold"):
        for comparison in figures.get(name, ()):
            lines += ["", f"### {comparison['title']}", "", *_comparison_table(comparison)]
            lines += ["", f"{comparison['note'].capitalize()}."] if comparison["note"] else []
    if "memory" in figures:
        lines += ["", "### Memory and start-up", "", "| | first batch | peak memory |", "|---|--:|--:|"]
        for each in figures["memory"]:
            lines.append(f"| {each['name']} | {each['first_batch_s']:.2f} s | {each['peak_bytes'] >> 20} MiB |")
    if "plan" in figures:
        lines += ["", "### The order of a shuffled epoch", "", "| rows | start | a row | NumPy's permutation |"]
        lines.append("|--:|--:|--:|--:|")
        for each in figures["plan"]:
            numpy_ms = "" if each["numpy_start_s"] is None else f"{1e3 * each['numpy_start_s']:,.2f} ms"
            start_ms, row_ns = 1e3 * each["start_s"], 1e9 * each["row_s"]
            lines.append(f"| {each['rows']:,} | {start_ms:.2f} ms | {row_ns:.0f} ns | {numpy_ms} |")
    return "\n".join(lines)


def _comparison_table(comparison: dict[str, Any]) -> Iterator[str]:
    yield "| | rows/s | GB/s | of limit | x expert | x today |"
    yield "|---|--:|--:|--:|--:|--:|"
    for each in comparison["contenders"]:
        rate = each["rows_per_s"]
        ratios = [each[f"times_{role}"] for role in ("limit", "expert", "today")]
        cells = [each["name"], f"{rate:,.0f}", f"{rate * comparison['row_bytes'] / 1e9:.3f}"]
        cells += ["" if ratio is None else f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}" for ratio in ratios]
        mark = "**" if each["role"] == "fastio" else ""
        yield f"| {' | '.join(f'{mark}{cell}{mark}' if cell else '' for cell in cells)} |"


def main() -> None:
    """Rewrite picture and tables."""
    figures = json.loads((_DOCS / "benchmarks.json").read_text())
    draw(figures["formats"], _DOCS / "images" / "formats.svg")
    page = _DOCS / "benchmarks.md"
    between = re.compile(r"(<!-- figures -->\n).*(<!-- end of figures -->)", re.DOTALL)
    page.write_text(between.sub(lambda found: f"{found[1]}\n{tables(figures)}\n\n{found[2]}", page.read_text()))


if __name__ == "__main__":
    main()
