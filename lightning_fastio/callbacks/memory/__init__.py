"""Precision and memory of a run in order: `MemoryHygieneCallback`.

callback.py      the hooks, and what is done at each
precision.py     mixed precision, TF32, steps that the scaler skipped
allocator.py     device memory, and when its unused part is given back
host.py          memory of the process and its workers
collection.py    garbage collection on a schedule
record.py        metrics, peak, growth, the line at the end
oom.py           an out-of-memory error explained
nonfinite.py     the first loss that is NaN or infinite
batch_fields.py  the tensors of a batch, for both
"""

from __future__ import annotations

from lightning_fastio.callbacks.memory.callback import MemoryHygieneCallback

__all__ = ["MemoryHygieneCallback"]
