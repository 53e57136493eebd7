"""``fastio bench``: the table, the picture and the JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lightning_fastio.arguments import source_of
from lightning_fastio.bench.measure import Benchmark, bench
from lightning_fastio.bench.picture import draw
from lightning_fastio.quantities import counted

_FEW_BATCHES = 10
_AT_LIMIT = 0.95


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "path",
        nargs="+",
        help="a file, a folder or a glob; several files are one source, or a field each: image=x.npy label=y.npy",
    )
    parser.add_argument("--fields", nargs="+", metavar="FIELD", help="fields to read; all by default")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a batch (256)")
    parser.add_argument("--num-workers", type=int, help="reader threads; what a data module takes by default")
    parser.add_argument("--seconds", type=float, default=4.0, help="time to measure (4)")
    parser.add_argument("--output", metavar="PNG", default="fastio-bench.png", help="the picture (fastio-bench.png)")
    parser.add_argument("--no-picture", action="store_true", help="draw none; matplotlib is not needed then")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: Namespace) -> int:
    """Run the command."""
    benchmark = bench(
        source_of(arguments.path),
        arguments.fields,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        seconds=arguments.seconds,
    )
    if arguments.json:
        print(json.dumps(benchmark.as_dict(), indent=2))
    else:
        console = Console()
        console.print(_table(benchmark))
        console.print(_summary(benchmark), highlight=False)
    if not arguments.no_picture:
        draw(benchmark, arguments.output)
    return 0


def _table(benchmark: Benchmark) -> Table:
    rows = f"{counted(benchmark.num_rows, 'row')} of {counted(benchmark.row_bytes, 'byte')}"
    title = f"{rows}, batches of {benchmark.batch_size}"
    table = Table(title=title, title_justify="left", caption=benchmark.how, caption_justify="left")
    table.add_column("")
    for heading in ("rows/s", "bytes/s", "ms a batch"):
        table.add_column(heading, justify="right")
    for each in benchmark.contenders:
        table.add_row(
            each.name,
            f"{each.rows_per_s:,.0f}",
            decimal(round(each.rows_per_s * benchmark.row_bytes)),
            f"{1e3 * benchmark.batch_s(each):.3g}",
            style="bold" if each is benchmark.fastio else None,
        )
    return table


def _summary(benchmark: Benchmark) -> Text:
    text = (
        f"A training step may be as fast as {1e3 * benchmark.batch_s(benchmark.fastio):.3g} ms before it waits for "
        f"data; with the usual loader {1e3 * benchmark.batch_s(benchmark.plain):.3g} ms."
    )
    if benchmark.share_of_limit is not None:
        at_limit = benchmark.share_of_limit > _AT_LIMIT
        share = "is at the limit of" if at_limit else f"reaches {benchmark.share_of_limit:.0%} of the limit of"
        text += f" This package {share} the machine."
    num_batches = -(-benchmark.num_rows // benchmark.batch_size)
    if num_batches < _FEW_BATCHES:
        batches = counted(num_batches, "batch", "batches")
        text += f" An epoch has {batches} here, so that its start counts for much of the time."
    return Text(text)
