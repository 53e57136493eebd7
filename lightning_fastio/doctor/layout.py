"""How the data is laid out in its files, as the readers of this package see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning_fastio.doctor.machine import Finding
from lightning_fastio.errors import CorruptFileError, FastIOError, FileAccessError
from lightning_fastio.formats.base import Reader
from lightning_fastio.quantities import counted


def open_data(path: Path) -> Reader | Finding:
    """A reader of the data at a path, or why there is none."""
    from lightning_fastio.formats import open_reader

    try:
        return open_reader(path)
    except (CorruptFileError, FileAccessError) as error:
        return Finding(f"data at {path}", "cannot be read", str(error), "", "error")
    except FastIOError as error:
        return Finding(f"data at {path}", "not opened as data", str(error), "", "info")


def check_layout(path: Path, reader: Reader) -> Iterator[Finding]:
    """Fields whose layout costs more with every row than it need."""
    check = f"layout of {path}"
    slow = [layout for layout in reader.layout() if layout.hint]
    for layout in slow:
        why = "every row of this field costs more than it need, in each epoch"
        yield Finding(check, f"{layout.name}: {layout.stored}, read by {layout.read_path}", why, layout.hint, "warning")
    if not slow:
        rows, size = counted(len(reader), "row"), counted(reader.schema.row_bytes, "byte")
        yield Finding(check, f"{rows}, {size} each, nothing to gain")
