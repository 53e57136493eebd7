"""Host memory of a run: what its processes hold for themselves, what they map, and whether it only ever grows."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_fastio.allowance import memory_allowance

GIB = 1 << 30

MIN_GROWTH_BYTES = GIB
"""Growth below this is no cause for concern."""

_NUM_SAMPLES = 16


@dataclass(frozen=True)
class HostReading:
    """Resident memory of this process and its workers."""

    private_bytes: int
    """Memory of their own: objects, tensors, decoded data. This is what can run out."""
    mapped_bytes: int
    """Pages of memory-mapped files and of shared memory. File pages are page cache: Linux takes them back at will."""


def read_host_memory(proc: Path = Path("/proc")) -> HostReading:
    """Resident memory of this process and of the worker processes it started; zeros where there is no ``/proc``."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    page = os.sysconf("SC_PAGE_SIZE")
    private = mapped = 0
    for pid in pids:
        try:
            # Not smaps_rollup: it walks every page of every map, tens of milliseconds for large files.
            _, resident, shared, *_ = (proc / str(pid) / "statm").read_text().split()
        except (OSError, ValueError):
            continue
        private += (int(resident) - int(shared)) * page
        mapped += int(shared) * page
    return HostReading(private, mapped)


class GrowthWatch:
    """Notices memory that only ever grows.

    Caches and allocators grow and then level off. What is reported rose in every one of the last eight samples,
    and in the later half of the run at least half as fast as in the earlier one.
    """

    def __init__(self, limit_bytes: Callable[[], int | None] = memory_allowance) -> None:
        """Set up; the limit is asked for when there is something to report."""
        self._limit_bytes = limit_bytes
        self._samples: list[tuple[int, int]] = []
        self._stride = 1
        self._num_seen = 0

    def add(self, step: int, num_bytes: int) -> str | None:
        """Take a sample.

        Args:
            step: Training batch.
            num_bytes: Memory held at that step.

        Returns:
            What is wrong, or None.
        """
        self._num_seen += 1
        if self._num_seen % self._stride:
            return None
        if len(self._samples) == _NUM_SAMPLES:
            self._samples = self._samples[1::2]
            self._stride *= 2
        self._samples.append((step, num_bytes))
        if len(self._samples) < _NUM_SAMPLES:
            return None
        held = [num_bytes for _, num_bytes in self._samples]
        middle = _NUM_SAMPLES // 2
        early, late = held[middle - 1] - held[0], held[-1] - held[middle]
        rises = all(after > before for before, after in zip(held[middle:-1], held[middle + 1 :], strict=True))
        if not rises or late < early / 2 or held[-1] - held[0] < MIN_GROWTH_BYTES:
            return None
        num_steps = self._samples[-1][0] - self._samples[middle][0]
        return self._describe(late / max(1, num_steps))

    def _describe(self, bytes_per_step: float) -> str:
        (first, before), (last, now) = self._samples[0], self._samples[-1]
        text = (
            f"host memory grew from {before / GIB:.1f} to {now / GIB:.1f} GiB between steps {first} and {last} and "
            "does not level off"
        )
        limit = self._limit_bytes()
        if limit is not None:
            steps_left = max(0, limit - now) / bytes_per_step
            text += f"; at this rate the limit of {limit / GIB:.1f} GiB is reached in {steps_left:.0f} steps"
        return text


def shared_memory_use(path: str = "/dev/shm") -> str:
    """How full ``/dev/shm`` is, as a phrase; empty where there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return ""
    total = status.f_blocks * status.f_frsize
    used = total - status.f_bfree * status.f_frsize
    return f"{path} holds {used / GIB:.2f} of {total / GIB:.2f} GiB"
