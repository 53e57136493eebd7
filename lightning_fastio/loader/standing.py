"""Where a loader stands in its epoch, and how that travels in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_fastio.errors import ResumeError
from lightning_fastio.plan.epoch import Epoch, Leg, Setting

VERSION = 1

ABOUT_DATA = ("number of rows", "fields", "data", "rows")
"""What of a state is about the data; the rest is about the order."""


class Standing(NamedTuple):
    """What a loader has delivered of an epoch. The same on every rank."""

    epoch: int = 0
    """Number of the epoch."""
    repeat: int = 0
    """Passes over this epoch before the present one, where a loader is iterated again without a new epoch."""
    resumed: tuple[Leg, ...] = ()
    """What earlier runs delivered of this pass."""
    window_rows: int | None = None
    """Rows of a window of blocks in this pass; None until it begins."""
    current: Epoch | None = None
    """The pass that is being read; None until it begins."""
    batch: int = 0
    """Number of its next batch."""
    num_uncounted: int = 0
    """Batches of this pass that the training loop has ceased to count, see `BatchLoader.finish_skipped`."""
    num_delivered: int = 0
    """Batches that were delivered since the epoch, or the run that goes on with it, began."""

    @property
    def legs(self) -> tuple[Leg, ...]:
        """What was delivered of this pass."""
        return self.resumed if self.current is None else self.current.legs_after(self.batch)

    def after(self, batch: int) -> Standing:
        """Where the loader stands once it has delivered a batch of the current pass."""
        return self._replace(batch=batch + 1, num_delivered=self.num_delivered + 1)

    def settled(self) -> Standing:
        """The same without the pass itself, for another process."""
        return self._replace(resumed=self.legs, current=None, batch=0)

    def state(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """A state of primitives.

        Args:
            identity: What must be the same for the unseen rows to be known: seed, order, data.
        """
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "repeat": self.repeat,
            "window_rows": self.window_rows,
            "num_uncounted": self.num_uncounted,
            "legs": [[*asdict(leg.setting).values(), leg.num_batches] for leg in self.legs],
            **identity,
        }

    @staticmethod
    def of_state(state: Mapping[str, Any], identity: Mapping[str, Any], *, may_differ: Collection[str]) -> Standing:
        """The standing that a state describes.

        Raises:
            ResumeError: It is no state of a loader, or seed, order or data are not those that it was taken with.
        """
        if state.get("version") != VERSION:
            raise ResumeError(
                f"the checkpoint holds a loader state of version {state.get('version')!r}, expected {VERSION}: it was "
                "not written by BatchLoader, or by another release of lightning_fastio"
            )
        for name, now in identity.items():
            if state[name] != now and name not in may_differ:
                remedy = "restore it" + (", or pass allow_changed_data=True" if name in ABOUT_DATA else "")
                raise ResumeError(
                    f"the checkpoint was written with {name} {state[name]!r}, but now it is {now!r}, so that the rows "
                    f"not yet seen cannot be told: {remedy}"
                )
        legs = tuple(Leg(Setting(*setting), num_batches) for *setting, num_batches in state["legs"])
        return Standing(
            state["epoch"], state["repeat"], legs, state["window_rows"], num_uncounted=state["num_uncounted"]
        )
