"""The only package that touches Lightning's private attributes.

loaders.py     `BatchLoader` inside Lightning's loops
fetcher.py     what a loop gets its batches from, exchanged for one that fetches ahead
randomness.py  which batches can be fetched ahead without changing random numbers
transfer.py    what moves a batch to the device, and when that may be done ahead
steps.py       when the Trainer logs

Checked against Lightning 2.4, 2.5 and 2.6.
"""

from __future__ import annotations

from lightning_fastio._lightning.fetcher import AheadFetcher, AheadOptions, Delivery, fetch_ahead
from lightning_fastio._lightning.loaders import PlannedIndices, begin_epoch
from lightning_fastio._lightning.steps import log_step
from lightning_fastio._lightning.transfer import TransferAhead

__all__ = [
    "AheadFetcher",
    "AheadOptions",
    "Delivery",
    "PlannedIndices",
    "TransferAhead",
    "begin_epoch",
    "fetch_ahead",
    "log_step",
]
