"""`BatchLoader`: whole batches of a reader, in a planned order, read ahead of the training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, SequentialSampler
from typing_extensions import Self

from lightning_fastio.allowance import cpu_allowance
from lightning_fastio.epoch import Epoch, Leg, Setting
from lightning_fastio.errors import ConfigError, ResumeError
from lightning_fastio.fetch import BatchFetcher, Transform
from lightning_fastio.formats.base import Reader
from lightning_fastio.plan import Plan, Shuffle
from lightning_fastio.rows import AllRows, ChosenRows, RowSet
from lightning_fastio.tasks import Tasks
from lightning_fastio.workers import (
    InlineWorkers,
    ProcessWorkers,
    TaskSampler,
    ThreadWorkers,
    Workers,
    make_process_loader,
)

_GROUP_BYTES = 8 << 20
"""Batches that are smaller than this are read several at a time."""


@dataclass
class LoaderStats:
    """What a loader did since it was made. Seconds are summed over threads or processes."""

    num_batches: int = 0
    """Batches delivered."""
    num_rows: int = 0
    """Rows delivered."""
    read_s: float = 0.0
    """Seconds of reading and decoding."""
    transform_s: float = 0.0
    """Seconds in transforms."""


class BatchLoader:
    """An iterable over batches that Lightning takes as it takes a DataLoader.

    It is not a torch DataLoader, so that Lightning leaves the sampling alone: the ranks are dealt out here. The
    order depends on (seed, epoch) and nothing else: neither on workers nor on the global random generators.

    Example:
        >>> loader = BatchLoader(open_reader("train.npy"), batch_size=256, shuffle="global")
        >>> for batch in loader:
        ...     x = batch["train"]  # (256, *sample_shape)
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        *,
        shuffle: Shuffle = "none",
        seed: int = 0,
        drop_last: bool = False,
        pad_last: bool = False,
        rows: npt.ArrayLike | RowSet | None = None,
        weights: npt.ArrayLike | None = None,
        num_workers: int | Literal["auto"] = "auto",
        worker_type: Literal["thread", "process"] = "thread",
        prefetch_factor: int = 2,
        multiprocessing_context: Literal["forkserver", "spawn", "fork"] = "forkserver",
        persistent_workers: bool = True,
        pin_memory: bool | Literal["auto"] = "auto",
        batch_as: Literal["dict", "tuple"] = "dict",
        transform: Transform | Sequence[Transform] | None = None,
        sample_transform: Transform | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        allow_changed_data: bool = False,
    ) -> None:
        """Set up; nothing is read before the first batch is asked for.

        Args:
            reader: Where rows come from, see `open_reader`.
            batch_size: Rows of a batch on one rank.
            shuffle: Order of training, see `Shuffle`.
            seed: Seed of the order and of transforms.
            drop_last: Leave out the batches at the end of an epoch that would not be full on every rank. Otherwise
                the last rows are spread over the ranks, each row once.
            pad_last: Instead of smaller batches at the end, fill them with rows from the start of the epoch.
            rows: Rows to use: row numbers, one bool for each row, or a `RowSet`; all by default.
            weights: One non-negative number for each used row: rows are drawn with replacement, each with a
                probability in proportion to its weight. As many rows as without weights make an epoch.
            num_workers: Threads or processes that read ahead; 0 reads in the calling thread. ``auto`` takes what the
                CPU allowance gives, at most 4, and lets `PrefetchCallback` adjust threads to what steps wait.
            worker_type: ``thread``, or ``process`` for transforms that hold the GIL.
            prefetch_factor: Batches that each worker reads ahead.
            multiprocessing_context: How worker processes start.
            persistent_workers: Keep worker processes from one epoch to the next.
            pin_memory: Read into pinned memory; ``auto`` does when CUDA can be used.
            batch_as: ``tuple`` gives the values in the order of the fields instead of a dict.
            transform: Takes and returns a whole batch; or several that do so in turn. An argument ``generator`` or
                ``rng``, or an attribute of that name, gets a generator that depends on (seed, epoch, batch, rank)
                alone.
            sample_transform: The same for one sample at a time; the results are stacked.
            rank: This rank; read from torch.distributed when an epoch starts by default.
            world_size: Number of ranks; likewise.
            allow_changed_data: Resume from a checkpoint although the data has changed since.

        Raises:
            ConfigError: An argument is out of range or contradicts another one.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: expected 1 or more")
        if prefetch_factor < 1:
            raise ConfigError(f"prefetch_factor={prefetch_factor}: expected 1 or more")
        if num_workers != "auto" and num_workers < 0:
            raise ConfigError(f"num_workers={num_workers}: expected 0 or more, or 'auto'")
        if drop_last and pad_last:
            raise ConfigError("drop_last and pad_last exclude each other: choose one")
        self.reader = reader
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.pad_last = pad_last
        chosen = AllRows(len(reader)) if rows is None else rows
        row_set = chosen if isinstance(chosen, RowSet) else ChosenRows(chosen, len(reader))
        self.plan = Plan(reader, row_set, shuffle=shuffle, seed=seed, weights=weights)
        self.num_workers = _auto_workers() if num_workers == "auto" else num_workers
        self.adjusts = num_workers == "auto" and worker_type == "thread"
        """Whether whoever measures the training may `resize`."""
        self.worker_type = worker_type
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.persistent_workers = persistent_workers
        self.pin_memory = torch.cuda.is_available() if pin_memory == "auto" else pin_memory
        self.rank = rank
        self.world_size = world_size
        self.allow_changed_data = allow_changed_data
        self.stats = LoaderStats()
        self.sampler = EpochSampler(self)
        self.batch_sampler: Any = None
        """Lets Lightning's predict loop ask for row numbers, where `FastIODataModule` sets it."""
        self.on_epoch: Callable[[], None] | None = None
        """Called after each `set_epoch`."""
        self._fetcher = BatchFetcher(
            reader,
            transforms=() if transform is None else [transform] if callable(transform) else transform,
            sample_transform=sample_transform,
            batch_as=batch_as,
            pin_memory=self.pin_memory and worker_type == "thread",
            owns_process=worker_type == "process" and self.num_workers > 0,
        )
        self._process_loader: DataLoader[Any] | None = None
        self._tasks = TaskSampler()
        self._epoch_number = 0
        self._repeat = 0
        self._position: tuple[Epoch, int] | None = None
        """The epoch that is being read and the number of the next batch to deliver."""
        self._resumed: tuple[Leg, ...] = ()
        """What was read of the epoch in earlier runs, as long as this one has delivered nothing."""
        self._started = False
        self._workers: weakref.ref[Workers] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Batches from where the loader stands; reading begins with the first one that is asked for."""
        return _Iteration(self)

    def __len__(self) -> int:
        """Batches of the present epoch on every rank, those read before a resume included."""
        return len(self.epoch())

    def epoch(self) -> Epoch:
        """The present epoch as this rank sees it."""
        rank, world_size = self._ranks()
        return self.plan.epoch(
            self._epoch_number,
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            pad_last=self.pad_last,
            repeat=self._repeat,
            done=self._legs(),
        )

    def rows_of(self, batch: int) -> list[int]:
        """Row numbers of a batch of the present epoch, for writers of predictions."""
        rows: list[int] = self.plan.rows.at(self.epoch().indices(batch)).tolist()
        return rows

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader already stands inside it after `load_state_dict`."""
        if epoch != self._epoch_number or self._started or not self._resumed:
            self._epoch_number, self._repeat = epoch, 0
            self._go_to(())
        if self.on_epoch is not None:
            self.on_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: what was delivered, not what was read ahead. The same on every rank."""
        return self.state_dict_before(0)

    def state_dict_before(self, num_batches: int) -> dict[str, Any]:
        """Where the loader stood before it delivered the last ``num_batches`` batches of this pass."""
        legs = self._legs()
        if legs:
            legs = (*legs[:-1], replace(legs[-1], num_batches=max(0, legs[-1].num_batches - num_batches)))
        return {
            "version": 1,
            "seed": self.plan.seed,
            "shuffle": self.plan.shuffle,
            "epoch": self._epoch_number,
            "repeat": self._repeat,
            "legs": [[*asdict(leg.setting).values(), leg.num_batches] for leg in legs],
            "data": self.reader.fingerprint,
            "rows": self.plan.rows.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with exactly the rows that were not delivered when the state was taken.

        The batch size, the number of workers and the number of ranks may differ.

        Raises:
            ResumeError: The order or the data is another one than when the state was taken.
        """
        now = self.state_dict()
        for key, remedy in (
            ("seed", "use the same seed"),
            ("shuffle", "use the same shuffle"),
            ("data", "restore the data, or pass allow_changed_data=True"),
            ("rows", "use the same split and rows, or pass allow_changed_data=True"),
        ):
            if state[key] != now[key] and not (key in ("data", "rows") and self.allow_changed_data):
                raise ResumeError(
                    f"the checkpoint was written with {key} {state[key]!r}, but now it is {now[key]!r}, so that the "
                    f"rows not yet seen cannot be told: {remedy}"
                )
        self._epoch_number, self._repeat = state["epoch"], state["repeat"]
        self._go_to(tuple(Leg(Setting(*setting), num_batches) for *setting, num_batches in state["legs"]))

    def resize(self, num_workers: int) -> None:
        """Change the number of reader threads, also in the middle of an epoch; the batches stay the same."""
        self.num_workers = num_workers
        workers = self._workers() if self._workers else None
        if isinstance(workers, ThreadWorkers):
            workers.resize(num_workers, num_workers * self.prefetch_factor)

    def close(self) -> None:
        """Stop threads and processes. The reader stays open: it belongs to whoever opened it."""
        workers = self._workers() if self._workers else None
        if workers is not None:
            workers.close()
        self._process_loader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> tuple[Epoch, Workers]:
        """Start an epoch: the next pass if this one was begun before, else where the loader stands."""
        if self._started:
            self._repeat += 1
            self._go_to(())
        self._started = True
        epoch = self.epoch()
        start, stop = epoch.start, epoch.num_batches
        reads_here = self.worker_type == "thread" or self.num_workers == 0
        # The tasks do not refer to the loader: threads that hold them must not keep it alive.
        make_tasks = Tasks(
            epoch,
            self.plan.rows,
            (self.plan.seed, self._epoch_number, self._repeat, self._ranks()[0]),
            reader=self.reader if reads_here else None,
            batch_bytes=self._batch_bytes(),
        )
        workers: Workers
        if self.num_workers == 0:
            workers = InlineWorkers(self._fetcher, make_tasks, start, stop)
        elif self.worker_type == "thread":
            ahead = self.num_workers * self.prefetch_factor
            workers = ThreadWorkers(
                self._fetcher,
                make_tasks,
                start,
                stop,
                num_threads=self.num_workers,
                ahead=ahead,
                group=self._batches_per_read(),
            )
        else:
            if self._process_loader is None:
                self._process_loader = make_process_loader(
                    self._fetcher,
                    self._tasks,
                    num_workers=self.num_workers,
                    prefetch_factor=self.prefetch_factor,
                    persistent=self.persistent_workers,
                    context=self.multiprocessing_context,
                    pin_memory=self.pin_memory,
                )
            workers = ProcessWorkers(self._process_loader, self._tasks, make_tasks, start, stop)
        # The iteration owns its workers: they stop when it is dropped half-way.
        self._workers = weakref.ref(workers)
        return epoch, workers

    def _go_to(self, legs: tuple[Leg, ...]) -> None:
        self._resumed, self._position, self._started = legs, None, False

    def _legs(self) -> tuple[Leg, ...]:
        """What was delivered of the present epoch."""
        if self._position is None:
            return self._resumed
        epoch, batch = self._position
        return epoch.legs_after(batch)

    def _batches_per_read(self) -> int:
        # Sparse tensors cannot be cut into batches.
        if any(spec.kind == "sparse" for spec in self.reader.schema.values()):
            return 1
        return max(1, min(_GROUP_BYTES // self._batch_bytes(), 64))

    def _batch_bytes(self) -> int:
        return max(1, self.reader.schema.row_bytes * self.batch_size)

    def _ranks(self) -> tuple[int, int]:
        if self.world_size is not None:
            return self.rank or 0, self.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1


class _Iteration:
    """One pass over a loader."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._epoch: Epoch | None = None
        self._workers: Workers | None = None
        self._batch = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # Lightning makes the iterator before it sets the epoch, so everything is settled only now.
        if self._workers is None:
            self._epoch, self._workers = self._loader._begin()
            self._batch = self._epoch.start
        assert self._epoch is not None
        fetched = next(self._workers)
        stats = self._loader.stats
        stats.num_batches += 1
        stats.num_rows += fetched.num_rows
        stats.read_s += fetched.read_s
        stats.transform_s += fetched.transform_s
        self._batch += 1
        self._loader._position = self._epoch, self._batch
        return fetched.batch


class EpochSampler(SequentialSampler):
    """What Lightning tells the number of the epoch."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        epoch = self._loader.epoch()
        for batch in range(epoch.num_batches):
            yield from self._loader.plan.rows.at(epoch.indices(batch)).tolist()

    def __len__(self) -> int:
        return len(self._loader.plan.rows)


def _auto_workers() -> int:
    return max(1, min(4, int(cpu_allowance())))
