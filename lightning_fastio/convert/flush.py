"""Data on its way to the disk while the next is being made."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

_STEP_BYTES = 64 << 20


class Flusher:
    """Syncs the files of a folder in a thread, again and again.

    The kernel keeps written data in memory for up to half a minute, so that the sync at the end of a shard would
    have to wait for all of it, while the workers wait for the sync. Writing it out meanwhile costs nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unsynced_bytes = 0
        self._closed = False
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastio-convert-flush", daemon=True)
        self._thread.start()

    def written(self, num_bytes: int) -> None:
        """Say that so many bytes more were handed to the kernel."""
        self._unsynced_bytes += num_bytes
        if self._unsynced_bytes >= _STEP_BYTES:
            self._unsynced_bytes = 0
            self._due.set()

    def close(self) -> None:
        """Stop, after the sync that is running."""
        self._closed = True
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        while self._due.wait() and not self._closed:
            self._due.clear()
            for path in self._folder.rglob("*"):
                # A file may be gone or renamed meanwhile; its writer syncs it in any case.
                with suppress(OSError):
                    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
