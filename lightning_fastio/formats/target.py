"""A file or folder that appears under its name only when it is whole."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from lightning_fastio.errors import ConfigError, FileAccessError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Target:
    """Where a writer works, and where its work goes at the end.

    Data is written to a hidden sibling, which carries host, process and a random text in its name, so that two writers
    never share one. What a process that is gone left of earlier attempts at the same target is removed.
    """

    def __init__(self, path: str | Path, *, is_folder: bool = False) -> None:
        """Choose the place; nothing is written yet.

        Args:
            path: The target; a link is followed.
            is_folder: Whether it becomes a folder.

        Raises:
            ConfigError: There is a folder where a file should go, or the other way round.
        """
        # Absolute, since the working directory may change until the end.
        self.path = Path(path).expanduser().resolve()
        if self.path.exists() and self.path.is_dir() != is_folder:
            there, wanted = ("a folder", "a file") if self.path.is_dir() else ("a file", "a folder")
            raise ConfigError(f"{self.path} is {there}, and {wanted} would be written there: choose another name")
        owner = f"{socket.gethostname()}-{os.getpid()}"
        self.partial = self.path.with_name(f".{self.path.name}.{owner}-{uuid4().hex[:8]}.tmp")
        """Where the writer works."""

    def begin(self) -> None:
        """Make the folders above the target, and clear away what earlier attempts left.

        Raises:
            FileAccessError: Nothing can be written there.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_remains()
        except OSError as error:
            raise FileAccessError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def publish(self, whole: Path | None = None) -> None:
        """Sync what was written and put it in the place of the target, at once.

        Args:
            whole: What becomes the target, where it is not ``partial`` itself but something in it.
        """
        whole = whole or self.partial
        sync(whole)
        if whole.is_dir() and self.path.exists():
            # Afterwards the old folder stands where the new one was.
            _exchange(whole, self.path)
        else:
            os.replace(whole, self.path)
        sync(self.path.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what was written and not published."""
        if self.partial.is_dir():
            shutil.rmtree(self.partial, ignore_errors=True)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                self.partial.unlink()

    def _remove_remains(self) -> None:
        prefix = f".{self.path.name}.{socket.gethostname()}-"
        for sibling in self.path.parent.iterdir():
            owner, _, rest = sibling.name.removeprefix(prefix).partition("-")
            is_remains = sibling.name.startswith(prefix) and rest.endswith(".tmp") and owner.isdecimal()
            if is_remains and not Path(f"/proc/{owner}").exists():
                with suppress(OSError):
                    shutil.rmtree(sibling) if sibling.is_dir() else sibling.unlink()


def _exchange(new: Path, path: Path) -> None:
    """Let two folders change places in one step, so that there is a whole one under the name at any time."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE):
        return
    # File systems without it: a moment without a folder, and the old one back if the new one cannot go there.
    old = new.with_name(f"{new.name}.old")
    os.rename(path, old)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
