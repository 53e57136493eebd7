"""`MemoryHygieneCallback`: mixed precision and memory in order, with one line of Trainer arguments."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision

from lightning_fastio._lightning import log_step
from lightning_fastio.callbacks.device_memory import GIB, CacheKeeper, DeviceMemory, EmptyCache, open_device_memory
from lightning_fastio.callbacks.host_memory import GrowthWatch, host_limit_bytes, read_host_memory, shared_memory_use
from lightning_fastio.callbacks.precision import (
    Float32Matmul,
    PrecisionChoice,
    SkippedSteps,
    allow_tf32,
    check_half_parameters,
    install_precision,
)
from lightning_fastio.errors import ConfigError

log = logging.getLogger("lightning_fastio")


class MemoryHygieneCallback(Callback):
    """Keeps precision and memory of a run in order.

    Installs mixed precision where the Trainer has none, lets float32 matrix products use TF32, gives cached device
    memory back where that helps, logs memory as ``fastio/memory_*``, and explains an out-of-memory error. What it
    changes in the process it restores; the precision stays with the Trainer, so that evaluation and checkpoints after
    ``fit`` have it too.

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
        summary: bool = True,
    ) -> None:
        """Set up; nothing is changed before a run starts.

        Args:
            precision: ``auto`` installs bf16-mixed on a GPU that has it, 16-mixed on another GPU, and nothing on a CPU.
                A precision that the Trainer or its strategy was given wins, and a contradiction is stated. A Trainer
                with ``precision="32-true"`` looks as one without: use None or ``32`` to keep 32 bits.
            float32_matmul: For `torch.set_float32_matmul_precision` on a GPU (``high`` is TF32), unless you set it;
                None leaves it alone.
            empty_cache: ``pressure`` gives cached memory back when more than ``pressure_fraction`` of the device is
                reserved beyond the peak of the tensors, ``stage`` where a stage ends, ``never`` not at all.
            pressure_fraction: Share of the device, 0 to 1.
            check_every_n_steps: Steps from one look at the pressure to the next.
            gc_every_n_steps: Switches Python's automatic garbage collection off during training and collects the young
                objects every so many batches, on all ranks at once, and everything where a stage ends. Ranks then no
                longer wait for one another's collections. None leaves garbage collection alone.
            summary: Print a line when ``fit`` ends.

        Raises:
            ConfigError: An argument is out of range.
        """
        if precision not in (None, "auto", "bf16-mixed", "16-mixed", "32"):
            raise ConfigError(f"precision={precision!r}: expected 'auto', 'bf16-mixed', '16-mixed', '32' or None")
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
        self.summary = summary
        self._plugin: Precision | None = None
        self._matmul_before: str | None = None
        self._device: DeviceMemory | None = None
        self._cache: CacheKeeper | None = None
        self._skipped: SkippedSteps | None = None
        self._growth: GrowthWatch | None = None
        self._restart_gc = False
        self._num_batches = 0
        self._peak = (0, 0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._plugin is None or trainer.strategy.precision_plugin is not self._plugin:
            self._plugin = install_precision(trainer, self.precision)
        device = trainer.strategy.root_device
        self._matmul_before = allow_tf32(device, self.float32_matmul)
        self._device = open_device_memory(device)
        if self._device is not None:
            self._cache = CacheKeeper(
                self._device,
                self.empty_cache,
                pressure_fraction=self.pressure_fraction,
                check_every_n_steps=self.check_every_n_steps,
            )
        log.info(f"precision {trainer.precision} on {device}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_half_parameters(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_batches = 0
        self._peak = (0, 0)
        self._skipped = SkippedSteps(trainer)
        self._growth = GrowthWatch(host_limit_bytes())
        if self.gc_every_n_steps is not None and gc.isenabled():
            gc.collect()
            gc.disable()
            self._restart_gc = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._skipped is not None:
            self._skipped.before_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._cache is not None:
            self._cache.after_step(self._num_batches)
        if self._restart_gc and self.gc_every_n_steps and self._num_batches % self.gc_every_n_steps == 0:
            gc.collect(1)
        step = log_step(trainer)
        if step is not None:
            self._log(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._after_stage()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._after_stage()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._after_stage()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._after_stage()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning calls no teardown hooks after an error.
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _after_stage(self) -> None:
        if self._restart_gc:
            gc.collect()
        if self._cache is not None:
            self._cache.after_stage()

    def _log(self, trainer: Trainer, step: int) -> None:
        host = read_host_memory()
        metrics: dict[str, float] = {
            "memory_host_gib": host.private_bytes / GIB,
            "memory_host_mapped_gib": host.mapped_bytes / GIB,
        }
        if self._device is not None:
            reading = self._device.read()
            if reading.peak_bytes > self._peak[0]:
                self._peak = (reading.peak_bytes, self._num_batches)
            metrics["memory_allocated_gib"] = reading.allocated_bytes / GIB
            metrics["memory_reserved_gib"] = reading.reserved_bytes / GIB
            metrics["memory_peak_gib"] = reading.peak_bytes / GIB
            metrics["memory_fragmentation_fraction"] = reading.fragmentation_fraction
            metrics["memory_alloc_retries"] = reading.num_retries
        if self._skipped is not None and self._skipped.is_active:
            metrics["memory_skipped_steps"] = self._skipped.count
        for logger in trainer.loggers:
            logger.log_metrics({f"fastio/{name}": value for name, value in metrics.items()}, step=step)
        problem = self._growth.add(self._num_batches, host.private_bytes) if self._growth is not None else None
        if problem is not None:
            log.warning(f"{problem}. {shared_memory_use()}")
            self._growth = None

    def _restore(self) -> None:
        if self._restart_gc:
            gc.enable()
            self._restart_gc = False
        if self._matmul_before is not None:
            torch.set_float32_matmul_precision(self._matmul_before)
            self._matmul_before = None
        if self._skipped is not None:
            self._skipped.close()
        self._device = self._cache = self._growth = None
