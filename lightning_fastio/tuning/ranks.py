"""Several ranks that must come to one decision."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from lightning_fastio.errors import ConfigError


class Ranks:
    """The ranks of this run; a single one where nothing is distributed."""

    def __init__(self) -> None:
        """See which ranks there are.

        Raises:
            ConfigError: There are several that cannot talk with each other yet.
        """
        self._are_connected = dist.is_available() and dist.is_initialized()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1 and not self._are_connected:
            raise ConfigError(
                f"{world_size} ranks run this, but they cannot agree on one setting, as torch.distributed is not "
                "initialized: run `fastio tune` once before training, or call init_process_group before tune()"
            )

    @property
    def per_node(self) -> int:
        """Ranks that share this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self._are_connected else 1

    def smallest(self, number: float) -> float:
        """The smallest number of all ranks, on every rank: the slowest one sets the pace of all."""
        if not self._are_connected:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return float(tensor)
