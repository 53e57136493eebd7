"""``fastio report``: the page of a run, or of two runs side by side."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from lightning_fastio.report.page import write_report
from lightning_fastio.report.record import load_record


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", help="folder of a run with PrefetchCallback(save=True), or its fastio_waits.parquet")
    parser.add_argument("--compare", metavar="RUN", action="append", default=[], help="another run, side by side")
    parser.add_argument("--output", default="fastio-report", help="folder for report.html and its PNGs (fastio-report)")


def main(arguments: Namespace) -> int:
    """Run the command."""
    records = [load_record(run) for run in (arguments.run, *arguments.compare)]
    for record in records:
        print(f"{record.name}: {record.verdict or 'no verdict'}")
    print(f"Written: {write_report(records, arguments.output)}")
    return 0
