"""What a person sees while a conversion runs: rate, bytes, time left, skipped inputs. Quiet where nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import Self

from lightning_fastio.convert.source import Loaded, Source, Task


class Progress:
    """A line that is redrawn in a terminal; nothing elsewhere, so that logs of CI runs stay short."""

    def __init__(self, source: Source, *, shown: bool | None = None) -> None:
        """Count from now on.

        Args:
            source: What is converted.
            shown: Whether to draw; None draws when standard error is a terminal.
        """
        self._num_items, self._num_bytes = source.num_items, source.num_bytes
        self._started = time.perf_counter()
        self._items_before = 0
        self.num_items = 0
        self.read_bytes = 0
        self.num_rows = 0
        self.num_skipped = len(source.skipped)
        shown = sys.stderr.isatty() if shown is None else shown
        self._live = (
            Live(console=Console(stderr=True), get_renderable=self._line, refresh_per_second=4) if shown else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def pass_over(self, task: Task) -> None:
        """Count a task that an earlier run has done."""
        self._items_before += task.num_items
        self.num_items += task.num_items
        self.read_bytes += task.num_bytes

    def add(self, task: Task, loaded: Loaded) -> None:
        """Count a task that was written."""
        self.num_items += task.num_items
        self.read_bytes += task.num_bytes
        self.num_rows += loaded.num_rows
        self.num_skipped += len(loaded.skipped)

    @property
    def fraction(self) -> float | None:
        """Part that is done, 0 to 1; None while the total is unknown."""
        if self._num_items:
            return min(1.0, self.num_items / self._num_items)
        return min(1.0, self.read_bytes / self._num_bytes) if self._num_bytes else None

    def text(self, elapsed_s: float) -> str:
        """Rate, bytes, time left and skipped inputs after ``elapsed_s`` seconds."""
        elapsed_s = max(elapsed_s, 1e-9)
        done = self.num_items - self._items_before
        parts = [f"{self.num_items:,}" + (f" of {self._num_items:,}" if self._num_items else "")]
        parts.append(f"{done / elapsed_s:,.0f}/s")
        if self.read_bytes:
            parts.append(f"{decimal(self.read_bytes)} read")
        if done and self._num_items:
            parts.append(f"{duration((self._num_items - self.num_items) * elapsed_s / done)} left")
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} skipped")
        return ", ".join(parts)

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=self.fraction or 0.0, width=30, pulse=self.fraction is None)
        line.add_row("converting", bar, self.text(time.perf_counter() - self._started))
        return line


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
