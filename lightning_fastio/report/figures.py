"""What a report draws: where the time of a step goes, waits over the run, and how they are distributed."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.drawing import new_figure
from lightning_fastio.report.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#10161c"
"""Colour of text and lines, for which a page puts its own."""
# Told apart on a light and on a dark page, and by people who do not tell red from green.
_RUN_COLORS = ("#2f81d6", "#d4812a", "#8a63c9", "#2f9e8f")
_PARTS = (("waiting for data", "#d1495b"), ("waiting for the copy", "#e0a030"), ("computing", "#2f81d6"))
_MAX_POINTS = 400


def steady(record: Record) -> npt.NDArray[Any]:
    """The steps without the first of each epoch; all of them where there are no others."""
    others = record.steps[~record.steps["is_first"]]
    return others if len(others) else record.steps


def split_figure(records: Sequence[Record]) -> Figure:
    """One bar per run: how a mean step is split into waiting for data, waiting for the copy, and computing."""
    figure = _new_figure(0.9 + 0.6 * len(records))
    axes = figure.subplots()
    for row, record in enumerate(records):
        left = 0.0
        for (label, color), milliseconds in zip(_PARTS, step_parts_ms(record), strict=True):
            axes.barh(row, milliseconds, left=left, height=0.6, color=color, label=label if row == 0 else None)
            left += milliseconds
        axes.text(left, row, f"  {left:.3g} ms", va="center", color=_INK)
    axes.set_yticks(range(len(records)), [record.name for record in records])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("mean step, first batches of epochs left out [ms]")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=_INK)
    _finish(axes, grid="x")
    return figure


def waits_figure(records: Sequence[Record]) -> Figure:
    """Waits over the steps of the run, as the mean and the longest of neighbouring steps."""
    figure = _new_figure(3.2)
    axes = figure.subplots()
    for record, color in zip(records, _cycle(records), strict=True):
        number, mean_ms, max_ms = binned_waits(record)
        axes.fill_between(number, mean_ms, max_ms, color=color, alpha=0.25, linewidth=0)
        axes.plot(number, mean_ms, color=color, linewidth=1.5, label=record.name)
    axes.set_xlabel("training batch")
    axes.set_ylabel("wait for data [ms]")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=_INK)
    _finish(axes, grid="y")
    return figure


def histogram_figure(records: Sequence[Record]) -> Figure:
    """How long steps wait, as shares of all steps."""
    figure = _new_figure(3.2)
    axes = figure.subplots()
    waits = [np.maximum(steady(record)["data_wait_s"] * 1e3, 1e-3) for record in records]
    low, high = min(map(np.min, waits)), max(map(np.max, waits))
    edges = np.geomspace(low, max(high, low * 1.01), 41)
    for record, wait_ms, color in zip(records, waits, _cycle(records), strict=True):
        share = np.full(len(wait_ms), 100 / len(wait_ms))
        axes.hist(wait_ms, edges.tolist(), weights=share, color=color, alpha=0.6, label=record.name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda milliseconds, _: f"{milliseconds:g}")
    axes.set_xlabel("wait for data [ms]")
    axes.set_ylabel("share of steps [%]")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=_INK)
    _finish(axes, grid="y")
    return figure


def step_parts_ms(record: Record) -> tuple[float, float, float]:
    """Milliseconds of a mean step: waiting for data, waiting for the copy, the rest."""
    steps = steady(record)
    if not len(steps):
        return 0.0, 0.0, 0.0
    wait_s, copy_s, step_s = (float(steps[name].mean()) for name in ("data_wait_s", "copy_wait_s", "step_s"))
    # The device waits for a copy while the host may be ahead of it, so its wait is a part of the rest at most.
    copy_s = min(copy_s, step_s - wait_s)
    return 1e3 * wait_s, 1e3 * copy_s, 1e3 * (step_s - wait_s - copy_s)


def binned_waits(record: Record) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Number, mean wait and longest wait of neighbouring steps, in milliseconds; all steps where they are few."""
    steps = record.steps
    numbers = np.flatnonzero(~steps["is_first"])
    numbers = numbers if len(numbers) else np.arange(len(steps))
    groups = np.array_split(numbers, max(1, min(len(numbers), _MAX_POINTS)))
    waits_ms = [1e3 * steps["data_wait_s"][group] for group in groups]
    return (
        np.array([group.mean() + 1 for group in groups]),
        np.array([wait_ms.mean() for wait_ms in waits_ms]),
        np.array([wait_ms.max() for wait_ms in waits_ms]),
    )


def as_svg(figure: Figure, name: str) -> str:
    """The drawing for a page, in the text colour of the page and without a background.

    Args:
        figure: The drawing.
        name: Keeps the ids inside from meeting those of other drawings on the page.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Names of parts, such as patch_1, are the same in all drawings, and nothing refers to them.
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)


def as_png(figure: Figure) -> bytes:
    """The drawing as a picture on white."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150, facecolor="white")
    return data.getvalue()


def _new_figure(height: float) -> Figure:
    return new_figure("a report", 8, height)


def _finish(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color=_INK, alpha=0.15)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, length=0)
    axes.spines[:].set_visible(False)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_INK)


def _cycle(records: Sequence[Record]) -> list[str]:
    return [_RUN_COLORS[number % len(_RUN_COLORS)] for number in range(len(records))]
