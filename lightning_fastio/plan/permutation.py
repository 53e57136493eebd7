"""A random order of any number of rows that is computed where it is needed, not stored.

Up to `TABLE_ROWS` rows the order is NumPy's own permutation: exactly uniform and free to look up. Above, it is a
keyed bijection: a Feistel network over the mixed-radix digits of the row number (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002), with cycle walking for the few values past the end. It costs tens of
nanoseconds a row at any size, and no memory.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

TABLE_ROWS = 1 << 18
"""Up to this many rows the order is a table (2 MiB of int64); above, it is computed."""

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def seed_from(*keys: int) -> int:
    """One 64-bit seed out of several integers, such as (seed, epoch, window)."""
    return int.from_bytes(blake2b(repr(keys).encode(), digest_size=8).digest(), "little")


class Permutation:
    """A random permutation of ``range(size)``: a function of ``size`` and ``key`` alone."""

    def __init__(self, size: int, key: int, *, table_rows: int = TABLE_ROWS) -> None:
        """Prepare the order.

        Args:
            size: Number of rows.
            key: Any integer; equal keys give equal orders.
            table_rows: Sizes up to this one are held as a table.
        """
        self.size = size
        self._table: npt.NDArray[np.int64] | None = None
        if size <= table_rows:
            self._table = np.random.Generator(np.random.PCG64(seed_from(key))).permutation(size)
            return
        # Digits of value = high * radix_low + low. The grid is at most one part in sqrt(size) larger than size,
        # so that hardly any value has to walk on.
        self._radix_high = isqrt(size - 1) + 1
        self._radix_low = -(-size // self._radix_high)
        # Half the word, four times the speed: NumPy multiplies 32-bit words with vector instructions.
        self._word: type[np.unsignedinteger[Any]] = (
            np.uint32 if self._radix_high * self._radix_low < 2**32 else np.uint64
        )
        self._round_keys = np.random.SeedSequence(seed_from(key)).generate_state(_ROUNDS, self._word)

    def __len__(self) -> int:
        return self.size

    @property
    def is_table(self) -> bool:
        """Whether the order is stored, so that any piece of it costs nothing."""
        return self._table is not None

    def take(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Rows at the positions ``start`` to ``stop - 1`` of the order; int64, to be read only."""
        if self._table is not None:
            return self._table[start:stop]
        return self.at(np.arange(start, stop))

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows at any positions of the order."""
        if self._table is not None:
            return self._table[positions]
        values = self._encrypt(positions.astype(self._word))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: Words) -> Words:
        high: Words = values // self._word(self._radix_low)
        low = values - high * self._word(self._radix_low)
        for index, key in enumerate(self._round_keys):
            if index % 2 == 0:
                self._add_mixed(high, low, key, self._radix_high)
            else:
                self._add_mixed(low, high, key, self._radix_low)
        high *= self._word(self._radix_low)
        high += low
        return high

    def _add_mixed(self, digits: Words, source: Words, key: np.unsignedinteger[Any], radix: int) -> None:
        """``digits = (digits + hash(source) scaled to the radix) % radix`` in place, without a division."""
        half = self._word(4 * self._word(0).itemsize)
        multiplier = self._word(_GOLDEN >> (64 - 2 * int(half)) | 1)
        mixed = source + key
        mixed *= multiplier
        mixed ^= mixed >> half
        mixed *= multiplier
        mixed >>= half
        mixed *= self._word(radix)
        mixed >>= half
        digits += mixed
        # Unsigned wrap-around makes the reduced value huge where nothing is to be reduced, so the smaller one is right.
        np.subtract(digits, self._word(radix), out=mixed)
        np.minimum(digits, mixed, out=digits)
