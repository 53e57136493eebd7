"""What an out-of-memory error should have said: who holds the memory, and which batch would fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from lightning_fastio.allowance import memory_allowance
from lightning_fastio.callbacks.memory.allocator import GIB, DeviceMemory, DeviceReading
from lightning_fastio.callbacks.memory.batch_fields import describe, num_bytes, num_samples, tensors_of
from lightning_fastio.callbacks.memory.host import read_host_memory, shared_memory_use

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
_NUM_LARGEST = 5
_MARGIN = 0.9


def is_device_oom(error: BaseException) -> bool:
    """Whether the device ran out of memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError)


def is_host_oom(error: BaseException) -> bool:
    """Whether the host ran out of memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def append_report(error: BaseException, report: str) -> None:
    """Make a report part of the message, so that it is seen wherever the error is shown.

    The error keeps its class and its single argument, by which Lightning's batch-size finder knows it.
    """
    message = str(error.args[0]) if error.args else ""
    error.args = (f"{message}\n\n{report}",)


def device_report(
    error: BaseException, memory: DeviceMemory, *, where: str, batch: Any, at_start: DeviceReading | None
) -> str:
    """Explain an out-of-memory error of a device.

    Args:
        error: The error.
        memory: The device.
        where: Stage and batch, such as ``train batch 12``.
        batch: What was being worked on, or None.
        at_start: The allocator at the start of a recent step: what is there without activations.
    """
    now = memory.read()
    requested = requested_bytes(str(error))
    outside = max(0, now.total_bytes - memory.free_bytes() - now.reserved_bytes)
    lines = [
        f"Out of device memory in {where}:",
        f"  device {now.total_bytes / GIB:.2f} GiB: tensors {now.allocated_bytes / GIB:.2f}, unused cache "
        f"{(now.reserved_bytes - now.allocated_bytes) / GIB:.2f}, outside this allocator {outside / GIB:.2f}; peak "
        f"{now.peak_bytes / GIB:.2f}",
    ]
    blocks = _largest_blocks(memory.segments())
    if blocks:
        lines.append(f"  largest blocks: {', '.join(f'{size / GIB:.2f}' for size in blocks)} GiB")
    lines += [f"  {name}: {describe(tensor)}" for name, tensor in tensors_of(batch)]
    lines.append("What to try:")
    lines += [f"  - {advice}" for advice in _advice(now, requested, outside, batch, at_start)]
    return "\n".join(lines)


def host_report(where: str, batch: Any) -> str:
    """Explain an out-of-memory error of the host."""
    reading, limit = read_host_memory(), memory_allowance()
    of_limit = "" if limit is None else f" of {limit / GIB:.2f}"
    return "\n".join(
        [
            f"Out of host memory in {where}:",
            f"  this process and its workers hold {reading.private_bytes / GIB:.2f}{of_limit} GiB; mapped files and "
            f"shared memory {reading.mapped_bytes / GIB:.2f} GiB; {shared_memory_use()}",
            *(f"  {name}: {describe(tensor)}" for name, tensor in tensors_of(batch)),
            "What to try: fewer workers, a smaller prefetch_factor or cache_bytes, a smaller batch.",
        ]
    )


def requested_bytes(message: str) -> int:
    """What the allocation that failed asked for, from torch's message; 0 if it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def fitting_batch_size(
    batch_size: int, now: DeviceReading, requested: int, outside: int, at_start: DeviceReading
) -> int | None:
    """The largest batch size that could fit, or None if even one sample seems too much.

    Activations grow in proportion to the batch. Those that existed when the memory ran out are the least that the
    whole step needs, so the true limit may be lower, never higher.

    Args:
        batch_size: The one that failed.
        now: The allocator when it failed.
        requested: Bytes of the allocation that failed.
        outside: Bytes of the device that this allocator does not hold.
        at_start: The allocator at the start of a step.
    """
    needed = now.allocated_bytes + requested - at_start.allocated_bytes
    room = now.total_bytes - outside - at_start.allocated_bytes
    if needed <= 0 or room <= 0:
        return None
    size = min(int(batch_size * _MARGIN * room / needed), batch_size - 1)
    size = size // 8 * 8 if size >= 8 else size
    return size or None


def _advice(now: DeviceReading, requested: int, outside: int, batch: Any, at_start: DeviceReading | None) -> list[str]:
    advice = []
    batch_size = num_samples(batch)
    fitting = None
    if batch_size and at_start is not None:
        fitting = fitting_batch_size(batch_size, now, requested, outside, at_start)
    if batch_size and fitting:
        advice.append(
            f"a batch size of {fitting} or less, with Trainer(accumulate_grad_batches={-(-batch_size // fitting)}) for "
            "the same step"
        )
    elif batch_size and batch_size > 1:
        advice.append(f"a batch size below {batch_size}, with Trainer(accumulate_grad_batches=...) for the same step")
    advice.append("activation checkpointing (torch.utils.checkpoint) of the largest part of the model")
    if now.reserved_bytes - now.allocated_bytes > requested > 0:
        advice.append(
            "the cache holds enough, but in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        )
    if outside > now.total_bytes // 10:
        advice.append(f"look at nvidia-smi: {outside / GIB:.2f} GiB are held outside this allocator, by CUDA or others")
    if num_bytes(batch) > now.total_bytes // 50:
        advice.append(f"PrefetchCallback(depth=1): each batch ahead takes {num_bytes(batch) / GIB:.2f} GiB")
    return advice


def _largest_blocks(segments: Sequence[dict[str, Any]]) -> list[int]:
    sizes = (
        int(block["size"])
        for segment in segments
        for block in segment["blocks"]
        if str(block["state"]).startswith("active")
    )
    return sorted(sizes, reverse=True)[:_NUM_LARGEST]
