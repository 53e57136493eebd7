"""Numbered tasks to results in their order: in the calling thread, in reader threads, or in worker processes."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fastio.errors import ConfigError
from lightning_fastio.fetch import BatchFetcher, Fetched
from lightning_fastio.tasks import Task

MakeTasks: TypeAlias = Callable[[range], list[Task]]
"""Gives the tasks with some numbers; may be called from any thread."""


class Workers(Protocol):
    """Results in the order of their numbers; ends after the last one."""

    def __next__(self) -> Fetched: ...

    def close(self) -> None:
        """Stop; results that are under way are dropped. Idempotent."""
        ...


class InlineWorkers:
    """Fetches each batch in the calling thread when it is asked for."""

    def __init__(self, fetcher: BatchFetcher, make_tasks: MakeTasks, start: int, stop: int) -> None:
        self._fetcher = fetcher
        self._make_tasks = make_tasks
        self._next, self._stop = start, stop

    def __next__(self) -> Fetched:
        if self._next >= self._stop:
            raise StopIteration
        self._next += 1
        return self._fetcher(self._make_tasks(range(self._next - 1, self._next))[0])

    def close(self) -> None:
        self._next = self._stop


class ThreadWorkers:
    """Fetches ahead in threads.

    A batch is handed over as it is: no pickling, no shared memory. Whatever raises in a thread is raised again at
    its own batch. Threads end when the last batch is taken, on `close`, and when this object is forgotten.
    """

    def __init__(
        self,
        fetcher: BatchFetcher,
        make_tasks: MakeTasks,
        start: int,
        stop: int,
        *,
        num_threads: int,
        ahead: int,
        group: int = 1,
    ) -> None:
        """Start.

        Args:
            fetcher: Does the work.
            make_tasks: Gives the tasks.
            start: Number of the first task.
            stop: Number after the last task.
            num_threads: Threads at first.
            ahead: Groups that are finished or under way at most, beyond the one that the caller holds.
            group: Tasks that are fetched by one read, where batches are so small that handing them over would cost
                more than reading them.
        """
        self._groups = [range(first, min(first + group, stop)) for first in range(start, stop, group)]
        self._num_ordered = 0
        self._num_taken = 0
        self._ahead = ahead
        self._finished: dict[int, list[Fetched | BaseException]] = {}
        self._current: deque[Fetched | BaseException] = deque()
        self._crew = _Crew(fetcher, make_tasks, self._groups)
        # Threads refer to the crew only, so that an iteration which is dropped half-way can be collected.
        self._finalizer = weakref.finalize(self, self._crew.dismiss)
        self._order()
        self._crew.resize(num_threads)

    def __next__(self) -> Fetched:
        if not self._current:
            self._current.extend(self._take_group())
        result = self._current.popleft()
        if isinstance(result, BaseException):
            self.close()
            raise result
        if not self._current and self._num_taken == len(self._groups):
            self.close()
        return result

    def resize(self, num_threads: int, ahead: int) -> None:
        """Change the number of threads and the look-ahead while running; order and results stay the same."""
        if self._finalizer.alive:
            self._ahead = ahead
            self._order()
            self._crew.resize(num_threads)

    def close(self) -> None:
        self._num_taken = self._num_ordered = len(self._groups)
        self._current.clear()
        self._finished.clear()
        self._finalizer()

    def _take_group(self) -> list[Fetched | BaseException]:
        if self._num_taken == len(self._groups):
            raise StopIteration
        while self._num_taken not in self._finished:
            group, results = self._crew.done.get()
            if group is None:
                raise StopIteration  # Closed by another thread.
            self._finished[group] = results
        self._num_taken += 1
        self._order()
        return self._finished.pop(self._num_taken - 1)

    def _order(self) -> None:
        """Order as many groups as there is room for."""
        for group in range(self._num_ordered, min(self._num_taken + self._ahead, len(self._groups))):
            self._num_ordered = group + 1
            self._crew.tasks.put(group)


class _Crew:
    """Threads that take groups of tasks from one queue and put results into another; None sends one home.

    Both queues are C code, so that handing over a batch costs microseconds of the training thread.
    """

    def __init__(self, fetcher: BatchFetcher, make_tasks: MakeTasks, groups: Sequence[range]) -> None:
        self.tasks: SimpleQueue[int | None] = SimpleQueue()
        self.done: SimpleQueue[tuple[int | None, list[Fetched | BaseException]]] = SimpleQueue()
        self._fetcher = fetcher
        self._make_tasks = make_tasks
        self._groups = groups
        self._threads: list[threading.Thread] = []
        self._num_threads = 0

    def resize(self, num_threads: int) -> None:
        """Hire, or send home after what is ordered already."""
        for _ in range(self._num_threads - num_threads):
            self.tasks.put(None)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(num_threads - self._num_threads):
            thread = threading.Thread(target=self._run, name=f"fastio-read-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._num_threads = num_threads

    def dismiss(self) -> None:
        """Drop what is ordered, end the threads, and wake up whoever waits for a result."""
        with suppress(Empty):
            while True:
                self.tasks.get_nowait()
        for _ in self._threads:
            self.tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads, self._num_threads = [], 0
        self.done.put((None, []))

    def _run(self) -> None:
        _use_one_core()
        fetcher = self._fetcher.for_thread()
        while (group := self.tasks.get()) is not None:
            self.done.put((group, self._fetch(fetcher, self._groups[group])))

    def _fetch(self, fetcher: BatchFetcher, numbers: range) -> list[Fetched | BaseException]:
        try:
            return list(fetcher.fetch_together(self._make_tasks(numbers)))
        except BaseException as error:
            if len(numbers) == 1:
                return [error]
        # One of them fails: the others are fetched alone, and the error comes at its own batch.
        return [result for number in numbers for result in self._fetch(fetcher, range(number, number + 1))]


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

    def __init__(
        self, loader: DataLoader[Any], tasks: TaskSampler, make_tasks: MakeTasks, start: int, stop: int
    ) -> None:
        tasks.renew(make_tasks, start, stop)
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

    def renew(self, make_tasks: MakeTasks, start: int, stop: int) -> None:
        """Set the tasks of the next iteration."""
        self._tasks = (make_tasks(range(number, number + 1))[0] for number in range(start, stop))

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
