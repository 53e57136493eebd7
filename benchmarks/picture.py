"""Draws the picture of the README from the figures of `python -m benchmarks formats --json`.

python -m benchmarks.picture docs/benchmarks.json docs/images/formats.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

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
            text = f"{gb_per_s:.2g} GB/s" + (f", {each['times_today']:,.0f} times as much" if role == "fastio" else "")
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
    title.set_weight("bold")
    axes.set_title("lightning_fastio", color=_FASTIO, fontsize=10, loc="right", weight="bold")
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["formats"], Path(sys.argv[2]))
