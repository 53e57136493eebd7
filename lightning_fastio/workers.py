"""Numbered tasks to results in their order: in the calling thread, in reader threads, or in worker processes."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fastio.errors import ConfigError
from lightning_fastio.fetch import BatchFetcher, Fetched, Task

MakeTask = Callable[[int], Task]
"""Gives the task with a number; may be called from any thread, each number once and in rising order."""


class Workers(Protocol):
    """Results in the order of their numbers; ends after the last one."""

    def __next__(self) -> Fetched: ...

    def close(self) -> None:
        """Stop; results that are under way are dropped. Idempotent."""
        ...


class InlineWorkers:
    """Fetches each batch in the calling thread when it is asked for."""

    def __init__(self, fetcher: BatchFetcher, make_task: MakeTask, start: int, stop: int) -> None:
        self._fetcher = fetcher
        self._make_task = make_task
        self._next, self._stop = start, stop

    def __next__(self) -> Fetched:
        if self._next >= self._stop:
            raise StopIteration
        self._next += 1
        return self._fetcher(self._make_task(self._next - 1))

    def close(self) -> None:
        self._next = self._stop


class ThreadWorkers:
    """Fetches ahead in threads.

    A batch is handed over as it is: no pickling, no shared memory. Whatever raises in a thread is raised again at
    its own batch. Threads end when the last batch is taken, on `close`, and when this object is forgotten.
    """

    def __init__(
        self, fetcher: BatchFetcher, make_task: MakeTask, start: int, stop: int, *, num_threads: int, ahead: int
    ) -> None:
        """Start.

        Args:
            fetcher: Does the work.
            make_task: Gives the tasks.
            start: Number of the first task.
            stop: Number after the last task.
            num_threads: Threads at first.
            ahead: Finished or running batches at most, beyond the one that the caller holds.
        """
        self._shared = _Shared(fetcher, make_task, start, stop, num_threads, ahead)
        # Threads refer to the shared state only, so that an iterator which is dropped half-way can be collected.
        self._finalizer = weakref.finalize(self, self._shared.close)
        self._shared.start_threads()

    def __next__(self) -> Fetched:
        return self._shared.take()

    def resize(self, num_threads: int, ahead: int) -> None:
        """Change the number of threads and the look-ahead while running; order and results stay the same."""
        self._shared.resize(num_threads, ahead)

    def close(self) -> None:
        self._finalizer()


class _Shared:
    """What the threads of one `ThreadWorkers` and its owner share; every field is guarded by ``changed``."""

    def __init__(
        self, fetcher: BatchFetcher, make_task: MakeTask, start: int, stop: int, num_threads: int, ahead: int
    ) -> None:
        self._fetcher = fetcher
        self._make_task = make_task
        self._next_task = start
        self._next_result = start
        self._stop = stop
        self._num_threads = num_threads
        self._ahead = ahead
        self._results: dict[int, Fetched | BaseException] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()

    def start_threads(self) -> None:
        with self._changed:
            while len(self._threads) < self._num_threads:
                thread = threading.Thread(
                    target=self._run, args=(len(self._threads),), name=f"fastio-read-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def take(self) -> Fetched:
        with self._changed:
            if self._next_result >= self._stop:
                raise StopIteration
            while self._next_result not in self._results:
                self._changed.wait()
                if self._next_result >= self._stop:
                    raise StopIteration
            result = self._results.pop(self._next_result)
            self._next_result += 1
            self._changed.notify_all()
        if isinstance(result, BaseException):
            self.close()
            raise result
        if self._next_result >= self._stop:
            self.close()
        return result

    def resize(self, num_threads: int, ahead: int) -> None:
        with self._changed:
            self._num_threads, self._ahead = num_threads, ahead
            # Threads whose number is too high leave by themselves; their places can be filled again.
            self._threads = self._threads[:num_threads]
            self._changed.notify_all()
        self.start_threads()

    def close(self) -> None:
        with self._changed:
            self._next_result = self._stop
            self._results.clear()
            threads, self._threads = self._threads, []
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, number: int) -> None:
        _use_one_core()
        fetcher = self._fetcher.for_thread()
        while (index := self._claim(number)) is not None:
            try:
                result: Fetched | BaseException = fetcher(self._make_task(index))
            except BaseException as error:
                result = error
            with self._changed:
                if self._next_result <= index < self._stop:
                    self._results[index] = result
                    self._changed.notify_all()
            del result

    def _claim(self, number: int) -> int | None:
        """The next task for a thread, once there is room for its result; None when it should end."""
        me = threading.current_thread()
        with self._changed:
            while True:
                mine = number < len(self._threads) and self._threads[number] is me
                if not mine or self._next_task >= self._stop or self._next_result >= self._stop:
                    return None
                if self._next_task - self._next_result < self._ahead:
                    self._next_task += 1
                    return self._next_task - 1
                self._changed.wait()


_torch_threads = threading.Lock()


def _use_one_core() -> None:
    """Let torch operations in this thread run alone: teams of threads would spin against each other at barriers.

    ``torch.set_num_threads`` acts on the calling thread, and is also what threads that start later begin with. So
    another thread, which ends at once, puts the old number back for those.
    """
    with _torch_threads:
        inherited = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(inherited,), name="fastio-restore", daemon=True)
        restore.start()
        restore.join()


class ProcessWorkers:
    """Fetches ahead in the worker processes of a torch DataLoader, for transforms that hold the GIL."""

    def __init__(self, loader: DataLoader[Any], tasks: TaskSampler, make_task: MakeTask, start: int, stop: int) -> None:
        tasks.renew(make_task, start, stop)
        self._iterator: Iterator[Fetched] | None = iter(loader)

    def __next__(self) -> Fetched:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def close(self) -> None:
        self._iterator = None


class TaskSampler(Sampler[Task]):
    """Hands the tasks of one epoch after the other to a DataLoader whose workers persist."""

    def __init__(self) -> None:
        self._tasks: Iterator[Task] = iter(())

    def renew(self, make_task: MakeTask, start: int, stop: int) -> None:
        """Set the tasks of the next iteration."""
        self._tasks = (make_task(number) for number in range(start, stop))

    def __iter__(self) -> Iterator[Task]:
        return self._tasks


class TaskDataset(Dataset[Fetched]):
    """Makes a fetcher look like a dataset whose indices are tasks."""

    def __init__(self, fetcher: BatchFetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, task: Task) -> Fetched:
        return self._fetcher(task)


def make_process_loader(
    fetcher: BatchFetcher,
    tasks: TaskSampler,
    *,
    num_workers: int,
    prefetch_factor: int,
    persistent: bool,
    context: str,
    pin_memory: bool,
) -> DataLoader[Any]:
    """A DataLoader whose workers fetch whole batches.

    Raises:
        ConfigError: A transform cannot be sent to another process.
    """
    if context != "fork":
        for transform in fetcher.transforms:
            _check_picklable("transform", transform)
        _check_picklable("sample_transform", fetcher.sample_transform)
    return DataLoader(
        TaskDataset(fetcher),
        batch_size=None,
        sampler=tasks,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent,
        multiprocessing_context=context,
        worker_init_fn=_init_worker,
        pin_memory=pin_memory,
        # Its own generator, so that starting workers does not move the global one.
        generator=torch.Generator(),
    )


def _check_picklable(name: str, transform: object) -> None:
    try:
        pickle.dumps(transform)
    except Exception as error:
        raise ConfigError(
            f"{name}={transform!r} cannot be sent to worker processes ({error}): define it as a function or class of a "
            "module, not as a lambda or local function, or use worker_type='thread'"
        ) from error


def _init_worker(worker: int) -> None:
    """One core for each worker: torch has set its own threads to one already, Arrow has not."""
    import pyarrow

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
