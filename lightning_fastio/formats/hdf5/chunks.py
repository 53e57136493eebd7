"""Chunks without the HDF5 library: where they lie in the file, and how their filters are undone.

The library decodes one chunk at a time under its lock. Here each thread reads raw chunks with ``pread`` and undoes
their filters itself, with zlib and NumPy, or faster with isal and numcodecs where they are installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import CorruptFileError

Decoder: TypeAlias = Callable[[Any, int], Any]
"""Undoes one filter: the encoded bytes and the size of the whole chunk, to the decoded bytes."""

GZIP, SHUFFLE, FLETCHER32, BLOSC, LZ4, ZSTD = 1, 2, 3, 32001, 32004, 32015

MAX_CHECKSUM_BYTES = 64
"""Bytes that filters may have added to a chunk before it was compressed."""

MAX_CELLS = 1 << 24
"""Chunks that a shape may have room for, where only few of them are stored."""


@dataclass(frozen=True)
class Filter:
    """One filter of a dataset's pipeline."""

    number: int
    """Registered filter id."""
    values: tuple[int, ...]
    """Client data of the filter."""
    name: str
    """Name in the file."""


def filters_of(dataset: Any) -> tuple[Filter, ...]:
    """The filters of a dataset, in the order in which its writer applied them."""
    plist = dataset.id.get_create_plist()
    stored = (plist.get_filter(position) for position in range(plist.get_nfilters()))
    return tuple(Filter(number, tuple(values), name.decode(errors="replace")) for number, _, values, name in stored)


