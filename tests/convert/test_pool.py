"""Tasks are loaded side by side, in order, and never further ahead than the memory allows."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from lightning_fastio.convert.pool import run_tasks
from lightning_fastio.convert.slots import Slot, put_in
from lightning_fastio.convert.source import TASK_BYTES, Loaded, Task
from lightning_fastio.errors import FormatError


def load(number: int) -> Loaded:
    """Rows that only the number decides, of a size that differs from task to task."""
    if number == 77:
        raise FormatError("number 77 cannot be loaded")
    return Loaded({"x": np.full((1000 + 997 * (number % 5), 3), number), "name": [f"{number}"]})


def tasks(count: int, taken: list[int]):
    for number in range(count):
        taken.append(number)
        yield Task(number, 1)


@pytest.mark.parametrize("engine", ["process", "thread"])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_order_values_and_look_ahead(engine, num_workers):
    taken: list[int] = []
    done = 0
    for task, loaded in run_tasks(load, tasks(40, taken), engine, num_workers=num_workers, memory_bytes=3 * TASK_BYTES):
        assert task.payload == done
        np.testing.assert_array_equal(loaded.rows["x"], load(done).rows["x"])
        assert loaded.rows["name"] == [str(done)]
        done += 1
        assert len(taken) <= done + 3
    assert done == 40


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_errors_arrive_at_their_task_and_leave_nothing_running(engine):
    # The first process of a program starts a helper of multiprocessing that stays.
    assert len(list(run_tasks(load, tasks(1, []), engine, num_workers=1, memory_bytes=1 << 30))) == 1
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    done = []

    def load_all() -> None:
        for task, _ in run_tasks(load, tasks(100, []), engine, num_workers=2, memory_bytes=1 << 30):
            done.append(task.payload)

    with pytest.raises(FormatError, match="number 77"):
        load_all()
    gc.collect()
    assert done == list(range(77))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before


def test_who_stops_early_leaves_nothing_running():
    before = threading.active_count()
    running = run_tasks(load, tasks(70, []), "thread", num_workers=2, memory_bytes=1 << 30)
    next(running)
    running.close()
    assert threading.active_count() == before


def test_slots_grow_and_are_used_again():
    slot = Slot()
    for size in (10_000, 500_000, 20_000):
        rows = {"x": np.arange(size), "small": np.arange(3), "text": ["a"], "wide": np.full((size, 2), 7, np.uint8)}
        found = slot.take_out(put_in(rows, slot.path))
        np.testing.assert_array_equal(found["x"], rows["x"])
        np.testing.assert_array_equal(found["wide"], rows["wide"])
        assert found["small"] is rows["small"]
        assert found["text"] == ["a"]
    slot.close()


def test_workers_that_decode_pictures_do_not_wait_for_torch():
    names = ", ".join(f"lightning_fastio.convert.{name}" for name in ("pictures", "pool", "statistics"))
    script = f"import sys, {names}"
    done = subprocess.run([sys.executable, "-c", f"{script}; print(*sys.modules)"], capture_output=True, check=True)
    assert not set(done.stdout.decode().split()) & {"torch", "lightning", "pyarrow", "h5py"}
