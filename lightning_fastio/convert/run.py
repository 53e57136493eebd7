"""The run itself: load the tasks of a source, write their rows, and say what was done."""

from __future__ import annotations

import logging
from contextlib import closing
from itertools import islice
from typing import Any

import lightning_fastio
from lightning_fastio.convert.manifest import Manifest, describe
from lightning_fastio.convert.options import RunOptions
from lightning_fastio.convert.output import Output
from lightning_fastio.convert.pool import run_tasks
from lightning_fastio.convert.preview import preview
from lightning_fastio.convert.progress import Progress
from lightning_fastio.convert.source import Skipped, Source
from lightning_fastio.convert.statistics import WithStatistics, merge
from lightning_fastio.convert.target import Target
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError

logger = logging.getLogger("lightning_fastio")


def run_conversion(source: Source, target: Target, run: RunOptions, options: dict[str, Any]) -> Manifest:
    """Convert a source.

    Args:
        source: What to convert.
        target: Where and how to write.
        run: How to run.
        options: The options that decide what is written, for the manifest and for resuming.
    """
    with closing(source):
        _check_skipped(source.skipped, run)
        if len(source.split_names) > 1 and not target.is_folder:
            raise ConfigError(
                f"the source has the splits {', '.join(map(repr, source.split_names))}, and {target.destination} is "
                f"one file: give a folder, and format='{target.format}'"
            )
        return (preview if run.dry_run else _convert)(source, target, run, options)


def _convert(source: Source, target: Target, run: RunOptions, options: dict[str, Any]) -> Manifest:
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
        output.end()
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
            f"{skipped[0].item}: {skipped[0].reason}. The destination is as it was; on_error='skip' (--on-error skip) "
            f"leaves such inputs out and lists them in the manifest"
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
    return describe(
        source,
        target.format,
        options,
        fields=output.fields,
        skipped=source.skipped + output.skipped,
        compression=str(output.compression),
        shards=output.shards,
        statistics={name: entry.report() for name, entry in merge(output.statistics).items()},
    )
