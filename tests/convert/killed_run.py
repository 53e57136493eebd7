"""A conversion that kills its own process, run by the tests of resuming: ``python killed_run.py DESTINATION ITEM``."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from lightning_fastio.convert import convert

NUM_ITEMS = 1000


def make_row(item: int) -> dict[str, object] | None:
    """A row that only the number of the item decides; every tenth item is left out, every fiftieth is broken."""
    if item == int(os.environ.get("KILL_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    if item % 50 == 7:
        raise ValueError("broken")
    if item % 10 == 0:
        return None
    return {"x": np.random.default_rng(item).normal(size=32), "n": item, "name": f"item {item}"}


def run(destination: str, **options: object):
    """The conversion; its shards hold some hundred rows."""
    return convert(
        range(NUM_ITEMS), destination, fn=make_row, on_error="skip", shard_bytes=40_000, num_workers=0, **options
    )


if __name__ == "__main__":
    os.environ["KILL_AT"] = sys.argv[2]
    run(sys.argv[1], format=sys.argv[3])