@dataclass(frozen=True)
class ChunkIndex:
    """Where the chunks of a dataset lie. Arrays have one row for each band of chunks along the first axis."""

    shape: tuple[int, ...]
    """Shape of the dataset."""
    chunk: tuple[int, ...]
    """Shape of a chunk."""
    dtype: np.dtype[Any]
    """Stored type."""
    filters: tuple[Filter, ...]
    offsets: npt.NDArray[np.int64]
    """Byte offset in the file, shape ``(num_bands, chunks_per_band)``; -1 where the chunk was never written."""
    sizes: npt.NDArray[np.int64]
    """Stored bytes."""
    masks: npt.NDArray[np.uint32]
    """Bit ``i`` is set where filter ``i`` was skipped."""

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of one chunk."""
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def covers_sample(self) -> bool:
        """Whether each row lies in one piece: chunks are cut along the first axis only."""
        return self.chunk[1:] == self.shape[1:]

    def is_partial(self, band: int, position: int) -> bool:
        """Whether the chunk reaches beyond the dataset's shape."""
        starts = self.starts(band, position)
        return any(start + size > whole for start, size, whole in zip(starts, self.chunk, self.shape, strict=True))

    def starts(self, band: int, position: int) -> tuple[int, ...]:
        """Index of the first element of a chunk."""
        grid = [-(-whole // size) for whole, size in zip(self.shape[1:], self.chunk[1:], strict=True)]
        cells = (band, *(int(cell) for cell in np.unravel_index(position, grid))) if grid else (band,)
        return tuple(cell * size for cell, size in zip(cells, self.chunk, strict=True))


def index_chunks(dataset: Any, file_size: int) -> ChunkIndex | str:
    """The chunk index of a dataset, or the reason why only the library can be trusted to find its chunks."""
    shape, chunk = dataset.shape, dataset.chunks
    if [length is None for length in dataset.maxshape].count(True) == 1 and dataset.maxshape[0] is not None:
        # Files of the 1.10 format then report their chunks at wrong positions (HDF5 1.14.4, 2.0.0).
        return "HDF5 misplaces chunks where one axis is unlimited and it is not the first"
    grid = [-(-whole // size) for whole, size in zip(shape, chunk, strict=True)]
    if prod(grid) > max(MAX_CELLS, 4 * dataset.id.get_num_chunks()):
        return "almost no chunk is stored"
    offsets = np.full(prod(grid), -1, np.int64)
    sizes = np.zeros(prod(grid), np.int64)
    masks = np.zeros(prod(grid), np.uint32)
    weights = [prod(grid[axis + 1 :]) for axis in range(len(grid))]
    problems: list[str] = []

    def note(stored: Any) -> bool | None:
        cell = 0
        for start, size, whole, weight in zip(stored.chunk_offset, chunk, shape, weights, strict=True):
            if start % size or not 0 <= start < whole:
                problems.append(f"chunk at {stored.chunk_offset} is outside the shape or off the grid")
                return True
            cell += start // size * weight
        if offsets[cell] != -1 or stored.byte_offset < 0 or stored.byte_offset + stored.size > file_size:
            problems.append(f"chunk at {stored.chunk_offset} is listed twice or lies outside the file")
            return True
        offsets[cell], sizes[cell], masks[cell] = stored.byte_offset, stored.size, stored.filter_mask
        return None

    if prod(grid) and dataset.id.get_num_chunks():
        dataset.id.chunk_iter(note)
    if problems:
        return problems[0]
    bands = (grid[0], prod(grid[1:]))
    return ChunkIndex(
        shape,
        chunk,
        dataset.dtype,
        filters_of(dataset),
        offsets.reshape(bands),
        sizes.reshape(bands),
        masks.reshape(bands),
    )


def decoders_for(filters: Sequence[Filter]) -> list[Decoder] | None:
    """What undoes each filter, in the order of the pipeline; None if one of them needs the library."""
    makers = {GZIP: _gzip, SHUFFLE: _shuffle, FLETCHER32: _fletcher32, BLOSC: _blosc, LZ4: _lz4, ZSTD: _zstd}
    decoders = [makers[filter_.number](filter_) if filter_.number in makers else None for filter_ in filters]
    return [decoder for decoder in decoders if decoder is not None] if None not in decoders else None


def decode_chunk(data: Any, mask: int, decoders: Sequence[Decoder], num_bytes: int) -> Any:
    """Undo the filters of one chunk.

    Args:
        data: The bytes as stored.
        mask: Bit ``i`` is set where filter ``i`` was skipped.
        decoders: From `decoders_for`.
        num_bytes: Size of the decoded chunk.

    Raises:
        CorruptFileError: The bytes do not decode to a chunk.
    """
    for position in reversed(range(len(decoders))):
        if not mask >> position & 1:
            try:
                data = decoders[position](data, num_bytes)
            except CorruptFileError:
                raise
            except Exception as error:  # Each codec has exceptions of its own.
                raise CorruptFileError(f"its filters cannot be undone: {error}") from error
    if len(data) != num_bytes:
        raise CorruptFileError(f"it decodes to {len(data)} bytes instead of {num_bytes}")
    return data


def read_exactly(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Bytes of a file at an offset.

    Raises:
        CorruptFileError: The file ends before.
    """
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(data), offset + len(data))
        if not more:
            raise CorruptFileError(f"the file ends at byte {offset + len(data)}, inside the chunk")
        data += more
    return data


def _gzip(_: Filter) -> Decoder:
    try:
        from isal.isal_zlib import decompressobj
    except ImportError:
        from zlib import decompressobj  # type: ignore[assignment]

    def inflate(data: Any, num_bytes: int) -> bytes:
        # Bounded, so that a damaged stream cannot inflate without end.
        stream = decompressobj()
        decoded: bytes = stream.decompress(data, num_bytes + MAX_CHECKSUM_BYTES)
        if not stream.eof:
            raise CorruptFileError("its gzip stream is incomplete")
        return decoded

    return inflate


def _shuffle(filter_: Filter) -> Decoder:
    size = filter_.values[0] if filter_.values else 1
    try:
        from numcodecs import Shuffle
    except ImportError:
        return lambda data, _: _unshuffle(data, size)
    codec = Shuffle(size)

    def unshuffle(data: Any, _: int) -> Any:
        whole = len(data) % size == 0
        return codec.decode(data, np.empty(len(data), np.uint8)) if whole else _unshuffle(data, size)

    return unshuffle if size > 1 else lambda data, _: data


def _unshuffle(data: Any, size: int) -> npt.NDArray[np.uint8]:
    stored = np.frombuffer(data, np.uint8)
    whole = len(stored) // size * size
    out = np.empty_like(stored)
    out[:whole].reshape(-1, size)[...] = stored[:whole].reshape(size, -1).T
    out[whole:] = stored[whole:]  # Bytes after the last whole element are not shuffled.
    return out


def _fletcher32(_: Filter) -> Decoder:
    try:
        from numcodecs import Fletcher32
    except ImportError:
        return _check_fletcher32
    codec = Fletcher32()

    def check(data: Any, num_bytes: int) -> Any:
        try:
            return codec.decode(data)
        except (RuntimeError, ValueError):  # Damaged, or with the checksum of an old library.
            return _check_fletcher32(data, num_bytes)

    return check


def _check_fletcher32(data: Any, _: int) -> Any:
    if len(data) < 4:
        raise CorruptFileError("it is too short for its fletcher32 checksum")
    content, stored = memoryview(data)[:-4], int.from_bytes(memoryview(data)[-4:], "little")
    sums = fletcher32(content)
    # HDF5 1.6.2 and older swapped the bytes of each half on little-endian machines.
    swapped = (sums & 0x00FF00FF) << 8 | (sums & 0xFF00FF00) >> 8
    if stored not in (sums, swapped):
        raise CorruptFileError(f"its fletcher32 checksum is {stored:08x}, but its content has {sums:08x}")
    return content


def fletcher32(data: Any) -> int:
    """HDF5's checksum: sums of big-endian 16-bit words, and of those sums, in ones' complement."""
    padded = data if len(data) % 2 == 0 else bytes(data) + b"\0"
    words = np.frombuffer(padded, ">u2").astype(np.uint64)
    weights = np.arange(len(words), 0, -1, dtype=np.uint64) % np.uint64(65535)
    return _fold(int((words * weights).sum())) << 16 | _fold(int(words.sum()))


def _fold(total: int) -> int:
    """A sum in ones' complement: zero only if nothing but zeros was added."""
    return (total - 1) % 65535 + 1 if total else 0


def _blosc(filter_: Filter) -> Decoder | None:
    try:
        from numcodecs import blosc
    except ImportError:
        return None
    return lambda data, _: blosc.decompress(data)


def _zstd(filter_: Filter) -> Decoder | None:
    try:
        from numcodecs import zstd
    except ImportError:
        return None
    return lambda data, _: zstd.decompress(data)


def _lz4(_: Filter) -> Decoder | None:
    try:
        from numcodecs import lz4
    except ImportError:
        return None

    def decompress(data: Any, num_chunk_bytes: int) -> bytes:
        # Big-endian: size of the whole and of a block, then each block after its stored size; equal sizes mean a copy.
        view = memoryview(data)
        total, block_bytes = int.from_bytes(view[:8], "big"), int.from_bytes(view[8:12], "big")
        if block_bytes == 0 or total > num_chunk_bytes + MAX_CHECKSUM_BYTES:
            raise CorruptFileError(f"its lz4 header speaks of {total} bytes in blocks of {block_bytes}")
        pieces, start = [], 12
        for done in range(0, total, block_bytes):
            num_bytes = min(block_bytes, total - done)
            stop = start + 4 + int.from_bytes(view[start : start + 4], "big")
            block = view[start + 4 : stop]
            is_copy = len(block) == num_bytes
            pieces.append(block if is_copy else lz4.decompress(num_bytes.to_bytes(4, "little") + bytes(block)))
            start = stop
        return b"".join(pieces)

    return decompress
