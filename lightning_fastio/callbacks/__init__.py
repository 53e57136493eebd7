"""The Lightning callbacks."""

from __future__ import annotations

from lightning_fastio.callbacks.memory import MemoryHygieneCallback
from lightning_fastio.callbacks.prefetch import PrefetchCallback

__all__ = ["MemoryHygieneCallback", "PrefetchCallback"]
