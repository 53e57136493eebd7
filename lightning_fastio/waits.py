"""`WaitStats`: how long each step waited for its data, and for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.staging import CopyTimes

STEP = np.dtype(
    [
        ("epoch", "i4"),
        ("step", "i8"),  # Optimizer steps done when it ended.
        ("data_wait_s", "f8"),  # The training thread was blocked until the batch was there.
        ("copy_wait_s", "f8"),  # The device's stream stood still for the copy of the batch.
        ("copy_s", "f8"),  # The copy itself.
        ("step_s", "f8"),  # From asking for the batch to the end of its step; no validation, no checkpoint.
        ("read_s", "f8"),  # Reading and decoding, summed over threads; of other loaders, fetching.
        ("transform_s", "f8"),  # Transforms of a `BatchLoader`.
        ("num_rows", "i8"),
        ("is_first", "?"),  # The first batch of an epoch, whose wait is the start of the loader.
    ]
)
"""One record for each training batch; seconds."""


@dataclass
class Evaluation:
    """Waits of one evaluation stage."""

    num_batches: int = 0
    data_wait_s: float = 0.0
    """Seconds of waiting, the first batch of each pass included."""
    max_wait_s: float = 0.0
    """Longest single wait."""
    total_s: float = 0.0
    """Seconds of the batches, waits included."""


class WaitStats:
    """Waits of every step since it was made.

    Adding a step takes about a microsecond and 64 bytes.
    """

    def __init__(self) -> None:
        self.evaluations: dict[str, Evaluation] = {}
        """Waits of validation, test and prediction, by stage."""
        self._steps = np.zeros(256, STEP)
        self._num_steps = 0
        self._num_logged = 0
        self._copies_due: deque[int] = deque()

    def add(
        self,
        *,
        data_wait_s: float,
        step_s: float,
        num_rows: int,
        is_first: bool,
        epoch: int = 0,
        step: int | None = None,
        read_s: float = 0.0,
        transform_s: float = 0.0,
        is_copied: bool = False,
    ) -> None:
        """Add one training batch.

        Args:
            data_wait_s: Seconds the training thread was blocked for it.
            step_s: Seconds of the whole step, the wait included.
            num_rows: Rows of the batch.
            is_first: Whether it was the first of its epoch.
            epoch: Number of the epoch.
            step: Optimizer steps done when it ended; by default the number of batches before it.
            read_s: Busy seconds of reading.
            transform_s: Busy seconds of transforms.
            is_copied: Whether `add_copies` will tell how long its copy took.
        """
        index = self._num_steps
        if index == len(self._steps):
            self._steps = np.concatenate([self._steps, np.zeros_like(self._steps)])
        self._steps[index] = (
            epoch,
            index if step is None else step,
            data_wait_s,
            0.0,
            0.0,
            step_s,
            read_s,
            transform_s,
            num_rows,
            is_first,
        )
        self._num_steps += 1
        if is_first:
            # Copies that an earlier epoch did not come to report are not those of this one.
            self._copies_due.clear()
        if is_copied:
            self._copies_due.append(index)

    def add_copies(self, copies: Iterable[CopyTimes]) -> None:
        """Add what the device says about copies, which comes later than the step; in the order of the batches."""
        for copy in copies:
            record = self._steps[self._copies_due.popleft()]
            record["copy_wait_s"], record["copy_s"] = copy.stall_s, copy.copy_s

    def add_evaluation(self, stage: str, data_wait_s: float, total_s: float) -> None:
        """Add one batch of validation, test or prediction."""
        evaluation = self.evaluations.setdefault(stage, Evaluation())
        evaluation.num_batches += 1
        evaluation.data_wait_s += data_wait_s
        evaluation.max_wait_s = max(evaluation.max_wait_s, data_wait_s)
        evaluation.total_s += total_s

    @property
    def steps(self) -> npt.NDArray[Any]:
        """Record of every training batch, a structured array of type `STEP`."""
        return self._steps[: self._num_steps]

    @property
    def data_wait_fraction(self) -> float:
        """Share of the training time that was spent waiting for data, starts of epochs included."""
        total_s = float(self.steps["step_s"].sum())
        return float(self.steps["data_wait_s"].sum()) / total_s if total_s else 0.0

    def since_last_log(self) -> dict[str, float]:
        """Metrics of the batches that came after the last call, means per batch; empty where there are none.

        The first batch of an epoch is a metric of its own, ``fastio/first_batch_wait_s``.
        """
        steps = self.steps[self._num_logged :]
        self._num_logged = self._num_steps
        metrics: dict[str, float] = {}
        is_first = steps["is_first"]
        steady = steps
        if is_first.any():
            metrics["fastio/first_batch_wait_s"] = float(steps["data_wait_s"][is_first].mean())
            steady = steps[~is_first]
        if not len(steady):
            return metrics
        total_s = float(steady["step_s"].sum())
        return metrics | {
            "fastio/data_wait_s": float(steady["data_wait_s"].mean()),
            "fastio/data_wait_max_s": float(steady["data_wait_s"].max()),
            "fastio/data_wait_fraction": float(steady["data_wait_s"].sum()) / total_s if total_s else 0.0,
            "fastio/copy_wait_s": float(steady["copy_wait_s"].mean()),
            "fastio/step_s": total_s / len(steady),
            "fastio/read_s": float(steady["read_s"].mean()),
            "fastio/samples_per_s": float(steady["num_rows"].sum()) / total_s if total_s else 0.0,
        }
