"""The picture of the demo: how long each training step waited for its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import MissingDependencyError

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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'the plot needs matplotlib, which is not installed: pip install "lightning_fastio[demo]"'
        ) from error
    figure = Figure(figsize=(3.6 * len(waits_s), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(waits_s), sharey=True, squeeze=False)[0]
    for axes, (name, (plain, fastio)) in zip(panels, waits_s.items(), strict=True):
        for series, color, label in ((plain, _PLAIN, "plain DataLoader"), (fastio, _FASTIO, "lightning_fastio")):
            # The first batch starts threads and opens files; it would set the scale alone.
            steps = np.arange(1, len(series))
            axes.plot(steps, 1e3 * series[1:], color=color, linewidth=0.8, alpha=0.9, label=label)
        axes.set_title(name)
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
        axes.set_yscale("log")
    panels[0].set_ylabel("data wait [ms]")
    panels[0].legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=150)
    return path
