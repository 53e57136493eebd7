"""The page of a report: the verdict, the numbers, and the figures, in one file that needs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_fastio.report.figures import as_png, as_svg, histogram_figure, split_figure, steady, waits_figure
from lightning_fastio.report.record import Record
from lightning_fastio.verdict import format_percent, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURES: dict[str, tuple[str, Callable[[Sequence[Record]], Figure]]] = {
    "step": ("Where the time of a step goes", split_figure),
    "waits": ("Waits over the run: mean, and longest as a band", waits_figure),
    "histogram": ("How long steps wait", histogram_figure),
}

_STYLE = """
:root { color-scheme: light dark; --ink: #10161c; --paper: #ffffff; --soft: #f1f4f7; --line: #d5dbe1; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ea; --paper: #14181c; --soft: #1f252b; --line: #39424b; }
}
body { max-width: 54rem; margin: 2rem auto; padding: 0 1rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { background: var(--soft); border-left: 4px solid #2f81d6; padding: .6rem 1rem; margin: .6rem 0; }
.verdict b { display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
"""


def write_report(records: Sequence[Record], folder: str | Path) -> Path:
    """Write ``report.html``, and each figure as a PNG beside it.

    Args:
        records: One run, or several to compare.
        folder: Where the files go; made if it is not there.

    Returns:
        The page.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_verdicts(records), _numbers(records)]
    for name, (title, draw) in _FIGURES.items():
        figure = draw(records)
        parts.append(f"<h2>{title}</h2>\n{as_svg(figure, name)}")
        (folder / f"{name}.png").write_bytes(as_png(figure))
    title = escape(" and ".join(record.name for record in records))
    page = folder / "report.html"
    page.write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Data wait: {title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Data wait of {title}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return page


def _verdicts(records: Sequence[Record]) -> str:
    boxes = []
    for record in records:
        verdict = record.verdict
        if verdict is not None:
            whose = f"{escape(record.name)}: " if len(records) > 1 else ""
            text = f"{escape(verdict.evidence)}. <i>{escape(verdict.advice)}</i>"
            boxes.append(f'<div class="verdict"><b>{whose}{verdict.bound}</b>{text}</div>')
    return "\n".join(boxes)


def _numbers(records: Sequence[Record]) -> str:
    heads = ["run", "batches", "step", "wait", "median", "95 %", "longest", "share", "rows/s"]
    rows = []
    for record in records:
        steps = steady(record)
        wait_s, total_s = steps["data_wait_s"], float(steps["step_s"].sum())
        median_s, high_s = np.percentile(wait_s, [50, 95]) if len(wait_s) else (0.0, 0.0)
        rows.append(
            [
                escape(record.name),
                f"{len(record.steps):,}",
                *(
                    format_seconds(float(seconds))
                    for seconds in (
                        total_s / max(1, len(steps)),
                        wait_s.mean() if len(wait_s) else 0.0,
                        median_s,
                        high_s,
                        wait_s.max(initial=0.0),
                    )
                ),
                format_percent(float(wait_s.sum()) / total_s if total_s else 0.0),
                f"{float(steps['num_rows'].sum()) / total_s if total_s else 0.0:,.0f}",
            ]
        )
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
