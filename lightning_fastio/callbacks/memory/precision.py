"""Mixed precision for a Trainer that has none, TF32 beside it, and a count of the steps that a scaler skips."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.hooks import RemovableHandle

from lightning_fastio.errors import ConfigError

PrecisionChoice = Literal["auto", "bf16-mixed", "16-mixed", "32"]
Float32Matmul = Literal["highest", "high", "medium"]

log = logging.getLogger("lightning_fastio")


def install_precision(trainer: Trainer, choice: PrecisionChoice | None) -> Precision | None:
    """Give the Trainer a mixed-precision plugin where it has plain 32-bit training.

    Call it in ``setup``: before the strategy wraps the model and before a checkpoint restores the scaler.

    Args:
        trainer: The Trainer; its strategy may own a precision of its own, which is then left alone.
        choice: ``auto`` takes what the device is good at: nothing on a CPU, bf16 on a GPU that has it, else fp16.

    Returns:
        The plugin that was installed, or None when the Trainer keeps what it had.
    """
    strategy = trainer.strategy
    present = strategy.precision_plugin
    wanted = _best_precision(trainer) if choice == "auto" else choice
    if type(present) is not Precision:
        if choice not in (None, "auto") and wanted != str(present.precision).removesuffix("-true"):
            _state(
                trainer,
                f"MemoryHygieneCallback(precision={choice!r}) has no effect: the Trainer or its strategy already runs "
                f"with {type(present).__name__}({present.precision!r}). Set the precision in one of the two places.",
            )
        return None
    if wanted is None or wanted == "32":
        return None
    device_type = strategy.root_device.type
    if wanted == "16-mixed" and device_type == "cpu":
        _state(
            trainer, "precision='16-mixed' runs as 'bf16-mixed' on a CPU, as Trainer(precision='16-mixed') does there."
        )
        wanted = "bf16-mixed"
    if wanted == "16-mixed" and isinstance(strategy, ModelParallelStrategy):
        _state(trainer, "ModelParallelStrategy cannot train with '16-mixed': training stays in 32 bits.")
        return None
    plugin = mixed_precision(wanted, device_type)
    strategy.precision_plugin = plugin
    return plugin


def mixed_precision(precision: Literal["bf16-mixed", "16-mixed"], device_type: str) -> MixedPrecision:
    """The plugin that ``Trainer(precision=...)`` would make, its gradient scaler included."""
    return MixedPrecision(precision, device_type)


def _best_precision(trainer: Trainer) -> Literal["bf16-mixed", "16-mixed"] | None:
    if trainer.strategy.root_device.type != "cuda":
        return None
    is_rocm = torch.version.hip is not None
    has_bf16 = is_rocm or torch.cuda.get_device_capability(trainer.strategy.root_device) >= (8, 0)
    # Ranks on different GPUs must agree, else their gradients would not fit together.
    return "bf16-mixed" if trainer.strategy.reduce_boolean_decision(has_bf16, all=True) else "16-mixed"


def check_half_parameters(trainer: Trainer, pl_module: LightningModule) -> None:
    """A gradient scaler needs float32 weights.

    Raises:
        ConfigError: There are trainable float16 parameters while a scaler is in use.
    """
    if _scaler(trainer) is None:
        return
    half = [name for name, p in pl_module.named_parameters() if p.dtype == torch.float16 and p.requires_grad]
    if half:
        names = ", ".join(half[:3]) + (f" and {len(half) - 3} more" if len(half) > 3 else "")
        raise ConfigError(
            f"precision='16-mixed' needs float32 weights, but these parameters are float16: {names}. Leave out the "
            ".half() call (autocast does the casting), or train with Trainer(precision='16-true')."
        )


def allow_tf32(device: torch.device, wanted: Float32Matmul | None) -> str | None:
    """Set the precision of float32 matrix products, unless the user has set it already.

    Args:
        device: Only CUDA devices are concerned.
        wanted: As for `torch.set_float32_matmul_precision`.

    Returns:
        The earlier setting, to be restored, or None when nothing was changed.
    """
    if wanted is None or device.type != "cuda":
        return None
    try:
        present = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The user chose the per-backend settings of torch 2.9; the old setter would overrule them.
        return None
    if present != "highest" or wanted == present:
        return None
    torch.set_float32_matmul_precision(wanted)
    return present


class SkippedSteps:
    """Counts the optimizer steps that a gradient scaler left out because of infinite or NaN gradients.

    A step that was about to be made and never reached the optimizer was skipped. Reading the scale instead would
    wait for the device.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._num_due = 0
        self._num_made = 0
        self._handles: list[RemovableHandle] = []
        self.is_active = _scaler(trainer) is not None
        if self.is_active:
            self._handles = [
                optimizer.register_step_post_hook(self._made)
                for optimizer in trainer.optimizers
                if isinstance(optimizer, torch.optim.Optimizer)
            ]

    @property
    def count(self) -> int:
        """Steps skipped so far."""
        return self._num_due - self._num_made

    def before_step(self) -> None:
        """The scaler is about to decide on a step."""
        if self.is_active:
            self._num_due += 1

    def _made(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._num_made += 1

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _state(trainer: Trainer, message: str) -> None:
    if trainer.is_global_zero:
        log.warning(message)


def _scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    scaler: torch.amp.GradScaler | None = getattr(trainer.strategy.precision_plugin, "scaler", None)
    return scaler
