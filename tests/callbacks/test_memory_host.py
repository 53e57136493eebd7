"""Host memory: what is counted, what the limit is, and growth that does not end."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_fastio.callbacks.memory.host import (
    GIB,
    GrowthWatch,
    read_host_memory,
    shared_memory_use,
)


def watch(held_gib: list[float], limit_gib: float | None = 64) -> list[str]:
    growth = GrowthWatch(lambda: None if limit_gib is None else int(limit_gib * GIB))
    reports = [growth.add(100 * step, int(held * GIB)) for step, held in enumerate(held_gib)]
    return [report for report in reports if report]


def test_growth_that_does_not_level_off_is_reported_with_the_time_left() -> None:
    reports = watch([1 + 0.5 * step for step in range(16)])
    assert reports == [
        "host memory grew from 1.0 to 8.5 GiB between steps 0 and 1500 and does not level off; at this rate the limit "
        "of 64.0 GiB is reached in 11100 steps"
    ]


def test_without_a_limit_no_time_is_given() -> None:
    (report,) = watch([1 + 0.5 * step for step in range(16)], limit_gib=None)
    assert report.endswith("and does not level off")


def test_growth_is_found_late_in_a_long_run() -> None:
    flat_then_growing = [4.0] * 100 + [4 + 0.1 * step for step in range(400)]
    assert len(watch(flat_then_growing)) >= 1


@pytest.mark.parametrize(
    "held",
    [
        [8 - 7 / (1 + step) for step in range(200)],  # a cache that fills
        [4 + (step % 5) for step in range(200)],  # up and down
        [4.0] * 200,
        [4 + 0.001 * step for step in range(200)],  # a trickle, under a GiB
        [4.0] * 20 + [20.0] * 200,  # one jump
    ],
)
def test_growth_that_ends_is_no_news(held: list[float]) -> None:
    assert watch(held) == []


def test_private_memory_counts_arrays_but_not_file_pages(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(20 << 20, np.uint8))
    before = read_host_memory()
    own = np.ones(40 << 20, np.uint8)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert mapped.sum() == 20 << 20
    after = read_host_memory()
    assert 38 << 20 < after.private_bytes - before.private_bytes < 58 << 20
    assert after.mapped_bytes - before.mapped_bytes > 15 << 20
    del own


def _hold(ready: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    held = np.ones(64 << 20, np.uint8)
    ready.set()
    done.wait()
    del held


def test_worker_processes_are_counted() -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    before = read_host_memory()
    worker = context.Process(target=_hold, args=(ready, done))
    worker.start()
    try:
        assert ready.wait(60)
        assert read_host_memory().private_bytes - before.private_bytes > 60 << 20
    finally:
        done.set()
        worker.join()


def test_processes_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path).private_bytes == 0
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "statm").write_text("100 30 10 1 0 50 0\n")
    reading = read_host_memory(tmp_path)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (reading.private_bytes, reading.mapped_bytes) == (20 * page, 10 * page)


def test_shared_memory_is_named_with_its_size(tmp_path: Path) -> None:
    assert shared_memory_use(str(tmp_path)).startswith(f"{tmp_path} holds ")
    assert shared_memory_use(str(tmp_path / "none")) == ""
