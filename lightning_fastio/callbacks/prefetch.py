"""`PrefetchCallback`: batches ahead of every loop of a Trainer, and how long each step waited."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from lightning_fastio._lightning import AheadFetcher, AheadOptions, Delivery, TransferAhead, fetch_ahead, log_step
from lightning_fastio.adjusting import WorkerAdjuster
from lightning_fastio.allowance import cpu_allowance
from lightning_fastio.callbacks.loader_facts import adjuster_of, facts_of
from lightning_fastio.prefetch import STOP_TIMEOUT_S, check_depth, rows_in
from lightning_fastio.staging import open_backend
from lightning_fastio.verdict import LoaderFacts, Verdict, judge, summary_table
from lightning_fastio.waits import WaitStats

log = logging.getLogger("lightning_fastio")

_STOP_AFTER_ERROR_S = 0.5
"""After an error nobody waits long for a loader that is stuck."""


class PrefetchCallback(Callback):
    """Fetches batches ahead, copies them to the GPU beside the training step, and measures the wait for data.

    Works under any loader, in fit, validate, test and predict. Batches, hooks, metrics and weights are the same as
    without it. On a CPU it fetches ahead only, and not even that where a `BatchLoader` reads ahead already. Depth is in
    device memory: up to ``depth`` batches more than without. Each batch lies at a new address, so whoever captures a
    step into a CUDA graph by hand copies the batch into static inputs first; ``torch.compile(mode="reduce-overhead")``
    does so by itself.

    Logs ``fastio/data_wait_s``, ``fastio/data_wait_fraction``, ``fastio/copy_wait_s``, ``fastio/step_s``,
    ``fastio/read_s`` and ``fastio/samples_per_s`` at the Trainer's cadence, each a mean since the last log, and prints
    at the end of fit what the run was bound by, after Ctrl-C and errors too.

    Example:
        >>> trainer = Trainer(callbacks=[PrefetchCallback()])
    """

    def __init__(
        self,
        depth: int = 2,
        *,
        max_bytes: int | None = None,
        keep_randomness: bool = True,
        save: bool = False,
        summary: bool = True,
    ) -> None:
        """Set up; nothing is started before a run.

        Args:
            depth: Batches ready ahead of the one in use, 1 or more. So many batches more are in device memory, also
                where `BatchSizeFinder`, which runs without callbacks, did not see them: give it a margin.
            max_bytes: Get no further batch ready while so many bytes are; no bound by default.
            keep_randomness: Fetch batches that may draw from the global random generators on the training thread, so
                that a run draws the same numbers as without this callback. False fetches all of them ahead.
            save: Write the record of every step into the logger's folder, as ``fastio_waits.parquet``, for
                ``fastio report``.
            summary: Print a table of waits and the verdict when ``fit`` ends, however it ends.

        Raises:
            ConfigError: An argument is out of range.
        """
        check_depth(depth, max_bytes)
        self.depth = depth
        self.max_bytes = max_bytes
        self.keep_randomness = keep_randomness
        self.save = save
        self.summary = summary
        self.wait_stats = WaitStats()
        """Waits of the last ``fit``, and of the evaluations since."""
        self._options: AheadOptions | None = None
        self._transfer: TransferAhead | None = None
        self._training: AheadFetcher | None = None
        self._evaluating: AheadFetcher | None = None
        self._facts: LoaderFacts | None = None
        self._adjuster: WorkerAdjuster | None = None
        self._told: set[str] = set()
        self._record_path: Path | None = None
        self._owes_summary = False

    @property
    def waits(self) -> npt.NDArray[Any]:
        """A record for each training batch of the last ``fit``, of type `lightning_fastio.waits.STEP`."""
        return self.wait_stats.steps

    def verdict(self) -> Verdict | None:
        """What training was bound by so far, with evidence and advice; None before the first step."""
        return None if self._facts is None else judge(self.wait_stats, self._facts)

    def plot(self, folder: str | Path = "fastio-report") -> Path:
        """Write a page about the waits of the last ``fit``, as ``fastio report`` does.

        Args:
            folder: Where ``report.html`` and its PNGs go.

        Returns:
            The page.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        from lightning_fastio.report import Record, write_report

        stats = self.wait_stats
        return write_report([Record("this run", stats.steps, stats.evaluations, self.verdict())], folder)

    # Start and end of a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_all(STOP_TIMEOUT_S)
        self._owes_summary = self.summary and stage == "fit" and trainer.is_global_zero
        if stage == "fit":
            self.wait_stats = WaitStats()
        device = trainer.strategy.root_device
        if device.type == "xla":
            log.info("On XLA devices Lightning's own loaders fetch ahead; PrefetchCallback does nothing.")
            self._options = None
            return
        self._told.clear()
        self._options = AheadOptions(self.depth, self.max_bytes, self.keep_randomness, self._warn_once)
        backend = open_backend(device)
        if backend is not None:
            self._transfer = TransferAhead(trainer, backend)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_all(STOP_TIMEOUT_S)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After an error Lightning calls no teardown hook, and ends only the loop that was active.
        self._stop_all(_STOP_AFTER_ERROR_S)
        # Not which rank was slowest: the others may be past answering.
        self._print_summary()

    def _stop_all(self, timeout_s: float) -> None:
        self._save()
        for fetcher in (self._training, self._evaluating):
            if fetcher is not None:
                fetcher.stop(timeout_s)
        self._training = self._evaluating = None
        if self._transfer is not None:
            self._transfer.remove()
            self._transfer = None

    def _save(self) -> None:
        if self._record_path is not None:
            from lightning_fastio.report import save_record

            save_record(self._record_path, self.wait_stats, self.verdict())
            self._record_path = None

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)

    def _fetch_ahead(self, trainer: Trainer) -> AheadFetcher | None:
        if self._options is None:
            return None
        transfer = self._transfer
        obstacle = None if transfer is None else transfer.obstacle()
        if obstacle is not None:
            log.info(f"Batches are fetched ahead, but copied to the device by the training thread: {obstacle}.")
            transfer = None
        if transfer is not None:
            transfer.install()
        return fetch_ahead(trainer, self._options, transfer)

    # Training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.save:
            # All ranks ask for the folder, here where all of them are.
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            rank = trainer.global_rank
            self._record_path = folder / ("fastio_waits.parquet" if rank == 0 else f"fastio_waits-rank{rank}.parquet")
        self._start_training(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Loaders that are made anew for an epoch come with a fetcher of their own.
        self._start_training(trainer)

    def _start_training(self, trainer: Trainer) -> None:
        fetcher = self._fetch_ahead(trainer)
        if fetcher is None:
            return
        if self._training is not None:
            self._training.stop()
        self._training = fetcher
        # The ranks of a machine share its CPUs.
        max_workers = max(1, int(cpu_allowance() / trainer.num_devices))
        self._facts = facts_of(fetcher.loaders, max_workers=max_workers)
        self._adjuster = adjuster_of(fetcher.loaders, max_workers=max_workers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        delivery = self._training.pop_delivery() if self._training is not None else None
        if delivery is None:
            return
        waits = self.wait_stats
        step_s = perf_counter() - delivery.asked_at
        waits.add(
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            data_wait_s=delivery.wait_s,
            step_s=step_s,
            read_s=delivery.read_s,
            transform_s=delivery.transform_s,
            num_rows=rows_in(batch),
            is_first=delivery.is_first,
            is_copied=delivery.is_copied,
        )
        self._add_copies()
        self._look_at_pinning()
        self._adjust(delivery, step_s)
        step = log_step(trainer)
        if step is not None:
            metrics = waits.since_last_log()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_training()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_training()

    def _stop_training(self) -> None:
        if self._training is not None:
            self._add_copies()
            self._training.stop()

    def _add_copies(self) -> None:
        if self._training is not None and self._training.stager is not None:
            self.wait_stats.add_copies(self._training.stager.finished_copies())

    def _look_at_pinning(self) -> None:
        stager = self._training.stager if self._training is not None else None
        if stager is None or not stager.num_pinned or self._facts is None:
            return
        self._facts = replace(self._facts, is_pinned=False)
        self._warn_once(
            f"Batches of the {self._facts.name} are not in pinned memory. They are pinned while they are fetched "
            "ahead, which costs a copy in host memory: pass pin_memory=True to the loader to save it."
        )

    def _adjust(self, delivery: Delivery, step_s: float) -> None:
        if self._adjuster is None or self._training is None or self._facts is None or delivery.is_first:
            return
        change = self._adjuster.add(delivery.wait_s, step_s, delivery.read_s + delivery.transform_s)
        if change is None:
            return
        num_workers = self._adjuster.num_workers
        (loader,) = self._training.loaders
        self._training.between_fetches(partial(loader.resize, num_workers))
        self._facts = replace(self._facts, num_workers=num_workers)
        log.info(change)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        slowest = _slowest_rank(trainer, self.wait_stats)
        self._print_summary(slowest)

    def _print_summary(self, *more: str | None) -> None:
        if self._owes_summary and len(self.waits):
            console = Console()
            console.print(summary_table(self.wait_stats, self.verdict()), *filter(None, more), sep="\n")
        self._owes_summary = False

    # Evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = self._fetch_ahead(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = self._fetch_ahead(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = self._fetch_ahead(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._add_evaluation("sanity check" if trainer.sanity_checking else "validate")

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._add_evaluation("test")

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._add_evaluation("predict")

    def _add_evaluation(self, stage: str) -> None:
        delivery = self._evaluating.pop_delivery() if self._evaluating is not None else None
        if delivery is not None:
            self.wait_stats.add_evaluation(stage, delivery.wait_s, perf_counter() - delivery.asked_at)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_evaluating()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_evaluating()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_evaluating()

    def _stop_evaluating(self) -> None:
        if self._evaluating is not None:
            self._evaluating.stop()
        self._evaluating = None


def _slowest_rank(trainer: Trainer, waits: WaitStats) -> str | None:
    """Which of several ranks waited longest for data; asks all ranks."""
    if trainer.world_size == 1:
        return None
    mine = torch.tensor([waits.data_wait_fraction], device=trainer.strategy.root_device)
    fractions = np.asarray(trainer.strategy.all_gather(mine).cpu()).ravel()
    rank = int(fractions.argmax())
    return f"Of {len(fractions)} ranks, rank {rank} waited longest for data: {fractions[rank] * 100:.1f} % of the time."
