"""A random order of any number of rows that is computed where it is needed, not stored.

Up to `TABLE_ROWS` rows the order is NumPy's own permutation: exactly uniform and free to look up. Above, it is a
keyed bijection: a Feistel network over the mixed-radix digits of the row number (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002), with cycle walking for the few values past the end. It costs tens of
nanoseconds a row at any size, and no memory.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

import numpy as np
import numpy.typing as npt

TABLE_ROWS = 1 << 21
"""Up to this many rows the order is a table (16 MiB of int64); above, it is computed."""

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
        self._round_keys = np.random.SeedSequence(seed_from(key)).generate_state(_ROUNDS, np.uint64)

    def __len__(self) -> int:
        return self.size

    def take(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Rows at the positions ``start`` to ``stop - 1`` of the order; int64, to be read only."""
        if self._table is not None:
            return self._table[start:stop]
        return self.at(np.arange(start, stop))

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows at any positions of the order."""
        if self._table is not None:
            return self._table[positions]
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        radix_low = np.uint64(self._radix_low)
        high, low = np.divmod(values, radix_low)
        for index, key in enumerate(self._round_keys):
            if index % 2 == 0:
                _add_modulo(high, _mix(low, key), self._radix_high)
            else:
                _add_modulo(low, _mix(high, key), self._radix_low)
        high *= radix_low
        high += low
        return high


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """32 well mixed bits of each value: a multiply-xorshift hash, as in SplitMix64."""
    mixed = values + key
    mixed *= np.uint64(_GOLDEN)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_GOLDEN)
    mixed >>= np.uint64(32)
    return mixed


def _add_modulo(digits: npt.NDArray[np.uint64], mixed: npt.NDArray[np.uint64], radix: int) -> None:
    """``digits = (digits + mixed scaled to the radix) % radix`` in place, without a division."""
    mixed *= np.uint64(radix)
    mixed >>= np.uint64(32)
    digits += mixed
    # Unsigned wrap-around makes the reduced value huge where nothing is to be reduced, so the smaller one is right.
    np.minimum(digits, digits - np.uint64(radix), out=digits)
