"""How long the steps of a run waited, as a page to look at: ``fastio report`` and `PrefetchCallback.plot`.

record.py   a run's waits in a Parquet file
figures.py  what is drawn
page.py     the page around the figures
command.py  fastio report
"""

from __future__ import annotations

from lightning_fastio.report.command import add_arguments, main
from lightning_fastio.report.page import write_report
from lightning_fastio.report.record import Record, load_record, save_record

__all__ = ["Record", "add_arguments", "load_record", "main", "save_record", "write_report"]
