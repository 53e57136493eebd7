"""Copies of whole batches to a device, on a stream of their own, beside the training step.

Lifetimes of streams and memory, in one place
---------------------------------------------
1. The source. Tensors that are not pinned are pinned first, in the thread that copies: a copy from pageable memory
   would block. torch's pinned memory is handed out again only after the copies that used it are done, but other
   pinned memory (registered buffers, memory maps) knows nothing of streams. So a source is held until the event
   after its copy has passed on the device.
2. The copy. It is allocated and filled on the copy stream, and an event is recorded after it. What already lies on
   the device was made by the current stream of the copying thread, which the copy stream then waits for.
3. The consumer. Its stream waits for that event; the host does not. Its stream is recorded on every tensor of the
   batch, so that memory which the consumer drops is not given to a later copy before the work that the consumer has
   queued is done. That holds for batches that the user keeps for longer, too, which a ring of fixed buffers could
   not promise. For the same reason no address comes back on purpose: a CUDA graph needs inputs of its own.
4. A batch that is never consumed (early stop) is freed into the pool of the copy stream, in whose order it is reused.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Protocol

import torch
from lightning_utilities.core.apply_func import apply_to_collection


class Event(Protocol):
    """A mark in a stream, as `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Put the mark at the present end of a stream."""

    def query(self) -> bool:
        """Whether the device has passed the mark; never waits."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to another one, both passed."""


class Backend(Protocol):
    """What staging needs of an accelerator. Tests put a recording double in its place."""

    device: torch.device

    def bind_thread(self) -> None:
        """Make the device the current one of the calling thread."""

    def copy_stream(self) -> AbstractContextManager[Any]:
        """Context in which the copy stream is the current one."""

    def current_stream(self) -> Any:
        """The current stream of the calling thread."""

    def event(self) -> Event:
        """A new event that takes the time."""

    def wait_event(self, stream: Any, event: Event) -> None:
        """Let a stream, not the host, wait for an event."""

    def record_stream(self, value: Any, stream: Any) -> None:
        """Tell the allocator that a stream uses a tensor."""

    def pin(self, value: Any) -> Any:
        """A pinned copy of a tensor in pageable memory."""


class CudaBackend:
    """CUDA and ROCm."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def copy_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def wait_event(self, stream: Any, event: Event) -> None:
        stream.wait_event(event)

    def record_stream(self, value: Any, stream: Any) -> None:
        value.record_stream(stream)

    def pin(self, value: Any) -> Any:
        return value.pin_memory()


@cache
def open_backend(device: torch.device) -> Backend | None:
    """The accelerator behind a device, or None where batches are moved when they are delivered (CPU, MPS, XLA).

    There is one copy stream for each device, as memory that was allocated on one stream is no use to another.
    """
    return CudaBackend(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """How long the device spent on the copy of one batch."""

    copy_s: float
    """Seconds of the copy itself."""
    stall_s: float
    """Seconds that the consumer's stream stood still for it."""


class Staged:
    """A batch under way to the device. Opaque, so that whatever walks over batches passes it by."""

    __slots__ = ("_batch", "_end", "_stager", "_start", "_tensors", "nbytes")

    def __init__(self, stager: Stager, batch: Any, start: Event, end: Event) -> None:
        self._stager, self._batch, self._start, self._end = stager, batch, start, end
        # Looked for here, in the thread that copies, to spare the thread that trains.
        self._tensors = list(tensors_in(batch))
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)
        """Bytes that the batch takes up on the device."""

    def ready(self) -> Any:
        """The batch, once, as `Stager.ready` gives it."""
        return self._stager.ready(self)


Transfer = Callable[[Any], Any]
"""Takes a batch in pinned memory and returns it on the device."""


class Stager:
    """Copies batches ahead: `stage` in the thread that fetches them, `ready` in the thread that uses them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.num_pinned = 0
        """Batches that came in pageable memory."""
        self._sources: deque[tuple[Event, Any, list[torch.Tensor]]] = deque()
        self._timed: deque[tuple[Event, Event, Event, Event]] = deque()

    def stage(self, batch: Any, transfer: Transfer | None = None) -> Staged:
        """Start the copy of a batch. Does not wait for it.

        Args:
            batch: Any nesting of tensors, objects with ``to(device)``, and other things, which stay as they are.
            transfer: Moves the batch instead of `move_batch`.
        """
        backend = self.backend
        self._release_sources()
        source = self._pin(batch)
        # Objects that move themselves in place, as PyG's do, no longer refer to these afterwards.
        memory = list(tensors_in(source))
        on_device = any(tensor.device == backend.device for tensor in memory)
        made = backend.event() if on_device else None
        if made is not None:
            made.record(backend.current_stream())
        start, end = backend.event(), backend.event()
        with backend.copy_stream():
            stream = backend.current_stream()
            if made is not None:
                backend.wait_event(stream, made)
            start.record(stream)
            moved = move_batch(source, backend.device) if transfer is None else transfer(source)
            end.record(stream)
        self._sources.append((end, source, memory))
        return Staged(self, moved, start, end)

    def ready(self, staged: Staged) -> Any:
        """The batch, safe to use on the current stream of the calling thread. Does not block the host."""
        backend = self.backend
        stream = backend.current_stream()
        asked, went_on = backend.event(), backend.event()
        asked.record(stream)
        backend.wait_event(stream, staged._end)
        went_on.record(stream)
        for tensor in staged._tensors:
            if tensor.device == backend.device:
                backend.record_stream(tensor, stream)
        staged._tensors = []
        self._timed.append((staged._start, staged._end, asked, went_on))
        batch, staged._batch = staged._batch, None
        return batch

    def finished_copies(self) -> Iterator[CopyTimes]:
        """Times of the batches that `ready` gave out and the device has reached, in order, each once."""
        while self._timed and self._timed[0][-1].query():
            start, end, asked, went_on = self._timed.popleft()
            yield CopyTimes(start.elapsed_time(end) / 1e3, asked.elapsed_time(went_on) / 1e3)

    def forget(self) -> None:
        """Give up the times of copies that are not finished."""
        self._timed.clear()

    def _release_sources(self) -> None:
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()

    def _pin(self, batch: Any) -> Any:
        num_pinned = 0

        def pin(value: Any) -> Any:
            nonlocal num_pinned
            if not _can_pin(value):
                return value
            num_pinned += 1
            pinned = self.backend.pin(value)
            return value if pinned is None else pinned

        pinned = apply_to_collection(batch, _Movable, pin)
        self.num_pinned += num_pinned > 0
        return pinned


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move all tensors and objects with ``to(device)``; strings, numbers, None and containers stay as they are."""
    # Copies to MPS that do not block are not safe (pytorch #83015).
    non_blocking = device.type not in ("cpu", "mps")

    def move(value: Any) -> Any:
        if isinstance(value, type):
            return value
        moved = value.to(device, non_blocking=True) if non_blocking and _takes_non_blocking(value) else value.to(device)
        # Some classes move themselves and return nothing.
        return value if moved is None else moved

    return apply_to_collection(batch, _Movable, move)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor with memory of its own in a batch, in order, also those in the attributes of objects."""
    seen: set[int] = set()
    waiting = deque([batch])
    while waiting:
        value = waiting.popleft()
        if isinstance(value, torch.Tensor):
            yield from _dense_parts(value)
        elif id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_children(value))


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, type):
        # A class may be a dataclass, and have a method `to`; PyG keeps such in its batches.
        return ()
    if isinstance(value, Mapping):
        # A lazy stack of tensordict makes its values anew whenever it is asked; its memory is that of its parts.
        parts: Iterable[Any] | None = getattr(value, "tensordicts", None)
        return value.values() if parts is None else parts
    if isinstance(value, (list, tuple)):
        return value
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return vars(value).values() if isinstance(value, _Movable) and hasattr(value, "__dict__") else ()


def _dense_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """What a sparse or nested tensor consists of; any other tensor itself."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


class _Movable(ABC):  # noqa: B024
    """Whatever has a method ``to``."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return callable(getattr(subclass, "to", None))


def _can_pin(value: Any) -> bool:
    """Whether a value lies in pageable memory and can be brought into pinned memory."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout is torch.strided and not value.is_pinned()
    # What DataLoader(pin_memory=True) asks of objects as well. Those of tensordict and PyG cannot say if they are.
    if isinstance(value, type) or not callable(getattr(value, "pin_memory", None)):
        return False
    if callable(getattr(value, "is_pinned", None)):
        return not value.is_pinned()
    return any(_can_pin(tensor) for tensor in tensors_in(value))


def _takes_non_blocking(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    try:
        parameters = inspect.signature(value.to).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
