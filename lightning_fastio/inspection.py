"""``fastio inspect``: what is in a file, and how each field is read."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fastio.arguments import source_of
from lightning_fastio.formats import open_reader
from lightning_fastio.formats.base import Reader
from lightning_fastio.plan import Plan, class_imbalance
from lightning_fastio.plan.order import BlockShuffle, GlobalShuffle
from lightning_fastio.plan.rows import AllRows
from lightning_fastio.quantities import counted, num_bytes

_BATCH_SIZE = 256
_MAX_ROWS_MIXED = 1 << 24


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "path",
        nargs="+",
        help="a file, a folder or a glob; several files are one source, or a field each: image=x.npy label=y.npy",
    )
    parser.add_argument(
        "--fields", nargs="+", metavar="FIELD", help="fields to show; all that can be loaded by default"
    )
    parser.add_argument(
        "--cache-bytes",
        type=num_bytes,
        metavar="SIZE",
        default=1 << 30,
        help="cache of the data module, such as 4G (1G), which decides how rows are shuffled",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: Namespace) -> int:
    """Run the command."""
    reader = open_reader(source_of(arguments.path), arguments.fields, cache_bytes=arguments.cache_bytes)
    try:
        contents = describe(reader)
        if arguments.json:
            print(json.dumps(contents, indent=2))
        else:
            _show(" ".join(arguments.path), contents)
    finally:
        reader.close()
    return 0


def describe(reader: Reader) -> dict[str, Any]:
    """What ``fastio inspect`` shows, in types that JSON has.

    Args:
        reader: An opened reader.

    Returns:
        ``rows``, ``row_bytes``, ``fields`` (a list in the order of the schema), ``blocks`` (None, or their number,
        sizes and how well a block shuffle mixes them) and ``metadata``.
    """
    layouts = {layout.name: layout for layout in reader.layout()}
    fields = [
        {
            "name": name,
            "dtype": spec.kind if spec.dtype is None else str(spec.dtype).removeprefix("torch."),
            "kind": spec.kind,
            "shape": list(spec.shape),
            "stored": layouts[name].stored,
            "read_path": layouts[name].read_path,
            "hint": layouts[name].hint,
        }
        for name, spec in reader.schema.items()
    ]
    return {
        "rows": len(reader),
        "row_bytes": reader.schema.row_bytes,
        "fields": fields,
        "blocks": _describe_blocks(reader),
        "metadata": dict(reader.metadata),
    }


def _describe_blocks(reader: Reader) -> dict[str, Any] | None:
    if reader.blocks is None:
        return None
    plan = Plan(reader, AllRows(len(reader)), shuffle="auto")
    sizes = np.diff(reader.blocks)
    blocks: dict[str, Any] = {
        "number": len(sizes),
        "rows_smallest": int(sizes.min()),
        "rows_largest": int(sizes.max()),
        "shuffle": plan.shuffle,
    }
    if plan.shuffle == "block":
        order = BlockShuffle(reader.blocks, 0, window_rows=plan.window_rows, num_parts=1)
        # Looking at one batch mixes its whole window.
        num_batches = min(200, max(4, _MAX_ROWS_MIXED // plan.window_rows))
        uniform = GlobalShuffle(len(reader), 0)
        blocks["class_imbalance"] = class_imbalance(order, _BATCH_SIZE, num_batches=num_batches)
        blocks["class_imbalance_uniform"] = class_imbalance(uniform, _BATCH_SIZE, num_batches=num_batches)
    return blocks


def _show(source: str, contents: dict[str, Any]) -> None:
    console = Console()
    title = f"{source}: {counted(contents['rows'], 'row')} of {counted(contents['row_bytes'], 'byte')}"
    # As plain text: brackets in paths are no markup.
    table = Table(title=Text(title), title_justify="left")
    for heading in ("field", "delivered as", "stored as", "read by"):
        table.add_column(heading, overflow="fold")
    for field in contents["fields"]:
        kind = "" if field["kind"] in ("tensor", field["dtype"]) else f"{field['kind']} "
        shape = str(field["shape"]) if field["shape"] else ""
        table.add_row(
            Text(field["name"]), Text(f"{kind}{field['dtype']}{shape}"), Text(field["stored"]), Text(field["read_path"])
        )
    console.print(table)
    for field in contents["fields"]:
        if field["hint"]:
            console.print(Text(f"{field['name']}: {field['hint']}", style="yellow"))
    blocks = contents["blocks"]
    if blocks:
        console.print(_about(blocks), highlight=False)


def _about(blocks: dict[str, Any]) -> str:
    smallest, largest = blocks["rows_smallest"], blocks["rows_largest"]
    rows = counted(largest, "row") if smallest == largest else f"{smallest:,} to {largest:,} rows"
    text = f"Rows decode in {counted(blocks['number'], 'block')} of {rows}; shuffle='auto' is {blocks['shuffle']!r}."
    if "class_imbalance" in blocks:
        text += (
            f" Were the rows sorted by ten classes, batches of {_BATCH_SIZE} would be {blocks['class_imbalance']:.2f} "
            f"away from the classes' shares; a uniform shuffle is {blocks['class_imbalance_uniform']:.2f} away."
        )
    return text
