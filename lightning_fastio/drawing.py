"""What all drawings of this package start with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastio.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(what: str, width: float, height: float) -> Figure:
    """A figure that belongs to no window, with room for its labels.

    Args:
        what: What is drawn, for the error.
        width: In inches.
        height: In inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f'{what} needs matplotlib, which is not installed: pip install "lightning_fastio[demo]"'
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
