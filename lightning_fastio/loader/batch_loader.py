"""`BatchLoader`: whole batches of a reader, in a planned order, read ahead of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch.utils.data import SequentialSampler
from typing_extensions import Self

from lightning_fastio.allowance import cpu_allowance
from lightning_fastio.arguments import check_whole
from lightning_fastio.errors import ConfigError
from lightning_fastio.formats.base import Reader, row_bytes
from lightning_fastio.loader.fetch import BatchFetcher, Transform
from lightning_fastio.loader.pool import WorkerPool
from lightning_fastio.loader.standing import ABOUT_DATA, Standing
from lightning_fastio.loader.tasks import Tasks
from lightning_fastio.loader.workers import Workers
from lightning_fastio.plan.epoch import Epoch
from lightning_fastio.plan.plan import Plan, Shuffle
from lightning_fastio.plan.rows import AllRows, ChosenRows, RowSet

_MOST_AUTO_WORKERS = 4
_SMALL_BATCH_BYTES = 64 << 10

_GROUP_BYTES = 12 << 20
"""Threads read this much at a time, where batches are smaller."""

_GROUP_BATCHES = 64
"""Batches that are read at a time at most."""


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
            rows: Rows to use, each once and in the order of the file: row numbers, one bool for each row, or a
                `RowSet`; all by default.
            weights: One non-negative number for each used row: rows are drawn with replacement, each with a
                probability in proportion to its weight. As many rows as without weights make an epoch.
            num_workers: Threads or processes that read ahead; 0 reads in the calling thread. ``auto`` takes what the
                CPU allowance gives, at most 4, and one for batches of a few kilobytes; `PrefetchCallback` adjusts
                threads to what steps wait.
            worker_type: ``thread``, or ``process`` for transforms that hold the GIL.
            prefetch_factor: Batches that each worker reads ahead; for small batches, groups of up to 64 that are read
                at a time.
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
        check_whole("batch_size", batch_size, least=1)
        check_whole("prefetch_factor", prefetch_factor, least=1)
        check_whole("seed", seed, least=0)
        if num_workers != "auto":
            check_whole("num_workers", num_workers, least=0, otherwise="or 'auto'")
        if pin_memory not in (True, False, "auto"):
            raise ConfigError(f"pin_memory={pin_memory!r}: expected True, False or 'auto'")
        _check_choices(worker_type=worker_type, batch_as=batch_as, multiprocessing_context=multiprocessing_context)
        transforms = [] if transform is None else [transform] if callable(transform) else transform
        if not isinstance(transforms, Sequence) or not all(map(callable, transforms)):
            raise ConfigError(f"transform={transform!r}: expected a function that takes a batch, or a list of them")
        if sample_transform is not None and not callable(sample_transform):
            raise ConfigError(f"sample_transform={sample_transform!r}: expected a function that takes a sample")
        if drop_last and pad_last:
            raise ConfigError("drop_last and pad_last exclude each other: choose one")
        if (rank is None) != (world_size is None) or (rank or 0) not in range(world_size or 1):
            raise ConfigError(
                f"rank={rank} and world_size={world_size}: give both or none, rank from 0 to world_size - 1"
            )
        self.reader = reader
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.pad_last = pad_last
        self.rank = rank
        self.world_size = world_size
        self.allow_changed_data = allow_changed_data
        chosen = AllRows(len(reader)) if rows is None else rows
        row_set = chosen if isinstance(chosen, RowSet) else ChosenRows(chosen, len(reader))
        self.plan = Plan(reader, row_set, shuffle=shuffle, seed=seed, weights=weights)
        self.pin_memory = torch.cuda.is_available() if pin_memory == "auto" else pin_memory
        self.worker_type = worker_type
        self.adjusts = num_workers == "auto" and worker_type == "thread"
        """Whether whoever measures the training may `resize`."""
        self.prefetch_factor = prefetch_factor
        self.stats = LoaderStats()
        self.sampler = EpochSampler(self)
        self.batch_sampler: Any = None
        """Lets Lightning's predict loop ask for row numbers, where `FastIODataModule` sets it."""
        self.on_epoch: Callable[[], None] | None = None
        """Called after each `set_epoch`."""
        in_processes = worker_type == "process" and num_workers != 0
        fetcher = BatchFetcher(
            reader,
            transforms=transforms,
            sample_transform=sample_transform,
            batch_as=batch_as,
            pin_memory=self.pin_memory and not in_processes,
            owns_process=in_processes,
        )
        self._can_group = not fetcher.has_transform and all(spec.kind == "tensor" for spec in reader.schema.values())
        self._pool = WorkerPool(
            fetcher,
            num_workers=self._auto_workers() if num_workers == "auto" else num_workers,
            worker_type=worker_type,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            persistent_workers=persistent_workers,
            pin_memory=self.pin_memory,
        )
        self._standing = self._before_last = Standing()
        self._skipped: Standing | None = None

    def __iter__(self) -> Iterator[Any]:
        """Batches from where the loader stands; reading begins with the first one that is asked for."""
        return _Iteration(self)

    def __len__(self) -> int:
        """Batches of the present epoch on every rank, those read before a resume included."""
        return len(self.epoch()) - self._standing.num_uncounted

    @property
    def num_workers(self) -> int:
        """Threads or processes that read ahead."""
        return self._pool.num_workers

    @property
    def batches_per_read(self) -> int:
        """Batches that one read of a reader thread fetches at most: several where they are small."""
        if not self._can_group:
            return 1
        return max(1, min(_GROUP_BYTES // self._batch_bytes, _GROUP_BATCHES))

    @property
    def num_delivered(self) -> int:
        """Batches that were delivered since the epoch, or the run that goes on with it, began."""
        return self._standing.num_delivered

    @property
    def dataset(self) -> RowSet:
        """The rows that are used, for whoever asks for ``len(loader.dataset)``."""
        return self.plan.rows

    def epoch(self) -> Epoch:
        """The present pass over the data as this rank sees it."""
        rank, world_size = self._ranks()
        return self.plan.epoch(
            self._standing.epoch,
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            pad_last=self.pad_last,
            repeat=self._standing.repeat,
            done=self._standing.legs,
            window_rows=self._standing.window_rows,
        )

    def rows_of(self, batch: int) -> list[int]:
        """Row numbers of a batch of the present epoch, numbered from 0.

        Raises:
            IndexError: There is no such batch, or it was read with another batch size in an earlier run.
        """
        epoch = self.epoch()
        number = batch - epoch.num_past_batches
        if not 0 <= number < epoch.num_batches:
            raise IndexError(f"batch {batch} is not among the {len(epoch)} of this epoch")
        rows: list[int] = self.plan.rows.at(epoch.indices(number)).tolist()
        return rows

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader already stands inside it after `load_state_dict`."""
        standing = self._standing
        is_resumed = standing.epoch == epoch and standing.current is None and standing.resumed
        if not is_resumed:
            self._skipped = standing if standing.current is None and standing.resumed else None
            self._standing = self._before_last = Standing(epoch)
        if self.on_epoch is not None:
            self.on_epoch()

    def finish_skipped(self, *, counted: bool) -> None:
        """Go back to the pass that a loaded state had left unfinished and `set_epoch` skipped, if there is one.

        Lightning takes an epoch that ``max_steps`` ended half-way for done, so that its last rows would never be seen.

        Args:
            counted: Whether the training loop still counts the batches that were read of it before.
        """
        unfinished = self._skipped or self._standing
        if unfinished.current is None and unfinished.resumed:
            num_uncounted = 0 if counted else sum(leg.num_batches for leg in unfinished.legs)
            self._standing = self._before_last = unfinished._replace(num_uncounted=num_uncounted)
        self._skipped = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: what was delivered, not what was read ahead. The same on every rank."""
        return self._standing.state(self._identity())

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """What `state_dict` gives now, made when it is called: cheap enough for every batch."""
        standing = self._standing
        return lambda: standing.state(self._identity())

    def state_dict_before_last(self) -> dict[str, Any]:
        """Where the loader stood before it delivered its last batch, which may be in use still."""
        return self._before_last.state(self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with exactly the rows that were not delivered when the state was taken.

        The batch size, the number of workers and the number of ranks may differ. After a state from the end of a
        pass nothing is left of it: the next iteration is empty, unless `set_epoch` goes to another epoch first.

        Raises:
            ResumeError: The order or the data is another one than when the state was taken.
        """
        may_differ = ABOUT_DATA if self.allow_changed_data else ()
        self._standing = self._before_last = Standing.of_state(state, self._identity(), may_differ=may_differ)

    def resize(self, num_workers: int) -> None:
        """Change the number of reader threads, also in the middle of an epoch; the batches stay the same.

        Raises:
            ConfigError: There are no reader threads, or none would be left.
        """
        self._pool.resize(num_workers)

    def close(self) -> None:
        """Stop threads and processes. The reader stays open: it belongs to whoever opened it."""
        self._pool.close()

    def __getstate__(self) -> dict[str, Any]:
        # A loader arrives in another process where it stands; the Trainer stays behind.
        settled = self._standing.settled()
        return {**vars(self), "_standing": settled, "_before_last": settled, "_skipped": None, "on_epoch": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> Workers:
        """Start a pass: the next one if the present one was begun before, else from where the loader stands."""
        standing = self._standing
        if standing.current is not None:
            standing = Standing(standing.epoch, standing.repeat + 1, num_delivered=standing.num_delivered)
        self._standing = standing._replace(window_rows=standing.window_rows or self.plan.window_rows)
        epoch = self.epoch()
        self._standing = self._standing._replace(current=epoch, batch=epoch.start)
        # The tasks do not refer to the loader: threads that hold them must not keep it alive.
        make_tasks = Tasks(
            epoch,
            self.plan.rows,
            (self.plan.seed, standing.epoch, standing.repeat, self._ranks()[0]),
            reader=None if self._pool.in_processes else self.reader,
            batch_bytes=self._batch_bytes,
        )
        return self._pool.start(make_tasks, range(epoch.start, epoch.num_batches), group=self.batches_per_read)

    def _auto_workers(self) -> int:
        # Between batches this small a second thread only passes the interpreter's lock to and fro.
        if self._can_group and not self.plan.by_blocks and self._batch_bytes < _SMALL_BATCH_BYTES:
            return 1
        return max(1, min(_MOST_AUTO_WORKERS, int(cpu_allowance())))

    @property
    def _batch_bytes(self) -> int:
        return int(row_bytes(self.reader) * self.batch_size)

    def _identity(self) -> dict[str, Any]:
        """What the unseen rows depend on."""
        return {
            "seed": self.plan.seed,
            "shuffle": self.plan.shuffle,
            "weights": self.plan.weights_fingerprint,
            # In words, so that a message tells what changed; the fingerprint also knows the files.
            "number of rows": len(self.reader),
            "fields": repr(self.reader.schema),
            "data": self.reader.fingerprint,
            "rows": self.plan.rows.fingerprint,
        }

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
        self._workers: Workers | None = None
        self._standing = Standing()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        before = loader._standing
        # Lightning makes the iterator before it sets the epoch, so everything is settled only now.
        if self._workers is None:
            self._workers = loader._begin()
            self._standing = loader._standing
        fetched = next(self._workers)
        self._standing = self._standing.after(self._standing.batch)
        loader._before_last, loader._standing = before, self._standing
        stats = loader.stats
        stats.num_batches += 1
        stats.num_rows += fetched.num_rows
        stats.read_s += fetched.read_s
        stats.transform_s += fetched.transform_s
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


def _check_choices(**values: str) -> None:
    choices = {
        "worker_type": ("thread", "process"),
        "batch_as": ("dict", "tuple"),
        "multiprocessing_context": ("forkserver", "spawn", "fork"),
    }
    for name, value in values.items():
        if value not in choices[name]:
            raise ConfigError(f"{name}={value!r}: expected {' or '.join(map(repr, choices[name]))}")
