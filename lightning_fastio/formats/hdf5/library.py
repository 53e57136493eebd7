"""Files through the HDF5 library: opened once in each process, one call at a time, errors in plain words.

The library has one lock around everything, so this module takes one of its own around each use and gains nothing by
more handles: few files are open at a time, and the least recently used one is closed for the next.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from lightning_fastio.errors import CorruptFileError, FastIOError, FileAccessError, FormatError

MAX_OPEN = 16
"""Files that are open at a time in one process."""

_lock = threading.RLock()
_opened: dict[int, OrderedDict[H5File, _Handle]] = {}
"""Open files by process: a handle is never used, nor closed, in a process that did not open it."""

# A child of fork must not inherit the lock in the hands of a thread that it does not have.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@dataclass(frozen=True)
class H5File:
    """A file as it was when its reader was opened. Picklable; equal files share one handle."""

    path: str
    """Absolute path."""
    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change, in nanoseconds."""
    locking: bool | None = None
    """Whether the library locks the file; None leaves it to the library and its environment variable."""

    @classmethod
    def at(cls, path: str | Path, *, locking: bool | None = None) -> H5File:
        """The file at a path, as it is now.

        Raises:
            FileAccessError: There is none, or it may not be read.
        """
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
        except OSError as error:
            raise FileAccessError(f"{path}: cannot be read: {error.strerror}") from error
        return cls(os.path.abspath(path), stat.st_size, stat.st_mtime_ns, locking)

    def check_unchanged(self, stat: os.stat_result) -> None:
        """Check that the file is still the one that the reader was opened on.

        Raises:
            CorruptFileError: It was changed or replaced since.
        """
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise CorruptFileError(
                f"{self.path}: the file was changed or replaced after it was opened (it had {self.size} bytes, now "
                f"{stat.st_size}); open a new reader"
            )

    @contextmanager
    def use(self) -> Iterator[h5py.File]:
        """The open file, with the HDF5 library to oneself; what the library raises becomes an error of this package."""
        with _lock:
            try:
                yield self._open().file
            except FastIOError:
                raise
            except (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
                raise CorruptFileError(f"{self.path}: HDF5 cannot read the file: {_first_line(error)}") from error

    @contextmanager
    def use_dataset(self, name: str) -> Iterator[Any]:
        """A dataset of the file, as `use` gives the file. It stays open with the file."""
        with self.use():
            handle = self._open()
            if name not in handle.datasets:
                handle.datasets[name] = _open_dataset(handle.file, name)
            yield handle.datasets[name]

    def close(self) -> None:
        """Close the handle of this process, if there is one."""
        with _lock:
            handle = _opened.get(os.getpid(), OrderedDict()).pop(self, None)
            if handle is not None:
                handle.file.close()

    def _open(self) -> _Handle:
        handles = _opened.setdefault(os.getpid(), OrderedDict())
        handle = handles.get(self)
        if handle is None:
            try:
                self.check_unchanged(os.stat(self.path))
                file = h5py.File(self.path, "r", **({} if self.locking is None else {"locking": self.locking}))
            except OSError as error:
                raise self._why_not_open(error) from error
            handle = handles[self] = _Handle(file)
            while len(handles) > MAX_OPEN:
                handles.popitem(last=False)[1].file.close()
        handles.move_to_end(self)
        return handle

    def _why_not_open(self, error: OSError) -> FastIOError:
        message = _first_line(error)
        if isinstance(error, FastIOError):
            return error
        if not os.path.exists(self.path):
            return FileAccessError(f"{self.path}: no such file")
        if "signature" in message or not h5py.is_hdf5(self.path):
            return FormatError(f"{self.path}: this is not an HDF5 file: it has no HDF5 signature")
        if "truncated" in message:
            return CorruptFileError(
                f"{self.path}: the file is incomplete: it has {self.size} bytes, fewer than its header says; its copy "
                f"or writer was cut short, so write or copy it again ({message})"
            )
        if "unable to lock" in message:
            return FileAccessError(
                f"{self.path}: HDF5 cannot lock the file: another process has it open for writing, or the file system "
                "has no locks. Wait for the writer to close it; if nothing writes to it, pass locking=False or set "
                f"HDF5_USE_FILE_LOCKING=FALSE before Python starts ({message})"
            )
        if "already open" in message or "consistency" in message:
            return CorruptFileError(
                f"{self.path}: the file was not closed by its writer, which may still be running or have crashed; "
                f"wait for it, or repair the file with h5clear -s ({message})"
            )
        return CorruptFileError(f"{self.path}: HDF5 cannot open the file: {message}")


def _first_line(error: BaseException) -> str:
    return str(error).strip("'\"").splitlines()[0] if str(error) else type(error).__name__


class _Handle:
    """An open file, and those of its datasets that were read."""

    def __init__(self, file: h5py.File) -> None:
        self.file = file
        self.datasets: dict[str, Any] = {}


def _open_dataset(file: h5py.File, name: str) -> Any:
    """The dataset with a name, external raw data looked for beside the file if it is not where HDF5 looks."""
    dataset = file[name]
    plist = dataset.id.get_create_plist()
    names = [os.fsdecode(plist.get_external(number)[0]) for number in range(plist.get_external_count())]
    if not names or all(os.path.exists(name) for name in names):
        return dataset
    del dataset, plist  # HDF5 refuses a prefix while the dataset is open without one.
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_efile_prefix(b"${ORIGIN}")
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
