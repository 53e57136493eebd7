"""Sparse CSR batches."""

from __future__ import annotations

import warnings
from functools import cache

import torch


def csr_tensor(
    row_starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, size: tuple[int, ...]
) -> torch.Tensor:
    """A sparse CSR tensor from its parts, as int64 ``(rows + 1,)``, int64 and any numbers ``(entries,)``."""
    _silence_beta_notice()
    return torch.sparse_csr_tensor(row_starts, columns, values, size, check_invariants=False)


@cache
def _silence_beta_notice() -> None:
    """Let torch say once, and unheard, that sparse CSR is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))
