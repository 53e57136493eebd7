"""What a run's memory was: metrics at the Trainer's cadence, the peak and its step, and the line at the end."""

from __future__ import annotations

from lightning_fastio.callbacks.memory.allocator import GIB, CacheKeeper, DeviceMemory, DeviceReading
from lightning_fastio.callbacks.memory.host import GrowthWatch, read_host_memory, shared_memory_use
from lightning_fastio.quantities import counted


class MemoryRecord:
    """Readings of one fit, or of one evaluation."""

    def __init__(self, device: DeviceMemory | None) -> None:
        self.last_reading: DeviceReading | None = None
        """The allocator when it was last looked at."""
        self._device = device
        self._peak_bytes = 0
        self._peak_step = 0
        self._host_peak_bytes = 0
        self._host_bytes = 0
        self._growth: GrowthWatch | None = GrowthWatch()

    def look(self, step: int) -> dict[str, float]:
        """Read device and host memory, without synchronising.

        Args:
            step: Training batches done.

        Returns:
            Metrics, named as they are logged.
        """
        host = read_host_memory()
        self._host_peak_bytes = max(self._host_peak_bytes, host.private_bytes)
        self._host_bytes = host.private_bytes
        metrics = {
            "fastio/memory_host_gib": host.private_bytes / GIB,
            "fastio/memory_host_mapped_gib": host.mapped_bytes / GIB,
        }
        reading = self.look_at_device(step)
        if reading is not None:
            metrics |= {
                "fastio/memory_allocated_gib": reading.allocated_bytes / GIB,
                "fastio/memory_reserved_gib": reading.reserved_bytes / GIB,
                "fastio/memory_peak_gib": reading.peak_bytes / GIB,
                "fastio/memory_fragmentation_fraction": reading.fragmentation_fraction,
                "fastio/memory_alloc_retries": float(reading.num_retries),
            }
        return metrics

    def look_at_device(self, step: int) -> DeviceReading | None:
        """Read the allocator alone."""
        if self._device is None:
            return None
        self.last_reading = reading = self._device.read()
        if reading.peak_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_step = reading.peak_bytes, step
        return reading

    def growth(self, step: int) -> str | None:
        """What is wrong with the growth of host memory, told once."""
        if self._growth is None:
            return None
        problem = self._growth.add(step, self._host_bytes)
        if problem is None:
            return None
        self._growth = None
        return f"{problem}. {shared_memory_use()}. Look for lists and caches that a dataset, a metric or a hook fills."

    def summary(self, precision: str, cache: CacheKeeper | None, num_skipped: int | None) -> str:
        """The line at the end of a fit.

        Args:
            precision: What the Trainer ran with.
            cache: What was given back.
            num_skipped: Optimizer steps that the scaler skipped; None without a scaler.
        """
        parts = [f"precision {precision}"]
        if num_skipped is not None:
            parts.append(f"{counted(num_skipped, 'step')} skipped by the gradient scaler")
        if self.last_reading is not None:
            parts.append(f"device peak {self._peak_bytes / GIB:.2f} GiB by step {self._peak_step}")
        if cache is not None:
            parts.append(
                f"empty_cache {cache.num_calls}x returned {cache.returned_bytes / GIB:.2f} GiB in {cache.seconds:.3f} s"
            )
        parts.append(f"host peak {self._host_peak_bytes / GIB:.2f} GiB")
        return "Memory: " + ", ".join(parts)
