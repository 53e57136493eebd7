"""The loader settings that suit this machine, these files and this model: `tune` and ``fastio tune``.

    settings.py   what is tuned, and what is tried, cheapest first
    race.py       settings measured in turns until one is chosen
    search.py     one race after the other, in the time that there is
    probe.py      measured: a loader
    step.py       measured: a training step, and the batch sizes that fit
    tuner.py      tune(): all of it, on every rank, with nothing left behind
    report.py     Tuning: the result, its table, its YAML
    command.py    fastio tune

The search knows probes only as functions and time only as a clock, so that its tests need neither files nor patience.
"""

from __future__ import annotations

from lightning_fastio.tuning.command import add_arguments, main
from lightning_fastio.tuning.report import Tuning
from lightning_fastio.tuning.settings import Settings
from lightning_fastio.tuning.tuner import tune

__all__ = ["Settings", "Tuning", "add_arguments", "main", "tune"]
