"""The picture of the demo: how long each training step waited for its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_fastio.drawing import new_figure

_PLAIN, _FASTIO = "#c0504d", "#1f77b4"


def plot_waits(waits_s: Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]], path: Path) -> Path:
    """Draw one panel per format.

    Args:
        waits_s: Format to seconds waited in each step, with the plain loader and with the package.
        path: The PNG to write.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure("the plot", 3.6 * len(waits_s), 3.6)
    panels = figure.subplots(1, len(waits_s), sharey=True, squeeze=False)[0]
    for axes, (name, (plain, fastio)) in zip(panels, waits_s.items(), strict=True):
        for series, color, label in ((plain, _PLAIN, "plain DataLoader"), (fastio, _FASTIO, "lightning_fastio")):
            # The first batch starts threads and opens files; it would set the scale alone.
            milliseconds = 1e3 * series[1:]
            axes.plot(np.arange(2, len(series) + 1), milliseconds, ".", color=color, markersize=3, alpha=0.5)
            median = float(np.median(milliseconds))
            axes.axhline(median, color=color, label=f"{label}, median {median:.2g} ms")
        axes.set_title(name)
        axes.set_xlabel("training step")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize="small", frameon=False)
    panels[0].set_ylabel("time a step waits for data [ms]")
    figure.savefig(path, dpi=150)
    return path
