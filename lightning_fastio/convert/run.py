"""The run itself: load the tasks of a source, write their rows, and say what was done."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any, Literal

import lightning_fastio
from lightning_fastio.allowance import cpu_allowance
from lightning_fastio.convert.manifest import Manifest
from lightning_fastio.convert.output import Output, describe_fields, size_of
from lightning_fastio.convert.pool import check_engine, run_tasks
from lightning_fastio.convert.progress import Progress, duration
from lightning_fastio.convert.source import Engine, Skipped, Source
from lightning_fastio.convert.statistics import WithStatistics, merge
from lightning_fastio.convert.target import Target
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError

logger = logging.getLogger("lightning_fastio")

_PREVIEW_S = 2.0


@dataclass(frozen=True)
class RunOptions:
    """How to run a conversion; described at `lightning_fastio.convert.convert`."""

    on_error: Literal["stop", "skip"]
    max_skipped: int | None
    num_workers: int | None
    memory_bytes: int
    engine: Engine
    statistics: bool
    resume: bool
    overwrite: bool
    dry_run: bool
    progress: bool | None

    def __post_init__(self) -> None:
        check_engine(self.engine)
        if self.on_error not in ("stop", "skip"):
            raise ConfigError(f"on_error={self.on_error!r}: expected 'stop' or 'skip'")
        if self.num_workers is not None and self.num_workers < 0:
            raise ConfigError(f"num_workers={self.num_workers}: expected 0 or more")

    @property
    def workers(self) -> int:
        """Number of workers."""
        return ceil(cpu_allowance()) if self.num_workers is None else self.num_workers


def run_conversion(source: Source, target: Target, run: RunOptions, options: dict[str, Any]) -> Manifest:
    """Convert a source.

    Args:
        source: What to convert.
        target: Where and how to write.
        run: How to run.
        options: The options that decide what is written, for the manifest and for resuming.
    """
    _check_skipped(source.skipped, run)
    if run.dry_run:
        return _preview(source, target, run, options)
    header = {
        "version": lightning_fastio.__version__,
        "format": target.format,
        "source": source.fingerprint,
        "options": {**options, "shard_bytes": target.shard_bytes, "compression": target.compression},
        "statistics": run.statistics,
    }
    output = Output(target, header, source.metadata, resume=run.resume, overwrite=run.overwrite)
    try:
        with Progress(source, shown=run.progress) as progress:
            _write_tasks(source, output, run, progress)
        output.close_shard()
        manifest = _describe(source, target, options, output)
        output.finish(manifest)
    except BaseException:
        if output.abort():
            logger.warning(
                "%d finished shards are kept in %s: resume=True (--resume) goes on with them",
                len(output.shards),
                output.staging,
            )
        raise
    return manifest


def _write_tasks(source: Source, output: Output, run: RunOptions, progress: Progress) -> None:
    tasks = source.tasks()
    for task in islice(tasks, output.tasks_done):
        progress.pass_over(task)
    skipped = len(source.skipped) + len(output.skipped)
    load = WithStatistics(source.load) if run.statistics else source.load
    engine = source.engine if run.engine == "auto" else run.engine
    for task, loaded in run_tasks(load, tasks, engine, num_workers=run.workers, memory_bytes=run.memory_bytes):
        skipped += len(loaded.skipped)
        if loaded.skipped:
            _check_skipped(loaded.skipped, run, skipped)
        output.write(loaded, task.split)
        progress.add(task, loaded)


def _check_skipped(skipped: list[Skipped], run: RunOptions, total: int | None = None) -> None:
    """Stop where the policy does not allow that an input is left out."""
    if skipped and run.on_error == "stop":
        raise CorruptFileError(
            f"{skipped[0].item}: {skipped[0].reason}. Nothing was written; on_error='skip' (--on_error skip) leaves "
            f"such inputs out and lists them in the manifest"
        )
    total = len(skipped) if total is None else total
    if run.max_skipped is not None and total > run.max_skipped:
        raise CorruptFileError(
            f"{total} inputs were skipped, more than max_skipped={run.max_skipped}; the last is {skipped[-1].item}: "
            f"{skipped[-1].reason}"
        )


def _describe(source: Source, target: Target, options: dict[str, Any], output: Output) -> Manifest:
    if not output.shards:
        reasons = f"; all {len(output.skipped)} inputs were skipped" if output.skipped else ""
        raise FormatError(f"{target.destination}: there are no rows to write{reasons}")
    merged = merge(output.statistics)
    return Manifest(
        version=lightning_fastio.__version__,
        format=target.format,
        source=source.fingerprint,
        options=json.loads(json.dumps(options, default=str)),
        compression=str(output.compression),
        fields=output.fields,
        shards=output.shards,
        classes=json.loads(source.metadata.get("classes", "[]")),
        skipped=source.skipped + output.skipped,
        statistics={name: entry.report() for name, entry in merged.items()},
    )


def _preview(source: Source, target: Target, run: RunOptions, options: dict[str, Any]) -> Manifest:
    """Load a sample in this process, print what would be written, and return a manifest without shards."""
    num_items = num_rows = num_bytes = 0
    skipped: list[Skipped] = list(source.skipped)
    fields: dict[str, str] = {}
    started = time.perf_counter()
    for task, loaded in _until(
        run_tasks(source.load, source.tasks(), "thread", num_workers=0, memory_bytes=0), started
    ):
        num_items += task.num_items
        num_rows += loaded.num_rows
        num_bytes += sum(size_of(values) for values in loaded.rows.values())
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
        lines.append(f"  about {duration(elapsed_s * scale / max(1, run.workers))} with {run.workers} workers")
    lines += [f"  would skip {entry.item}: {entry.reason}" for entry in skipped]
    print("\n".join(lines))
    return Manifest(
        version=lightning_fastio.__version__,
        format=target.format,
        source=source.fingerprint,
        options=json.loads(json.dumps(options, default=str)),
        compression="",
        fields=fields,
        shards=[],
        classes=json.loads(source.metadata.get("classes", "[]")),
        skipped=skipped,
    )


def _until(results: Iterator[Any], started: float) -> Iterator[Any]:
    for result in results:
        yield result
        if time.perf_counter() - started > _PREVIEW_S:
            return
