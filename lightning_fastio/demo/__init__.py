"""``fastio demo``: trains on real data from all three formats, and shows how long each step waits for data.

The data is the set of 1,797 handwritten digits that comes with scikit-learn. `plain` is what the package is compared
with, `model` the network, `plot` the picture.
"""

from __future__ import annotations

import logging
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_fastio.callbacks import MemoryHygieneCallback, PrefetchCallback
from lightning_fastio.datamodules import FastIODataModule, HDF5DataModule, NumpyDataModule, ParquetDataModule
from lightning_fastio.demo.model import DigitsNet
from lightning_fastio.demo.plain import PlainDigits, TimedLoader
from lightning_fastio.demo.plot import plot_waits
from lightning_fastio.errors import MissingDependencyError
from lightning_fastio.formats import open_writer

__all__ = ["DigitsNet", "Result", "write_digits"]

_BATCH_SIZE = 64
_FORMATS: dict[str, tuple[str, type[FastIODataModule]]] = {
    "NumPy": ("digits", NumpyDataModule),
    "HDF5": ("digits.h5", HDF5DataModule),
    "Parquet": ("digits.parquet", ParquetDataModule),
}


@dataclass(frozen=True)
class Result:
    """What the demo found out about one format; *plain* is a DataLoader that reads sample by sample."""

    format: str
    """Name of the format."""
    accuracy: float
    """Share of the validation digits that are recognised after training with the package."""
    rows_per_s: float
    """Rows that the package's loader gives per second, without training."""
    plain_rows_per_s: float
    """The same of the plain loader."""
    waits_s: npt.NDArray[np.float64]
    """Seconds that each training step waited for its data, with the package; shape ``(num_steps,)``."""
    plain_waits_s: npt.NDArray[np.float64]
    """The same with the plain loader."""
    wait_fraction: float
    """Share of a typical step that it waits for data, with the package: the median wait over the median step."""
    plain_wait_fraction: float
    """The same with the plain loader."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", nargs="?", default="fastio-demo", help="where files go; fastio-demo by default")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each training run; 10 by default")


def main(arguments: Namespace) -> int:
    """Run the command."""
    folder = Path(arguments.folder)
    console = Console()
    write_digits(folder)
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()]
    results = []
    with Progress(*columns, console=console) as progress, _quiet_lightning(), _one_thread():
        tasks = {name: progress.add_task(name, total=2 * arguments.epochs + 1) for name in _FORMATS}
        for name, task in tasks.items():
            results.append(_try_format(name, folder, arguments.epochs, partial(progress.advance, task)))
    plot = plot_waits({each.format: (each.plain_waits_s, each.waits_s) for each in results}, folder / "data_wait.png")
    console.print(_table(results))
    console.print(f"The files are in {folder}/; {plot} shows how long each step waited for data.", highlight=False)
    console.print(f"Next: fastio inspect {folder / 'digits.h5'}", highlight=False)
    return 0


def write_digits(folder: Path) -> None:
    """Write the digits as a folder of .npy, as HDF5 and as Parquet.

    Args:
        folder: Gets ``digits/``, ``digits.h5`` and ``digits.parquet``, each with ``image``, uint8 ``(8, 8)`` with
            values up to 16, and ``label``, int64.

    Raises:
        MissingDependencyError: scikit-learn, from which the digits come, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError(
            'the digits come from scikit-learn, which is not installed: pip install "lightning_fastio[demo]"'
        ) from error
    digits = load_digits()
    batch = {"image": digits.images.astype(np.uint8), "label": digits.target.astype(np.int64)}
    folder.mkdir(parents=True, exist_ok=True)
    for file, _ in _FORMATS.values():
        with open_writer(folder / file) as writer:
            writer.write(batch)


def _try_format(name: str, folder: Path, epochs: int, advance: Callable[[], Any]) -> Result:
    """Measure both loaders alone, then train once with each."""
    file, module = _FORMATS[name]
    data = module(train=str(folder / file), val_split=0.2, batch_size=_BATCH_SIZE)
    data.setup("fit")
    train = data.stages.rows("train")
    samples = PlainDigits(name, folder / file, train.at(np.arange(len(train))))
    plain = TimedLoader(DataLoader(samples, _BATCH_SIZE, shuffle=True))
    rates = _rows_per_s({"fastio": data.train_dataloader(), "plain": plain}, num_rows=len(samples))
    advance()

    prefetch = PrefetchCallback(summary=False)
    metrics = _train(data, epochs, [MemoryHygieneCallback(summary=False), prefetch, _EndOfEpoch(advance)])
    plain.forget()
    _train(plain, epochs, [_EndOfEpoch(advance)])
    return Result(
        format=name,
        accuracy=float(metrics["val_accuracy"]),
        rows_per_s=rates["fastio"],
        plain_rows_per_s=rates["plain"],
        waits_s=prefetch.waits["data_wait_s"],
        plain_waits_s=np.array(plain.waits_s),
        wait_fraction=float(np.median(prefetch.waits["data_wait_s"]) / np.median(prefetch.waits["step_s"])),
        plain_wait_fraction=float(np.median(plain.waits_s) / np.median(plain.steps_s)),
    )


def _rows_per_s(loaders: Mapping[str, Iterable[Any]], *, num_rows: int) -> dict[str, float]:
    """Rows per second of loaders that are read alone, in turns: each one's best epoch, since they take milliseconds."""
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(10):
        for name, loader in loaders.items():
            start = perf_counter()
            for _batch in loader:
                pass
            seconds[name].append(perf_counter() - start)
    return {name: num_rows / min(times) for name, times in seconds.items()}


def _train(data: FastIODataModule | TimedLoader, epochs: int, callbacks: list[Callback]) -> Mapping[str, Any]:
    seed_everything(1, verbose=False)
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsNet(), data)
    return trainer.callback_metrics


class _EndOfEpoch(Callback):
    """Moves a progress bar on."""

    def __init__(self, advance: Callable[[], Any]) -> None:
        self._advance = advance

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._advance()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keep Lightning's notices, of which each run prints a page, out of the progress bars."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: with more, operations as small as the demo's wait for each other most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _table(results: list[Result]) -> Table:
    table = Table(
        title="Plain DataLoader, sample by sample, against lightning_fastio",
        title_justify="left",
        caption="rows/s: the loader alone; wait/step: share of a typical training step in which it waits for data",
        caption_justify="left",
    )
    table.add_column("format")
    for heading in (
        "plain\nrows/s",
        "fastio\nrows/s",
        "\nratio",
        "plain\nwait/step",
        "fastio\nwait/step",
        "validation\naccuracy",
    ):
        table.add_column(heading, justify="right")
    for each in results:
        table.add_row(
            each.format,
            f"{each.plain_rows_per_s:,.0f}",
            f"{each.rows_per_s:,.0f}",
            f"{each.rows_per_s / each.plain_rows_per_s:.1f}x",
            f"{each.plain_wait_fraction:.1%}",
            f"{each.wait_fraction:.1%}",
            f"{each.accuracy:.1%}",
        )
    return table
