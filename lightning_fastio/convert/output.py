"""Where rows go: shards in a staging folder, a journal of the finished ones, and one rename at the end.

While a conversion runs, everything lies in a hidden folder beside the destination:

    .photos.partial/
      journal.jsonl     what is converted how, then a line per finished shard
      data/             becomes the destination: one file, or a folder of shards with its manifest

A shard ends where a task ends, and tasks depend on the source and the options alone. So the journal says with how
many tasks a resumed run goes on, and it writes the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from lightning_fastio.convert.flush import Flusher
from lightning_fastio.convert.manifest import FOLDER_MANIFEST, Manifest, Shard, describe_files, manifest_path
from lightning_fastio.convert.source import Loaded, RowBatch, Skipped
from lightning_fastio.convert.statistics import FieldStatistics, Statistics, merge
from lightning_fastio.convert.target import Compression, Target, choose_compression
from lightning_fastio.errors import ConfigError, FileAccessError, ResumeError
from lightning_fastio.formats import open_writer
from lightning_fastio.formats.base import Writer

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Output:
    """The staging folder of one conversion."""

    def __init__(
        self, target: Target, header: dict[str, Any], metadata: Mapping[str, str], *, resume: bool, overwrite: bool
    ) -> None:
        """Open or resume a conversion.

        Args:
            target: Where and how to write.
            header: What decides the bytes: fingerprint of the source, options, version.
            metadata: Stored in every shard.
            resume: Go on with an unfinished conversion when there is one.
            overwrite: Replace an existing destination, and throw away an unfinished conversion.

        Raises:
            ConfigError: There is an unfinished conversion, and neither to resume nor to overwrite was asked for.
            ResumeError: The unfinished conversion had another source or other options.
            FileAccessError: Another process is converting to this destination.
        """
        self.target = target
        self.tasks_done = 0
        self.shards: list[Shard] = []
        self.skipped: list[Skipped] = []
        self.statistics: list[Statistics] = []
        self.fields: dict[str, str] = {}
        self.metadata = metadata
        self.compression: Compression | None = None
        self.staging = target.staging
        self.data = self.staging / "data"
        self._header: dict[str, Any] = json.loads(json.dumps(header, default=str))
        self._writer: Writer | None = None
        self._pending = Pending()
        self._journal = self._open_staging(resume=resume, overwrite=overwrite)
        try:
            self._read_journal()
        except BaseException:
            self._journal.close()
            raise
        self._flusher = Flusher(self.staging)

    def _open_staging(self, *, resume: bool, overwrite: bool) -> IO[str]:
        journal = self.staging / "journal.jsonl"
        if journal.exists() and not resume:
            if not overwrite:
                raise ConfigError(
                    f"{self.staging} holds an unfinished conversion: resume=True (--resume) goes on with it, "
                    f"overwrite=True (--overwrite) starts again"
                )
            self._lock().close()
            journal.unlink()
            shutil.rmtree(self.data, ignore_errors=True)
        self.staging.mkdir(parents=True, exist_ok=True)
        return self._lock()

    def _lock(self) -> IO[str]:
        journal = (self.staging / "journal.jsonl").open("a+", encoding="utf-8")
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            journal.close()
            raise FileAccessError(
                f"{self.staging}: another process is converting to {self.target.destination}"
            ) from error
        return journal

    def _read_journal(self) -> None:
        self._journal.seek(0)
        whole, _, half = self._journal.read().rpartition("\n")
        records = [json.loads(line) for line in whole.splitlines()]
        if half:
            # Left by a run that was killed while it wrote this line.
            self._journal.truncate(len(f"{whole}\n".encode()) if whole else 0)
        if not records:
            self._append(self._header)
        elif records[0] != self._header:
            before = {**records[0], **records[0]["options"]}
            now = {**self._header, **self._header["options"]}
            changed = sorted(key for key in {*before, *now} - {"options"} if before.get(key) != now.get(key))
            raise ResumeError(
                f"{self.staging}: the unfinished conversion differs in {', '.join(changed)}; overwrite=True "
                f"(--overwrite) starts again"
            )
        for record in records[1:]:
            shard = Shard(**record["shard"])
            if not self._is_unchanged(shard):
                raise ResumeError(
                    f"{self.data / shard.path}: changed since it was written; overwrite=True (--overwrite) starts again"
                )
            self._take_over(record, shard)
        self._remove_leftovers()

    def _is_unchanged(self, shard: Shard) -> bool:
        try:
            return describe_files(self.data / shard.path, self.data) == shard.files
        except FileNotFoundError:
            return False

    def _remove_leftovers(self) -> None:
        """Remove what a killed run had begun to write."""
        finished = {self.data / name for shard in self.shards for name in shard.files}
        for path in sorted(self.data.rglob("*"), reverse=True):
            if path.is_dir():
                with suppress(OSError):
                    path.rmdir()
            elif path not in finished:
                path.unlink()

    def _take_over(self, record: dict[str, Any], shard: Shard) -> None:
        self.shards.append(shard)
        self.tasks_done = record["tasks_done"]
        self.fields = record["fields"]
        self.compression = Compression(**record["compression"])
        self.skipped += [Skipped(**entry) for entry in record["skipped"]]
        self.statistics.append({name: FieldStatistics.load(state) for name, state in record["statistics"].items()})

    def _append(self, record: dict[str, Any]) -> None:
        self._journal.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def write(self, loaded: Loaded, split: str) -> None:
        """Append what the next task gave; its arrays may change once this returns."""
        if self._writer is not None and split != self._pending.split:
            self._end_shard()
        if self.target.destination.suffix.lower() == ".npy":
            loaded = as_stream(loaded)
        if loaded.rows:
            if self._writer is None:
                self._writer = self._open_writer(split, loaded.rows)
            self._writer.write(loaded.rows)
            self._flusher.written(loaded.num_bytes)
            self.fields = self.fields or describe_fields(loaded.rows)
        self._pending.add(loaded, split)
        if self.target.shard_bytes is not None and self._pending.num_bytes >= self.target.shard_bytes:
            self._end_shard()

    def _open_writer(self, split: str, rows: RowBatch) -> Writer:
        if self.compression is None:
            self.compression = choose_compression(self.target, rows)
        number = sum(shard.split == split for shard in self.shards)
        path = self.data / self.target.shard_name(split, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._pending.path = path
        options = {} if self.compression.name is None else {"compression": self.compression.name}
        return open_writer(path, metadata=self.metadata, **options)

    def _end_shard(self) -> None:
        """Close the shard, and note in the journal that its tasks are done."""
        assert self._writer is not None
        pending, path = self._pending, self._pending.path
        self._writer.close()
        self._writer, self._pending = None, Pending()
        relative = path.relative_to(self.data).as_posix() if self.target.is_folder else path.name
        shard = Shard(relative, pending.split, pending.num_rows, describe_files(path, self.data))
        record = {
            "shard": asdict(shard),
            "tasks_done": self.tasks_done + pending.num_tasks,
            "fields": self.fields,
            "compression": self.compression and asdict(self.compression),
            "skipped": [asdict(entry) for entry in pending.skipped],
            "statistics": {name: entry.dump() for name, entry in merge(pending.statistics).items()},
        }
        self._append(record)
        self._take_over(record, shard)

    def finish(self, manifest: Manifest) -> None:
        """Put the data and its manifest at the final name, replacing what was there."""
        destination = self.target.destination
        text = manifest.dump()
        if self.target.is_folder:
            _write_synced(self.data / FOLDER_MANIFEST, text)
            for folder in (self.data, *(path for path in self.data.rglob("*") if path.is_dir())):
                _sync_folder(folder)
            _replace(self.data, destination)
        else:
            beside = manifest_path(destination)
            beside.unlink(missing_ok=True)
            os.replace(self.data / destination.name, destination)
            _write_synced(self.staging / FOLDER_MANIFEST, text)
            os.replace(self.staging / FOLDER_MANIFEST, beside)
        _sync_folder(destination.parent)
        self._journal.close()
        shutil.rmtree(self.staging)

    def end(self) -> None:
        """End the last shard; inputs skipped after it are kept for the manifest."""
        if self._writer is not None:
            self._end_shard()
        self.skipped += self._pending.skipped
        self._pending = Pending()
        self._flusher.close()

    def abort(self) -> bool:
        """Give up what is not finished. Returns whether finished shards are left to resume with."""
        if self._writer is not None:
            self._writer.abort()
        self._flusher.close()
        self._journal.close()
        if not self.shards:
            shutil.rmtree(self.staging, ignore_errors=True)
        return bool(self.shards)


@dataclass
class Pending:
    """What the shard in work holds so far."""

    split: str = ""
    path: Path = Path()
    num_rows: int = 0
    num_bytes: int = 0
    num_tasks: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)

    def add(self, loaded: Loaded, split: str) -> None:
        """Count one more task."""
        self.split = split
        self.num_rows += loaded.num_rows
        self.num_bytes += loaded.num_bytes
        self.num_tasks += 1
        self.skipped += loaded.skipped
        if loaded.statistics:
            self.statistics.append(loaded.statistics)


def as_stream(loaded: Loaded) -> Loaded:
    """Rows for a lone .npy file: of one ragged field, such as tokens, the values one after the other."""
    if len(loaded.rows) != 1:
        return loaded
    [(name, values)] = loaded.rows.items()
    ragged = isinstance(values, list) and isinstance(values[0], np.ndarray)
    return replace(loaded, rows={name: np.concatenate(values)}) if ragged else loaded


def describe_fields(rows: RowBatch) -> dict[str, str]:
    """Dtype and sample shape of each field, as text."""
    return {name: _describe_field(values) for name, values in rows.items()}


def _describe_field(values: Any) -> str:
    if isinstance(values, np.ndarray):
        return f"{values.dtype}{list(values.shape[1:]) if values.ndim > 1 else ''}"
    first = values[0]
    if isinstance(first, np.ndarray):
        return f"ragged {first.dtype}{list(first.shape[1:]) if first.ndim > 1 else ''}"
    return "string" if isinstance(first, str) else "bytes"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(new: Path, destination: Path) -> None:
    """Rename a folder over another, which ``rename`` cannot do unless that one is empty."""
    if not destination.exists():
        os.rename(new, destination)
        return
    # Exchanging the two leaves no moment at which there is neither.
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(new), os.fsencode(destination)
    if exchange is None or exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        old = new.with_name("replaced")
        os.rename(destination, old)
        os.rename(new, destination)
