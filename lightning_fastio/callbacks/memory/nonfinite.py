"""Reports the first loss that is NaN or infinite, with the batch that gave it, without waiting for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fastio.callbacks.memory.batch_fields import describe_values, num_bytes, tensors_of

HELD_BATCH_BYTES = 256 << 20
"""A larger batch is not kept on the device to describe it later."""


@dataclass
class Place:
    """Where a loss was computed."""

    stage: str
    """``train`` or ``validate``."""
    epoch: int
    step: int
    """Optimizer steps made before."""
    batch_idx: int
    batch: Any = None
    """The batch, as long as it is at hand."""


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # From a GPU, the copy goes to pinned memory and is queued behind the work that computes the loss.
        self._value = tensor.detach().to("cpu", non_blocking=tensor.is_cuda)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_ready(self) -> bool:
        """Whether the value has arrived."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the value has arrived."""
        if self._copied is not None:
            self._copied.synchronize()

    @property
    def value(self) -> torch.Tensor:
        """The tensor; only to be read when it is ready."""
        return self._value


class NonFiniteWatch:
    """Looks at every loss, some steps later where the device is behind, and reports the first bad one."""

    def __init__(self, rows_of: Callable[[Place], list[int] | None], precision: str) -> None:
        """Set up.

        Args:
            rows_of: Gives the row numbers of the batch at a place, or None where they are unknown.
            precision: What the Trainer runs with, for the advice.
        """
        self._rows_of = rows_of
        self._precision = precision
        self._pending: deque[tuple[HostCopy, Place]] = deque()
        self._is_done = False

    def watch(self, loss: Any, place: Place) -> None:
        """Take note of a loss.

        Passed over is what is no floating-point tensor, and what lies on a device whose copies nothing can wait for.
        """
        if self._is_done or not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            return
        if loss.device.type in ("cpu", "cuda"):
            self._pending.append((HostCopy(loss), place))

    def report(self, *, wait: bool = False) -> str | None:
        """What there is to say about the losses that have arrived; at most once.

        Args:
            wait: Wait for all of them, where a stage ends.
        """
        if wait and self._pending:
            self._pending[-1][0].wait()
        while self._pending and self._pending[0][0].is_ready:
            copy, place = self._pending.popleft()
            if not _is_finite(copy.value):
                self._is_done = True
                self._pending.clear()
                return self._describe(copy.value, place)
        self._let_batches_go()
        return None

    def close(self) -> None:
        """Forget all batches."""
        self._pending.clear()
        self._is_done = True

    def _let_batches_go(self) -> None:
        """Keep one batch beyond its step, and only a small one: the device may be nearly full."""
        for position, (_, place) in enumerate(reversed(self._pending)):
            if position > 0 or num_bytes(place.batch) > HELD_BATCH_BYTES:
                place.batch = None

    def _describe(self, loss: torch.Tensor, place: Place) -> str:
        value = next(number for number in loss.flatten().tolist() if not math.isfinite(number))
        lines = [
            f"the loss became {value} in {place.stage} batch {place.batch_idx} of epoch {place.epoch}, "
            f"at step {place.step} ({self._precision})"
        ]
        rows = self._rows_of(place)
        if rows:
            more = f" and {len(rows) - 16} more" if len(rows) > 16 else ""
            lines.append(f"  rows {', '.join(map(str, rows[:16]))}{more}")
        fields = list(tensors_of(place.batch))
        lines += [f"  {name}: {describe_values(tensor)}" for name, tensor in fields]
        lines.append(f"  {self._advice(fields)}")
        return "\n".join(lines)

    def _advice(self, fields: list[tuple[str, torch.Tensor]]) -> str:
        bad = [name for name, tensor in fields if not tensor.detach().isfinite().all()]
        if bad:
            return f"The data itself is not finite in {', '.join(bad)}: mend or mask these rows."
        if self._precision == "16-mixed":
            return (
                "float16 ends at 65504: look for large constants (masks of -1e9) and sums in half precision, or use "
                "precision='bf16-mixed'."
            )
        return "Trainer(detect_anomaly=True) names the operation; a lower learning rate or gradient clipping may help."


def _is_finite(value: torch.Tensor) -> bool:
    # Nearly every loss is a scalar, for which Python is ten times faster than torch.
    return math.isfinite(value.item()) if value.numel() == 1 else bool(value.isfinite().all())
