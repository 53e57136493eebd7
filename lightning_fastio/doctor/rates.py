"""Measured rates: reading from storage, copying to the GPU. Bounded in time and bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch

from lightning_fastio.doctor.machine import Finding, size

MAX_SECONDS = 1.0
MAX_BYTES = 256 << 20
BLOCK_BYTES = 4 << 20
UNKNOWN_ROW_BYTES = 64 << 10
MAX_FILES = 10_000
MIN_BYTES = 4 << 20
MAX_REQUEST_BYTES = 16 << 20
AHEAD = 32
"""Random reads that are announced before they are made, as this package's readers do."""


@dataclass(frozen=True)
class Rows:
    """What the files at a path hold, and how it is asked for."""

    num_rows: int
    """Rows of all files."""
    num_units: int
    """Pieces that are read whole: rows, or blocks where rows are compressed together."""
    batch_size: int
    """Rows of a batch."""


def check_read_rate(path: Path, rows: Rows | None) -> Iterator[Finding]:
    """Sequential and random rate of the largest file at a path, and the batches a second that they allow.

    Args:
        path: A file, or a folder. Small ones are left out: they stay in the page cache.
        rows: What is in it, or None if unknown.
    """
    sizes = file_sizes(path)
    largest = max(sizes, key=lambda each: sizes[each], default=path)
    if sizes.get(largest, 0) < MIN_BYTES:
        return
    num_bytes = sum(sizes.values())
    request = max(1, num_bytes // rows.num_units) if rows else UNKNOWN_ROW_BYTES
    sequential, scattered = sequential_rate(largest), random_rate(largest, min(request, MAX_REQUEST_BYTES))
    check = f"read rate of {path}"
    text = f"sequential {size(sequential)}/s, random {size(request)} {size(scattered)}/s (page cache dropped)"
    if rows:
        batch_bytes = num_bytes / rows.num_rows * rows.batch_size
        text += (
            f": {sequential / batch_bytes:,.1f} and {scattered / batch_bytes:,.1f} batches of {rows.batch_size} rows a "
            "second on first reading"
        )
    if scattered < sequential / 10:
        yield Finding(
            check,
            text,
            "shuffled reading uses a tenth of this storage or less, until the data is in the page cache",
            "shuffle='block', larger rows, or copy the data to faster storage",
            "info",
        )
    else:
        yield Finding(check, text)


def file_sizes(path: Path) -> dict[Path, int]:
    """Sizes of the file, or of the files in the folder and below that hold anything; of the first 10,000 of them."""
    found = [path] if path.is_file() else (each for each in path.rglob("*") if each.is_file())
    sizes = {each: each.stat().st_size for each in islice(found, MAX_FILES)}
    return {each: num_bytes for each, num_bytes in sizes.items() if num_bytes}


def sequential_rate(path: Path) -> float:
    """Bytes a second from the start of a file, 4 MiB at a time."""
    num_bytes = min(path.stat().st_size, MAX_BYTES)
    offsets = range(0, num_bytes, BLOCK_BYTES)
    return _rate(path, offsets, BLOCK_BYTES, sequential=True)


def random_rate(path: Path, request_bytes: int, seed: int = 0) -> float:
    """Bytes a second of requests all over a file."""
    draw = random.Random(seed)
    last = max(0, path.stat().st_size - request_bytes)
    count = max(AHEAD, min(4096, MAX_BYTES // 4 // request_bytes))
    return _rate(path, [draw.randint(0, last) for _ in range(count)], request_bytes, sequential=False)


def _rate(path: Path, offsets: range | list[int], request_bytes: int, *, sequential: bool) -> float:
    buffer = bytearray(request_bytes)
    done = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Clean pages go without root; those that another process has mapped stay.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL if sequential else os.POSIX_FADV_RANDOM)
        start = perf_counter()
        for number, offset in enumerate(offsets):
            if not sequential and number % AHEAD == 0:
                for later in offsets[number : number + AHEAD]:
                    os.posix_fadvise(descriptor, later, request_bytes, os.POSIX_FADV_WILLNEED)
            done += os.preadv(descriptor, [buffer], offset)
            if perf_counter() - start > MAX_SECONDS:
                break
        return done / max(perf_counter() - start, 1e-9)
    finally:
        os.close(descriptor)


def check_gpu() -> Iterator[Finding]:
    """What each GPU can do and how fast batches reach it. Starts CUDA in this process."""
    if not torch.cuda.is_available():
        yield Finding("GPU", "torch finds none", "there is nothing to measure", "", "info")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        able = "bf16 and TF32" if properties.major >= 8 else "no bf16, no TF32: precision='16-mixed'"
        yield Finding(f"GPU {index}", f"{properties.name}, {size(properties.total_memory)}, {able}")
        pinned, pageable = (copy_rate(device, pin_memory=pin_memory) for pin_memory in (True, False))
        text = f"pinned {size(pinned)}/s, pageable {size(pageable)}/s"
        if pinned < 5 << 30:
            yield Finding(
                f"copy to GPU {index}",
                text,
                "less than a PCIe 3.0 x8 link gives: every batch waits on it",
                "look at PCIe and NUMA above; run on CPUs near the GPU",
                "warning",
            )
        else:
            yield Finding(f"copy to GPU {index}", text)


def copy_rate(device: torch.device, *, pin_memory: bool, num_bytes: int = 256 << 20) -> float:
    """Bytes a second from host memory to a device; the best of four copies."""
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    target = torch.empty_like(host, device=device)
    return num_bytes / min(_seconds(lambda: target.copy_(host), torch.cuda.synchronize) for _ in range(4))


def _seconds(work: Callable[[], object], wait: Callable[[], object]) -> float:
    wait()
    start = perf_counter()
    work()
    wait()
    return perf_counter() - start
