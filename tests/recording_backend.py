"""An accelerator that only exists in memory, and writes down in which order it is used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


class RecordingEvent:
    """An event that has passed once the test says so; its times are the numbers of its recordings."""

    def __init__(self, backend: RecordingBackend, number: int) -> None:
        self.backend, self.number = backend, number

    def __repr__(self) -> str:
        return f"event {self.number}"

    def record(self, stream: Any) -> None:
        self.backend.calls.append(("record", self.number, stream))

    def query(self) -> bool:
        return self.backend.all_passed

    def elapsed_time(self, end: RecordingEvent) -> float:
        return 10.0 * (end.number - self.number)


class RecordingBackend:
    """Stands in for CUDA. It has no way to wait on the host, so whoever tries fails."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.calls: list[tuple[Any, ...]] = []
        self.recorded: list[torch.Tensor] = []
        """Tensors in the order in which they were recorded on a stream."""
        self.pinned: list[Any] = []
        self.bound: list[str] = []
        """Names of the threads that were bound to the device."""
        self.all_passed = False
        self._num_events = 0
        self._local = threading.local()

    def bind_thread(self) -> None:
        self.bound.append(threading.current_thread().name)

    @contextlib.contextmanager
    def copy_stream(self) -> Iterator[None]:
        self._local.stream = "copy"
        try:
            yield
        finally:
            self._local.stream = "compute"

    def current_stream(self) -> Any:
        return getattr(self._local, "stream", "compute")

    def event(self) -> RecordingEvent:
        self._num_events += 1
        return RecordingEvent(self, self._num_events)

    def wait_event(self, stream: Any, event: RecordingEvent) -> None:
        self.calls.append(("wait", event.number, stream))

    def record_stream(self, value: torch.Tensor, stream: Any) -> None:
        self.calls.append(("record_stream", stream))
        self.recorded.append(value)

    def pin(self, value: Any) -> Any:
        self.pinned.append(value)
        return value.clone()
