"""Measured: the training step of a model, on batches that are there already, and the batch sizes that fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_fastio.callbacks import MemoryHygieneCallback
from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.errors import ConfigError
from lightning_fastio.tuning.race import AS_GOOD

_NUM_BATCHES = 4
_WARM_UP_STEPS = 3
_MIN_STEPS = 5
_LARGEST_BATCH = 1 << 16


@dataclass(frozen=True)
class Step:
    """A training step with one batch size."""

    batch_size: int
    """Rows of a batch."""
    step_s: float
    """Seconds of a step that never waits for data; 0 if it does not fit in memory."""

    @property
    def fits(self) -> bool:
        """Whether it fits in the memory of the device."""
        return self.step_s > 0

    @property
    def rows_per_s(self) -> float:
        """Rows that the step takes per second."""
        return self.batch_size / self.step_s if self.fits else 0.0


class StepProbe:
    """Measures steps of copies of a model, in short runs of a Trainer like the user's."""

    def __init__(
        self,
        model: LightningModule,
        datamodule: FastIODataModule,
        *,
        trainer: Trainer | None,
        step_s: float,
        depth: int,
        agree: Callable[[float], float],
    ) -> None:
        """Set up.

        Args:
            model: Stays as it is.
            datamodule: Where batches come from.
            trainer: Whose device, precision and accumulation are taken; Lightning's choice without one. A
                MemoryHygieneCallback in it is taken too, since it may choose the precision.
            step_s: Seconds of one measurement.
            depth: Batches that PrefetchCallback will keep on the device besides the present one.
            agree: Gives the smallest of all ranks' numbers, so that all decide the same.
        """
        self._model = model
        self._datamodule = datamodule
        self._step_s = step_s
        self._depth = depth
        self._agree = agree
        self._trainer = trainer
        self._options: dict[str, Any] = {"accelerator": "auto", "devices": 1}
        if trainer is not None:
            device = trainer.strategy.root_device
            self._options = {
                "accelerator": "gpu" if device.type == "cuda" else device.type,
                "devices": 1 if device.index is None else [device.index],
                "precision": trainer.precision,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "gradient_clip_val": trainer.gradient_clip_val,
            }
        self.device = torch.device("cpu")
        """Where the steps ran."""

    def __call__(self, batch_size: int) -> Step:
        """Measure one batch size; running out of memory is an answer too."""
        step_s = 0.0
        try:
            step_s = self._fit(batch_size)
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
        # Only here is the error gone, and with its traceback the tensors of the failed step.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        rows_per_s = self._agree(batch_size / step_s if step_s else 0.0)
        return Step(batch_size, batch_size / rows_per_s if rows_per_s else 0.0)

    def find_batch_size(self, batch_sizes: Sequence[int], is_over: Callable[[], bool]) -> tuple[Step, list[Step]]:
        """The smallest batch size as fast as the fastest, counted in rows, and all that were measured.

        Args:
            batch_sizes: From the smallest to the largest; the first that does not fit ends it.
            is_over: Whether the time is up.

        Raises:
            ConfigError: Not even the smallest fits.
        """
        steps: list[Step] = []
        for batch_size in batch_sizes:
            steps.append(self(batch_size))
            # Two sizes that bring nothing: larger ones will not either.
            flat = len(steps) > 2 and max(step.rows_per_s for step in steps[-2:]) * AS_GOOD < steps[-3].rows_per_s
            if not steps[-1].fits or flat or is_over():
                break
        best = max(step.rows_per_s for step in steps)
        if not best:
            raise ConfigError(
                f"the model runs out of memory with batch_size={batch_sizes[0]} already: use a smaller one"
            )
        return next(step for step in steps if step.rows_per_s >= AS_GOOD * best), steps

    def _precision(self) -> list[Callback]:
        """What installs the precision of the user's Trainer, where a callback does that."""
        callbacks = [] if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        return [
            MemoryHygieneCallback(
                each.precision, float32_matmul=each.float32_matmul, empty_cache="never", summary=False
            )
            for each in callbacks
            if isinstance(each, MemoryHygieneCallback)
        ]

    def _fit(self, batch_size: int) -> float:
        """Seconds of a step."""
        timer = _StepTimer(self._step_s, self._depth)
        loader = self._datamodule.new_train_loader(batch_size=batch_size, num_workers=0, pin_memory=False)
        batches = list(islice(loader, _NUM_BATCHES))
        loader.close()
        trainer = Trainer(
            callbacks=[*self._precision(), timer],
            limit_val_batches=0,
            num_sanity_val_steps=0,
            max_epochs=1,
            logger=DummyLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **self._options,
        )
        self.device = timer.device = trainer.strategy.root_device
        with _batches_in_place(self._datamodule, batches):
            trainer.fit(_copy_of(self._model), datamodule=self._datamodule)
        return timer.step_s


class _StepTimer(Callback):
    """Ends a fit when a step has been measured for long enough."""

    def __init__(self, duration_s: float, depth: int) -> None:
        self._duration_s = duration_s
        self._depth = depth
        self._ahead: list[Any] = []
        self._num_steps = 0
        self._started = 0.0
        self.device = torch.device("cpu")
        self.step_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._num_steps:
            # What is copied ahead in training takes its room here too.
            self._ahead = [deepcopy(batch) for _ in range(self._depth)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_steps += 1
        if self._num_steps <= _WARM_UP_STEPS:
            self._started = self._now()
            return
        num_timed = self._num_steps - _WARM_UP_STEPS
        if num_timed >= _MIN_STEPS and perf_counter() - self._started >= self._duration_s:
            self.step_s = (self._now() - self._started) / num_timed
            trainer.should_stop = True
            self._ahead.clear()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


class _Repeated:
    """Gives the same batches for ever."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return cycle(self._batches)


@contextmanager
def _batches_in_place(datamodule: FastIODataModule, batches: list[Any]) -> Iterator[None]:
    """Let a data module give some batches again and again, with its own hooks."""
    attributes = vars(datamodule)
    before = attributes.get("train_dataloader")
    attributes["train_dataloader"] = MethodType(lambda module: _Repeated(batches), datamodule)
    try:
        yield
    finally:
        del attributes["train_dataloader"]
        if before is not None:
            attributes["train_dataloader"] = before


def doublings(batch_size: int, num_rows: int) -> list[int]:
    """Batch sizes to try: from 8, or less if that is what is used now, in doublings to a quarter of the rows."""
    sizes = [min(8, batch_size)]
    while 2 * sizes[-1] <= min(max(num_rows // 4, batch_size), _LARGEST_BATCH):
        sizes.append(2 * sizes[-1])
    return sizes


def _copy_of(model: LightningModule) -> LightningModule:
    """A copy without its Trainer, which would be copied with everything that it holds."""
    try:
        trainer: Any = model.trainer
    except RuntimeError:  # Not attached to any.
        return deepcopy(model)
    return deepcopy(model, {id(trainer): trainer})
