"""Where tasks are loaded: worker processes, threads or a Ray cluster; always in order and in bounded memory.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from lightning_fastio.convert.slots import Slot, put_in
from lightning_fastio.convert.source import TASK_BYTES, Engine, Loaded, Task
from lightning_fastio.errors import ConfigError, FastIOError, MissingDependencyError

Load: TypeAlias = Callable[[Any], Loaded]

_PR_SET_PDEATHSIG = 1


def run_tasks(
    load: Load, tasks: Iterable[Task], engine: Engine, *, num_workers: int, memory_bytes: int
) -> Iterator[tuple[Task, Loaded]]:
    """Load tasks side by side and yield them in their order.

    Args:
        load: Turns a task's payload into rows; picklable for processes and Ray.
        tasks: The work, taken up only as far ahead as the memory allows.
        engine: ``process``, ``thread`` or ``ray``.
        num_workers: Tasks that are loaded at the same time; 0 loads them in this thread.
        memory_bytes: Bound for the rows of tasks that are loaded or wait for the writer.

    Yields:
        Each task with what it gave. Arrays are valid until the next one is asked for.

    Raises:
        ConfigError: A worker cannot be started, or ``load`` does not survive the way to it.
        FastIOError: A worker process died.
    """
    ahead = max(1, min(2 * num_workers + 2, memory_bytes // TASK_BYTES))
    if num_workers == 0:
        return ((task, load(task.payload)) for task in tasks)
    if engine == "ray":
        return _run_on_ray(load, tasks, ahead)
    if engine == "thread":
        return _run_in_threads(load, tasks, num_workers, ahead)
    return _run_in_processes(load, tasks, num_workers, ahead)


def _run_in_threads(load: Load, tasks: Iterable[Task], num_workers: int, ahead: int) -> Iterator[tuple[Task, Loaded]]:
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="fastio-convert")
    yield from _in_order(pool, lambda task: pool.submit(load, task.payload), tasks, ahead)


def _run_in_processes(load: Load, tasks: Iterable[Task], num_workers: int, ahead: int) -> Iterator[tuple[Task, Loaded]]:
    _check_travels(load)
    # Neither fork, which copies locks that other threads hold, nor forkserver, whose start would be shared with
    # the user's own processes.
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(load,)
    )
    # One slot more than tasks in flight: the rows just yielded are in use while the next task is handed out.
    slots = [Slot() for _ in range(ahead + 1)]
    free = deque(slots)
    used: deque[Slot] = deque()

    def submit(task: Task) -> Future[Loaded]:
        used.append(free.popleft())
        return pool.submit(_load_into_slot, task.payload, used[-1].path)

    try:
        for task, loaded in _in_order(pool, submit, tasks, ahead):
            slot = used.popleft()
            yield task, replace(loaded, rows=slot.take_out(loaded.rows))
            free.append(slot)
    except BrokenProcessPool as error:
        raise FastIOError(
            "a worker process died. It was killed (out of memory?), or the script that calls convert() runs again "
            "in each worker: keep the call under `if __name__ == '__main__':`. Fewer workers need less memory: "
            "num_workers=1"
        ) from error
    finally:
        for slot in slots:
            slot.close()


def _check_travels(load: Load) -> None:
    try:
        pickle.dumps(load)
    except Exception as error:
        # pickle raises PicklingError, AttributeError or TypeError, and __reduce__ whatever it likes.
        raise ConfigError(
            f"this work cannot be sent to worker processes ({error}). Define the function at the top level of a "
            f"module, or give engine='thread' or num_workers=0"
        ) from error


def _in_order(
    pool: Executor, submit: Callable[[Task], Future[Loaded]], tasks: Iterable[Task], ahead: int
) -> Iterator[tuple[Task, Loaded]]:
    pending: deque[tuple[Task, Future[Loaded]]] = deque()
    try:
        for task in tasks:
            pending.append((task, submit(task)))
            if len(pending) >= ahead:
                task, future = pending.popleft()
                yield task, future.result()
        while pending:
            task, future = pending.popleft()
            yield task, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_load: Load | None = None


def _start_worker(load: Load) -> None:
    global _worker_load
    _worker_load = load
    # Ctrl-C reaches the whole process group; the parent alone decides how to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker holds both ends of its task queue and would wait for ever after its parent was killed.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _load_into_slot(payload: Any, slot_path: str) -> Loaded:
    assert _worker_load is not None
    loaded = _call(_worker_load, payload)
    return replace(loaded, rows=put_in(loaded.rows, slot_path))


def _call(load: Load, payload: Any) -> Loaded:
    """Load, and turn an error that may not survive pickling into one that does."""
    try:
        return load(payload)
    except FastIOError:
        raise
    except Exception as error:
        # Any class of error can come out of a user's function; its traceback exists only in this process.
        raise FastIOError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from None


def _run_on_ray(load: Load, tasks: Iterable[Task], ahead: int) -> Iterator[tuple[Task, Loaded]]:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("engine='ray' needs Ray: pip install 'lightning_fastio[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    source = ray.put(load)
    remote = ray.remote(_call)
    pending: deque[tuple[Task, Any]] = deque()
    try:
        for task in tasks:
            pending.append((task, remote.remote(source, task.payload)))
            if len(pending) >= ahead:
                task, reference = pending.popleft()
                yield task, _ray_result(ray, reference)
        while pending:
            task, reference = pending.popleft()
            yield task, _ray_result(ray, reference)
    finally:
        for _, reference in pending:
            ray.cancel(reference)


def _ray_result(ray: Any, reference: Any) -> Loaded:
    try:
        loaded: Loaded = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    return loaded
