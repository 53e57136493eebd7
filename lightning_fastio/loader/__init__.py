"""Whole batches, read ahead of the training loop. The life of a batch, from top to bottom:

tasks          batch numbers to row numbers, and word to the reader of the rows that come soon
fetch          row numbers to a finished batch: read, transform, convert
buffers        memory for it that is used again once nothing refers to it
workers        tasks to results in order; and how: threads, processes, or none (pool chooses)
standing       where a loader stands in its epoch, and how that travels in a checkpoint
batch_loader   `BatchLoader`, which Lightning iterates
"""

from lightning_fastio.loader.batch_loader import BatchLoader, LoaderStats

__all__ = ["BatchLoader", "LoaderStats"]
