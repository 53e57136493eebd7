"""The dry run: what a conversion would write, estimated from a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lightning_fastio.convert.manifest import Manifest, describe
from lightning_fastio.convert.options import RunOptions
from lightning_fastio.convert.output import describe_fields
from lightning_fastio.convert.progress import duration
from lightning_fastio.convert.source import Loaded, Skipped, Source, Task
from lightning_fastio.convert.target import Target
from lightning_fastio.errors import FormatError
from lightning_fastio.quantities import counted

_SAMPLE_S = 2.0


def preview(source: Source, target: Target, run: RunOptions, options: dict[str, Any]) -> Manifest:
    """Load a sample in this process, print what would be written, and return a manifest without shards."""
    num_items = num_rows = num_bytes = 0
    skipped: list[Skipped] = list(source.skipped)
    fields: dict[str, str] = {}
    started = time.perf_counter()
    for task, loaded in _sample(source):
        num_items += task.num_items
        num_rows += loaded.num_rows
        num_bytes += loaded.num_bytes
        skipped += loaded.skipped
        fields = fields or describe_fields(loaded.rows)
    elapsed_s = time.perf_counter() - started
    if not num_rows:
        raise FormatError("the sample gave no rows" + (f": {skipped[0].item}: {skipped[0].reason}" if skipped else ""))
    scale = source.num_items / num_items if source.num_items else 1.0
    lines = [f"would write {target.destination} ({target.format})"]
    lines += [f"  {name}: {text}" for name, text in fields.items()]
    rows_text = f"{round(num_rows * scale):,}" if source.num_items else f"more than {num_rows:,}"
    lines.append(f"  {rows_text} rows, about {num_bytes * scale / 2**20:,.1f} MiB before compression")
    if source.num_items:
        lines.append(
            f"  about {duration(elapsed_s * scale / max(1, run.workers))} with {counted(run.workers, 'worker')}"
        )
    lines += [f"  would skip {entry.item}: {entry.reason}" for entry in skipped]
    print("\n".join(lines))
    return describe(source, target.format, options, fields=fields, skipped=skipped)


def _sample(source: Source) -> Iterator[tuple[Task, Loaded]]:
    """Tasks from the front, for as long as a person likes to wait."""
    started = time.perf_counter()
    for task in source.tasks():
        yield task, source.load(task.payload)
        if time.perf_counter() - started > _SAMPLE_S:
            return
