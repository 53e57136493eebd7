"""What moves a batch to the device, and whether that can be done ahead.

Ahead of the step, in the thread that copies, run `convert_input` of the precision plugin and the copy: the user's
`transfer_batch_to_device` where there is one, called directly, as Lightning's way of calling hooks belongs to the
training thread. `on_after_batch_transfer` runs when the batch is delivered, on the training thread and stream, with
the state of the Trainer that it expects. A user's `on_before_batch_transfer` comes before the copy and may look at
the state of the Trainer, so with one batches are fetched ahead, but not copied ahead.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_fastio.staging import Backend, Staged, Stager, move_batch


class TransferAhead:
    """Copies batches of a Trainer to its device ahead, between `install` and `remove`."""

    def __init__(self, trainer: Trainer, backend: Backend) -> None:
        self._trainer = trainer
        self._backend = backend
        self._shim: _BatchToDevice | None = None

    def new_stager(self) -> Stager:
        """What copies the batches of one loop."""
        return Stager(self._backend)

    def obstacle(self) -> str | None:
        """What keeps batches from being copied ahead, in words; None where nothing does."""
        strategy = self._trainer.strategy
        shimmed = isinstance(vars(strategy).get("batch_to_device"), _BatchToDevice)
        if not shimmed and not _is_default(strategy, "batch_to_device", Strategy):
            return f"{type(strategy).__name__} moves batches in its own way"
        if self._own_hook("on_before_batch_transfer") is not None:
            return "on_before_batch_transfer is overridden"
        return None

    def stage(self, stager: Stager, batch: Any, dataloader_idx: int) -> Staged:
        """Start the copy of a batch, in the thread that copies."""
        trainer, device = self._trainer, self._backend.device
        hook = self._own_hook("transfer_batch_to_device")

        def transfer(pinned: Any) -> Any:
            return move_batch(pinned, device) if hook is None else hook(pinned, device, dataloader_idx)

        return stager.stage(trainer.precision_plugin.convert_input(batch), transfer)

    def install(self) -> None:
        """Let the strategy take batches that are under way."""
        strategy = self._trainer.strategy
        if self._shim is None:
            self._shim = _BatchToDevice(strategy, self._trainer.lightning_module)
            strategy.batch_to_device = self._shim  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the strategy its own method back."""
        if self._shim is not None and vars(self._trainer.strategy).get("batch_to_device") is self._shim:
            del self._trainer.strategy.batch_to_device
        self._shim = None

    def _own_hook(self, name: str) -> Any:
        """A transfer hook of the user's, or None where it is Lightning's own."""
        selector = self._trainer._data_connector._datahook_selector
        assert selector is not None
        owner = selector.get_instance(name)
        base = LightningModule if isinstance(owner, LightningModule) else LightningDataModule
        return None if _is_default(owner, name, base) else getattr(owner, name)


class _BatchToDevice:
    """Takes the place of `Strategy.batch_to_device` for batches under way; all others go to the strategy."""

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self._original = strategy.batch_to_device
        self._module = module

    def __call__(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if not isinstance(batch, Staged):
            return self._original(batch, device=device, dataloader_idx=dataloader_idx)
        return self._module._call_batch_hook("on_after_batch_transfer", batch.ready(), dataloader_idx)


def _is_default(owner: object, name: str, base: type) -> bool:
    # Lightning's `is_overridden` looks through decorators, so that a hook wrapped on an instance would be passed over.
    return name not in vars(owner) and getattr(type(owner), name) is getattr(base, name)
