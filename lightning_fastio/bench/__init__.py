"""``fastio bench``: rows per second of your own data, by the usual loader, by this package, and at the machine's limit.

measure.py   bench(): the three, measured in turns
plain.py     the usual loader: one sample at a time
picture.py   the PNG
command.py   the table and the JSON
"""

from __future__ import annotations

from lightning_fastio.bench.command import add_arguments, main
from lightning_fastio.bench.measure import Benchmark, bench

__all__ = ["Benchmark", "add_arguments", "bench", "main"]
