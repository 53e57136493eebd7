"""`bench`: the usual loader, this package and the limit of the machine, measured in turns on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lightning_fastio.bench.plain import plain_loader
from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.errors import ConfigError
from lightning_fastio.formats.base import Reader
from lightning_fastio.quantities import counted

_SAMPLE_BYTES = 256 << 20
"""Rows in memory for the limit; more than the caches of any CPU, less than a laptop has to spare."""

_NUM_ROUNDS = 5


@dataclass
class Contender:
    """One way to get batches."""

    name: str
    """What it is."""
    start_epoch: Callable[[], Iterable[int]]
    """Gives the number of rows of one batch after the other."""
    rates: list[float] = field(default_factory=list)
    """Rows per second of each round."""

    @property
    def rows_per_s(self) -> float:
        """The median of the rounds."""
        return median(self.rates)


@dataclass(frozen=True)
class Benchmark:
    """Rows per second that your data can be had at, three ways."""

    source: str
    """The data."""
    num_rows: int
    """Rows of it."""
    row_bytes: int
    """Bytes of a row as delivered."""
    batch_size: int
    """Rows of a batch."""
    how: str
    """How this package read it, and how the usual loader."""
    plain: Contender
    """A DataLoader that reads one sample at a time, in the training process."""
    fastio: Contender
    """This package."""
    limit: Contender | None
    """Rows gathered in memory by torch, into a buffer that is there: what the machine can do at best. None where no
    field is a tensor."""

    @property
    def contenders(self) -> list[Contender]:
        """All, from the usual to the best."""
        return [each for each in (self.plain, self.fastio, self.limit) if each is not None]

    @property
    def speedup(self) -> float:
        """How many times faster than the usual loader this package is."""
        return self.fastio.rows_per_s / self.plain.rows_per_s

    @property
    def share_of_limit(self) -> float | None:
        """Share of the machine's limit that this package reaches."""
        return None if self.limit is None else self.fastio.rows_per_s / self.limit.rows_per_s

    def batch_s(self, contender: Contender) -> float:
        """Seconds of a batch: a training step that is faster than this waits for data."""
        return self.batch_size / contender.rows_per_s

    def as_dict(self) -> dict[str, Any]:
        """Everything in types that JSON has."""
        names = {"plain": self.plain, "fastio": self.fastio, "limit": self.limit}
        return {
            "source": self.source,
            "rows": self.num_rows,
            "row_bytes": self.row_bytes,
            "batch_size": self.batch_size,
            "how": self.how,
            **{
                name: None
                if each is None
                else {"rows_per_s": each.rows_per_s, "batch_s": self.batch_s(each), "rounds": each.rates}
                for name, each in names.items()
            },
            "speedup": self.speedup,
            "share_of_limit": self.share_of_limit,
        }


def bench(
    source: Any, fields: Any = None, *, batch_size: int = 256, num_workers: int | None = None, seconds: float = 4.0
) -> Benchmark:
    """Measure how fast your own data can be had, shuffled, in batches.

    Files that fit in memory are measured warm, as training finds them after its first epoch; ``fastio doctor`` has
    the rate of the storage.

    Args:
        source: A file, a folder, a glob, a list of files, or a mapping of field to any of these.
        fields: Fields to read; all that can be loaded by default.
        batch_size: Rows of a batch; at most the rows there are.
        num_workers: Reader threads of this package; what a data module takes by default.
        seconds: Time to measure; a batch that has begun is ended.

    Raises:
        ConfigError: There are no rows.
        FastIOError: The data cannot be read.
    """
    ends_at = perf_counter() + seconds
    data = FastIODataModule(
        train=source,
        fields=fields,
        batch_size=batch_size,
        num_workers="auto" if num_workers is None else num_workers,
        pin_memory=False,
    )
    data.setup("fit")
    reader = data.stages.reader("train")
    loader = data.train_dataloader()
    try:
        plain, how = plain_loader(source, reader, batch_size, len(reader))
        limits = _gathers_in_memory(reader, batch_size)
        contenders = [
            Contender("DataLoader, one sample at a time", lambda: map(_num_rows, plain)),
            Contender("lightning_fastio", lambda: map(_num_rows, loader)),
            *limits,
        ]
        measure_in_turns(contenders, ends_at)
    finally:
        data.teardown()
    return Benchmark(
        source=source if isinstance(source, str) else str(source),
        num_rows=len(reader),
        row_bytes=reader.schema.row_bytes,
        batch_size=min(batch_size, len(reader)),
        how=f"{loader.plan.shuffle} shuffle, {counted(loader.num_workers, 'thread')}; one sample at a time by {how}",
        plain=contenders[0],
        fastio=contenders[1],
        limit=max(limits, key=lambda each: each.rows_per_s, default=None),
    )


def measure_in_turns(
    contenders: Iterable[Contender], ends_at: float, clock: Callable[[], float] = perf_counter
) -> None:
    """Give each contender its turn in every round; a first round, for cold caches and threads to start, does not count.

    Args:
        contenders: Get their rates.
        ends_at: When to stop, on this clock; each is measured once at least.
        clock: Gives seconds.
    """
    contenders = list(contenders)
    slice_s = max(0.02, (ends_at - clock()) / ((_NUM_ROUNDS + 1) * len(contenders)))
    for number in range(_NUM_ROUNDS + 1):
        for contender in contenders:
            if number > 1 and clock() >= ends_at:
                return
            rate = _rate(contender.start_epoch, slice_s, clock)
            if number:
                contender.rates.append(rate)


def _rate(start_epoch: Callable[[], Iterable[int]], duration_s: float, clock: Callable[[], float]) -> float:
    """Rows per second, with the start of each epoch."""
    total, started = 0, clock()
    while True:
        rows_of_epoch = 0
        for num_rows in start_epoch():
            rows_of_epoch += num_rows
            elapsed = clock() - started
            if elapsed >= duration_s:
                return (total + rows_of_epoch) / elapsed
        if not rows_of_epoch:
            raise ConfigError("there are no rows to measure")
        total += rows_of_epoch


def _gathers_in_memory(reader: Reader, batch_size: int) -> list[Contender]:
    """Random batches of rows that are in memory already, into buffers that are there already.

    With one thread of torch and with all: beside a busy neighbour, threads that wait for each other are the slower way.
    """
    names = [name for name, spec in reader.schema.items() if spec.kind == "tensor"]
    if not names:
        return []
    num_rows = max(1, min(len(reader), _SAMPLE_BYTES // max(1, reader.schema.row_bytes)))
    batch = reader.read(range(num_rows))
    sources = [value for name in names if isinstance(value := batch[name], torch.Tensor)]
    buffers = [torch.empty((min(batch_size, num_rows), *each.shape[1:]), dtype=each.dtype) for each in sources]
    generator = torch.Generator().manual_seed(0)

    def batches(num_threads: int) -> Iterator[int]:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            order = torch.randperm(num_rows, generator=generator)
            for start in range(0, num_rows, batch_size):
                rows = order[start : start + batch_size]
                for source, buffer in zip(sources, buffers, strict=True):
                    torch.index_select(source, 0, rows, out=buffer[: len(rows)])
                yield len(rows)
        finally:
            torch.set_num_threads(before)

    return [
        Contender("limit: gather in memory", partial(batches, num_threads))
        for num_threads in sorted({1, torch.get_num_threads()})
    ]


def _num_rows(batch: Any) -> int:
    """Rows of a batch, out of its first field."""
    first = next(iter(batch.values()))
    # Rows of a reader, one by one, come as a dict inside.
    return _num_rows(first) if isinstance(first, dict) else len(first)
