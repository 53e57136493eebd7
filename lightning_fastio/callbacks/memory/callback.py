"""`MemoryHygieneCallback`: which hook does what."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fastio._lightning import log_step
from lightning_fastio.callbacks.memory import oom
from lightning_fastio.callbacks.memory.allocator import GIB, CacheKeeper, DeviceMemory, EmptyCache, open_device_memory
from lightning_fastio.callbacks.memory.batch_fields import tensors_of
from lightning_fastio.callbacks.memory.collection import ScheduledCollection
from lightning_fastio.callbacks.memory.nonfinite import NonFiniteWatch, Place
from lightning_fastio.callbacks.memory.precision import (
    Float32Matmul,
    PrecisionChoice,
    SkippedSteps,
    allow_tf32,
    check_half_parameters,
    install_precision,
)
from lightning_fastio.callbacks.memory.record import MemoryRecord
from lightning_fastio.errors import ConfigError
from lightning_fastio.loader import BatchLoader

log = logging.getLogger("lightning_fastio")

_HISTORY_ENTRIES = 100_000


class MemoryHygieneCallback(Callback):
    """Keeps precision and memory of a run in order, and says what it did.

    - Installs mixed precision where the Trainer has none, and lets float32 matrix products use TF32.
    - Gives cached device memory back where that helps, never in every step.
    - Logs memory as ``fastio/memory_*``, and warns of host memory that only grows.
    - Explains an out-of-memory error, and the first loss that is not finite.

    What it changes in the process it restores. The precision stays with the Trainer, so that evaluation and
    checkpoints after ``fit`` have it too; the state of a gradient scaler is in Lightning's checkpoints, as with
    ``Trainer(precision="16-mixed")``.

    Put it first in ``Trainer(callbacks=[...])``: callbacks that read the precision in ``setup`` then see the right one.

    Example:
        >>> trainer = Trainer(callbacks=[MemoryHygieneCallback()])
    """

    def __init__(
        self,
        precision: PrecisionChoice | None = "auto",
        *,
        float32_matmul: Float32Matmul | None = "high",
        empty_cache: EmptyCache = "pressure",
        pressure_fraction: float = 0.2,
        check_every_n_steps: int = 100,
        gc_every_n_steps: int | None = None,
        oom_snapshot: str | Path | None = None,
        summary: bool = True,
    ) -> None:
        """Set up; nothing is changed before a run starts.

        Args:
            precision: ``auto`` installs bf16-mixed on a GPU that has it, 16-mixed on another GPU, and nothing on a CPU.
                A precision that the Trainer or its strategy was given wins, and a contradiction is stated. A Trainer
                with ``precision="32-true"`` looks like one without: use None or ``32`` to keep 32 bits.
            float32_matmul: For `torch.set_float32_matmul_precision` on a GPU (``high`` is TF32), unless you set it
                yourself; None leaves it alone.
            empty_cache: ``pressure`` gives cached memory back when more than ``pressure_fraction`` of the device is
                reserved beyond the peak of the tensors, ``stage`` where a stage ends, ``never`` not at all.
            pressure_fraction: Share of the device, 0 to 1.
            check_every_n_steps: Training batches from one look at the memory to the next.
            gc_every_n_steps: Switches Python's automatic garbage collection off during training and collects the young
                objects every so many batches, on all ranks at once, and everything where a stage ends. With several
                GPUs, 50 keeps ranks from waiting for one another. None leaves garbage collection alone: a model that
                makes reference cycles around large tensors needs it.
            oom_snapshot: File for torch's record of allocations when memory runs out, to be opened at
                https://pytorch.org/memory_viz; the rank is added to its name. Recording costs a few percent.
            summary: Print a line when ``fit`` ends.

        Raises:
            ConfigError: An argument is out of range.
        """
        if precision not in (None, "auto", "bf16-mixed", "16-mixed", "32"):
            raise ConfigError(f"precision={precision!r}: expected 'auto', 'bf16-mixed', '16-mixed', '32' or None")
        if float32_matmul not in (None, "highest", "high", "medium"):
            raise ConfigError(f"float32_matmul={float32_matmul!r}: expected 'highest', 'high', 'medium' or None")
        if empty_cache not in ("never", "stage", "pressure"):
            raise ConfigError(f"empty_cache={empty_cache!r}: expected 'never', 'stage' or 'pressure'")
        if not 0 <= pressure_fraction <= 1:
            raise ConfigError(f"pressure_fraction={pressure_fraction}: expected 0 to 1, a share of the device")
        if check_every_n_steps < 1:
            raise ConfigError(f"check_every_n_steps={check_every_n_steps}: expected 1 or more")
        if gc_every_n_steps is not None and gc_every_n_steps < 1:
            raise ConfigError(f"gc_every_n_steps={gc_every_n_steps}: expected 1 or more, or None")
        self.precision = precision
        self.float32_matmul = float32_matmul
        self.empty_cache = empty_cache
        self.pressure_fraction = pressure_fraction
        self.check_every_n_steps = check_every_n_steps
        self.gc_every_n_steps = gc_every_n_steps
        self.oom_snapshot = oom_snapshot
        self.summary = summary
        self._plugin: Precision | None = None
        self._matmul_before: str | None = None
        self._device: DeviceMemory | None = None
        self._cache: CacheKeeper | None = None
        self._collection: ScheduledCollection | None = None
        self._skipped: SkippedSteps | None = None
        self._nonfinite: NonFiniteWatch | None = None
        self._record = MemoryRecord(None)
        self._place: Place | None = None
        self._num_batches = 0
        self._checked_stages: set[str] = set()

    # Start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._plugin is None or trainer.strategy.precision_plugin is not self._plugin:
            self._plugin = install_precision(trainer, self.precision)
        device = trainer.strategy.root_device
        self._matmul_before = self._matmul_before or allow_tf32(device, self.float32_matmul)
        self._device = open_device_memory(device)
        if self._device is not None:
            self._cache = CacheKeeper(
                self._device,
                self.empty_cache,
                pressure_fraction=self.pressure_fraction,
                check_every_n_steps=self.check_every_n_steps,
            )
            if self.oom_snapshot is not None:
                self._device.record_history(_HISTORY_ENTRIES)
        self._record = MemoryRecord(self._device)
        self._checked_stages = set()
        self._num_batches = 0
        self._nonfinite = NonFiniteWatch(lambda place: _rows_of(trainer, place), trainer.precision)
        log.info(f"{stage}: precision {trainer.precision} on {device}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_half_parameters(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record.look_at_device(0)
        self._skipped = SkippedSteps(trainer)
        if self.gc_every_n_steps is not None:
            self._collection = ScheduledCollection(self.gc_every_n_steps)
            self._collection.start()

    # Training

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._place = Place(_stage(trainer), trainer.current_epoch, trainer.global_step, batch_idx, batch)
        self._check_gradients("train", batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._nonfinite is not None and self._place is not None:
            self._nonfinite.watch(loss, self._place)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._skipped is not None:
            self._skipped.before_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._place = None
        self._num_batches += 1
        self._report_nonfinite()
        if self._cache is not None:
            self._cache.after_step(self._num_batches)
        if self._collection is not None:
            self._collection.after_step(self._num_batches)
        step = log_step(trainer)
        if step is not None or self._num_batches % self.check_every_n_steps == 0:
            self._look(trainer, step)
        elif self._num_batches <= 2:
            # Until the second step, gradients and optimizer states are not all there.
            self._record.look_at_device(self._num_batches)

    # Evaluation

    def _start_evaluation_batch(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        stage = _stage(trainer)
        self._place = Place(stage, trainer.current_epoch, trainer.global_step, batch_idx, batch)
        if stage not in self._checked_stages and torch.is_grad_enabled():
            log.warning(
                f"{stage} runs with gradients enabled, so that the activations of each batch are kept: look for "
                "torch.enable_grad() or torch.set_grad_enabled(True) in a hook that does not set it back."
            )
        self._check_gradients(stage, batch)
        if self._record.last_reading is None:
            self._record.look_at_device(self._num_batches)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _start_evaluation_batch

    def _end_evaluation_batch(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # What predict returns is no loss.
        if self._nonfinite is not None and self._place is not None and not trainer.predicting:
            self._nonfinite.watch(outputs.get("loss") if isinstance(outputs, dict) else outputs, self._place)
        self._place = None
        self._report_nonfinite()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _end_evaluation_batch

    # Ends of stages

    def _end_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._end_stage()
        if trainer.state.fn != TrainerFn.FITTING:
            self._look(trainer, trainer.global_step)

    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage()
        self._look(trainer, None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.summary and trainer.is_global_zero:
            num_skipped = self._skipped.count if self._skipped is not None and self._skipped.is_active else None
            print(self._record.summary(trainer.precision, self._cache, num_skipped))

    def _end_stage(self) -> None:
        self._report_nonfinite(wait=True)
        if self._collection is not None:
            self._collection.after_stage()
        if self._cache is not None:
            self._cache.after_stage()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._explain(exception, trainer.global_rank)
        except (RuntimeError, OSError) as problem:
            # A device that answers no more must not hide the error that ended the run.
            log.warning(f"there is no report on the memory, since {type(problem).__name__}: {problem}")
        finally:
            # Lightning calls no teardown hooks after an error.
            self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    # Shared

    def _look(self, trainer: Trainer, step: int | None) -> None:
        metrics = self._record.look(self._num_batches)
        if self._skipped is not None and self._skipped.is_active:
            metrics["fastio/memory_skipped_steps"] = float(self._skipped.count)
        if self._cache is not None:
            metrics["fastio/memory_returned_gib"] = self._cache.returned_bytes / GIB
            metrics["fastio/memory_empty_cache_s"] = self._cache.seconds
        if step is not None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
        problem = self._record.growth(self._num_batches)
        if problem is not None:
            log.warning(problem)

    def _report_nonfinite(self, *, wait: bool = False) -> None:
        report = self._nonfinite.report(wait=wait) if self._nonfinite is not None else None
        if report is not None:
            log.warning(report)

    def _check_gradients(self, stage: str, batch: Any) -> None:
        if stage in self._checked_stages:
            return
        self._checked_stages.add(stage)
        tracked = [name for name, tensor in tensors_of(batch) if tensor.grad_fn is not None]
        if tracked:
            log.warning(
                f"the {stage} batch carries the gradient graph of what made {', '.join(tracked)}, which stays in "
                "memory for the whole step: put the transform under torch.no_grad()."
            )

    def _explain(self, error: BaseException, rank: int) -> None:
        where = f"{self._place.stage} batch {self._place.batch_idx}" if self._place else "between batches"
        batch = self._place.batch if self._place else None
        if oom.is_device_oom(error) and self._device is not None:
            report = oom.device_report(
                error, self._device, where=where, batch=batch, at_start=self._record.last_reading
            )
            if self.oom_snapshot is not None:
                report += f"\nAllocations are recorded in {self._save_history(rank)}"
            oom.append_report(error, report)
        elif oom.is_host_oom(error):
            oom.append_report(error, oom.host_report(where, batch))

    def _save_history(self, rank: int) -> Path:
        assert self._device is not None
        assert self.oom_snapshot is not None
        path = Path(self.oom_snapshot)
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix or '.pickle'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._device.save_history(path)
        return path

    def _restore(self) -> None:
        if self._collection is not None:
            self._collection.stop()
        if self._matmul_before is not None:
            torch.set_float32_matmul_precision(self._matmul_before)
            self._matmul_before = None
        if self._skipped is not None:
            self._skipped.close()
        if self._device is not None and self.oom_snapshot is not None:
            self._device.record_history(None)
        if self._nonfinite is not None:
            self._nonfinite.close()
        self._device = self._cache = self._collection = self._skipped = self._nonfinite = self._place = None
        self._record = MemoryRecord(None)


def _stage(trainer: Trainer) -> str:
    """``train``, ``validate``, ``test`` or ``predict``."""
    if trainer.sanity_checking or trainer.state.stage is None:
        return "validate"
    return str(trainer.state.stage.value)


def _rows_of(trainer: Trainer, place: Place) -> list[int] | None:
    """Row numbers of a batch, where the loader can tell them: a `BatchLoader` that is still in the same epoch."""
    loader = trainer.train_dataloader if place.stage == "train" else None
    if place.epoch != trainer.current_epoch or not isinstance(loader, BatchLoader):
        return None
    return loader.rows_of(place.batch_idx)
