"""What the caching allocator of one CUDA device holds, and when its unused part goes back to the device.

`CudaMemory` is the only place that asks the allocator. Nothing here synchronises with the device, except giving
memory back, which cannot be done without.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

import torch

EmptyCache = Literal["never", "stage", "pressure"]
"""When cached memory goes back: never; where a stage ends; where the allocator holds far more than was ever needed."""

GIB = 1 << 30

log = logging.getLogger("lightning_fastio")


@dataclass(frozen=True)
class DeviceReading:
    """The allocator of one device at one moment."""

    total_bytes: int
    """Memory of the device."""
    allocated_bytes: int
    """Held by tensors."""
    reserved_bytes: int
    """Held by the allocator, tensors included."""
    peak_bytes: int
    """Most that tensors ever held."""
    split_bytes: int
    """Free parts of blocks whose other parts are in use: they cannot be given back."""
    num_retries: int
    """Allocations that only worked after the cache was emptied: each one stalled the run."""

    @property
    def fragmentation_fraction(self) -> float:
        """Share of the reserved memory that is free but tied to memory in use."""
        return self.split_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def surplus_bytes(self) -> int:
        """Reserved beyond the most that tensors ever held.

        What lies between the allocated bytes of this moment and the peak is no surplus: the next step takes it again.
        """
        return max(0, self.reserved_bytes - self.peak_bytes)


class DeviceMemory(Protocol):
    """The allocator of one device."""

    def read(self) -> DeviceReading:
        """Read the counters of the allocator, without synchronising."""
        ...

    def empty_cache(self) -> None:
        """Give unused memory of this device back. Synchronises."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds. Asks the driver."""
        ...

    def segments(self) -> list[dict[str, Any]]:
        """Everything the allocator holds, as `torch.cuda.memory_snapshot` describes it."""
        ...

    def record_history(self, max_entries: int | None) -> None:
        """Remember the stack of the last ``max_entries`` allocations; None stops."""
        ...

    def save_history(self, path: Path) -> None:
        """Write what is remembered, for https://pytorch.org/memory_viz."""
        ...


class CudaMemory:
    """The caching allocator of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_bytes: int = torch.cuda.get_device_properties(device).total_memory

    def read(self) -> DeviceReading:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)

        def count(name: str, value: str = "current") -> int:
            return int(stats.get(name, {}).get("all", {}).get(value, 0))

        return DeviceReading(
            total_bytes=self._total_bytes,
            allocated_bytes=count("allocated_bytes"),
            reserved_bytes=count("reserved_bytes"),
            peak_bytes=count("allocated_bytes", "peak"),
            split_bytes=count("inactive_split_bytes"),
            num_retries=int(stats.get("num_alloc_retries", 0)),
        )

    def empty_cache(self) -> None:
        # Without naming the device, a rank would start a context on the first GPU of the machine.
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def segments(self) -> list[dict[str, Any]]:
        index = self._device.index
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [segment for segment in segments if segment["device"] == index]

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def record_history(self, max_entries: int | None) -> None:
        # Documented under these names by "Understanding CUDA Memory Usage" in torch's manual.
        if max_entries is None:
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def save_history(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def open_device_memory(device: torch.device) -> DeviceMemory | None:
    """The allocator of a device, or None where there is none to look after (CPU, MPS, XLA)."""
    return CudaMemory(device) if device.type == "cuda" else None


class CacheKeeper:
    """Gives cached memory back by policy, and backs off where the run takes it again.

    Memory that is given back costs a synchronisation, and each block that is needed after all a new allocation by
    the driver. So under ``pressure`` it is done only for memory that not even the peak needed, and after a call
    whose memory was soon reserved again the next check waits twice as long.
    """

    def __init__(
        self, memory: DeviceMemory, policy: EmptyCache, *, pressure_fraction: float, check_every_n_steps: int
    ) -> None:
        self.num_calls = 0
        """Times that memory was given back."""
        self.returned_bytes = 0
        """Bytes given back in all calls."""
        self.seconds = 0.0
        """What the calls took, the synchronisation included."""
        self._memory = memory
        self._policy = policy
        self._pressure_fraction = pressure_fraction
        self._interval = check_every_n_steps
        self._next_check = check_every_n_steps
        self._reserved_at_call: int | None = None

    def after_step(self, step: int) -> None:
        """Look whether there is pressure, if a check is due after ``step`` steps."""
        if self._policy != "pressure" or step < self._next_check:
            return
        reading = self._memory.read()
        if self._reserved_at_call is not None and reading.reserved_bytes >= 0.9 * self._reserved_at_call:
            self._interval *= 2
        self._reserved_at_call = None
        self._next_check = step + self._interval
        if self._is_pressed(reading):
            self._reserved_at_call = reading.reserved_bytes
            self._empty(reading)

    def after_stage(self) -> None:
        """A stage ended: batches of another size and kind come next."""
        if self._policy == "never":
            return
        reading = self._memory.read()
        if self._policy == "stage" or self._is_pressed(reading):
            self._empty(reading)

    def _is_pressed(self, reading: DeviceReading) -> bool:
        return reading.surplus_bytes > self._pressure_fraction * reading.total_bytes

    def _empty(self, before: DeviceReading) -> None:
        start = perf_counter()
        self._memory.empty_cache()
        seconds = perf_counter() - start
        returned_bytes = max(0, before.reserved_bytes - self._memory.read().reserved_bytes)
        log.info(f"empty_cache returned {returned_bytes / GIB:.2f} GiB in {1000 * seconds:.1f} ms")
        self.num_calls += 1
        self.returned_bytes += returned_bytes
        self.seconds += seconds
