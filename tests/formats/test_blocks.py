"""Blocks: decoded once, bounded in bytes, ahead of need, and errors at the read that needs them."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import Counter

import numpy as np
import pytest

from lightning_fastio.formats.blocks import BlockCache, copy_rows, split_by_block, split_evenly


class Decoder:
    """Blocks of ten bytes; counts how often each is decoded, and can hold every decode until told."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.threads: dict[int, str] = {}
        self.started = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()

    def __call__(self, key: int) -> bytes:
        self.counts[key] += 1
        self.threads[key] = threading.current_thread().name
        self.started.release()
        assert self.go.wait(30)
        if key < 0:
            raise ValueError(f"block {key} is damaged")
        return b"%10d" % key


def make(max_blocks: int, num_threads: int = 2) -> tuple[Decoder, BlockCache[int, bytes]]:
    decoder = Decoder()
    return decoder, BlockCache(decoder, lambda key: 10, max_bytes=10 * max_blocks, num_threads=num_threads)


def decode_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fastio-decode")}


def test_each_block_decodes_once_and_is_kept():
    decoder, cache = make(4)
    for _ in range(3):
        assert dict(cache.read([(key, 1) for key in range(4)])) == {key: b"%10d" % key for key in range(4)}
    assert decoder.counts == {0: 1, 1: 1, 2: 1, 3: 1}
    cache.close()


def test_many_threads_that_want_one_block_decode_it_once():
    decoder, cache = make(2)
    decoder.go.clear()
    values: list[bytes] = []
    threads = [threading.Thread(target=lambda: values.append(cache.get(7))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert decoder.started.acquire(timeout=30)
    decoder.go.set()
    for thread in threads:
        thread.join()
    assert values == [b"%10d" % 7] * 8
    assert decoder.counts[7] == 1
    cache.close()


def test_least_recently_used_goes_first():
    decoder, cache = make(2)
    for key in (1, 2, 1, 3, 1, 2):
        cache.get(key)
    assert decoder.counts == {1: 1, 2: 2, 3: 1}


def test_announced_blocks_decode_in_threads_and_stay_until_their_rows_are_read():
    decoder, cache = make(3)
    cache.announce([(0, 2), (1, 2)])
    for _ in range(2):
        assert decoder.started.acquire(timeout=30)
    # Blocks that nobody announced come and go through what room is left.
    for key in range(10, 13):
        assert cache.get(key) == b"%10d" % key
    assert [cache.get(0), cache.get(1)] == [b"%10d" % 0, b"%10d" % 1]
    for key in range(10, 13):
        cache.get(key)
    assert [cache.get(0), cache.get(1)] == [b"%10d" % 0, b"%10d" % 1]
    assert decoder.counts[0] == decoder.counts[1] == 1
    assert {decoder.threads[0][:13], decoder.threads[1][:13]} == {"fastio-decode"}
    # All announced rows are read: now they go as any other.
    for key in range(30, 33):
        cache.get(key)
    cache.get(0)
    assert decoder.counts[0] == 2
    cache.close()


def test_nothing_is_decoded_ahead_that_the_cache_cannot_hold():
    decoder, cache = make(3)
    cache.announce([(key, 1) for key in range(20)])
    for _ in range(3):
        assert decoder.started.acquire(timeout=30)
    cache.close()  # Joins the threads, so that no decode can be under way.
    assert decoder.counts == {0: 1, 1: 1, 2: 1}


def test_room_that_comes_free_is_used():
    decoder, cache = make(2, num_threads=1)
    cache.announce([(key, 1) for key in (0, 1)])
    for _ in range(2):
        assert decoder.started.acquire(timeout=30)
    cache.announce([(2, 1), (3, 1)])
    assert cache.get(0) == b"%10d" % 0
    assert decoder.started.acquire(timeout=30)
    assert decoder.counts == {0: 1, 1: 1, 2: 1}
    cache.close()


def test_a_read_shares_its_blocks_with_the_threads():
    decoder, cache = make(8, num_threads=1)
    decoder.go.clear()
    read: dict[int, bytes] = {}
    thread = threading.Thread(target=lambda: read.update(cache.read([(key, 1) for key in range(2)])), name="reader")
    thread.start()
    for _ in range(2):
        assert decoder.started.acquire(timeout=30)
    decoder.go.set()
    thread.join()
    assert read == {0: b"%10d" % 0, 1: b"%10d" % 1}
    assert decoder.threads == {0: "reader", 1: "fastio-decode-0"}
    cache.close()


def test_errors_surface_at_the_read_that_needs_the_block():
    decoder, cache = make(4)
    cache.announce([(-1, 1), (1, 1)])
    assert decoder.started.acquire(timeout=30)
    assert cache.get(1) == b"%10d" % 1
    for _ in range(2):
        with pytest.raises(ValueError, match="block -1 is damaged"):
            cache.get(-1)
    assert cache.get(2) == b"%10d" % 2
    cache.close()


def test_announcements_that_are_never_read_do_not_fill_the_cache_for_ever():
    decoder, cache = make(4, num_threads=0)
    for key in range(4):
        cache.get(key)
    cache.announce([(key, 1000) for key in range(4)])
    for key in range(100, 130):
        cache.get(key)
    decoder.counts.clear()
    for _ in range(3):
        for key in (200, 201):
            cache.get(key)
    assert decoder.counts == {200: 1, 201: 1}


def test_room_is_made_before_a_block_is_decoded():
    alive: set[int] = set()
    most: list[int] = []

    class Block:
        def __init__(self) -> None:
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    cache: BlockCache[int, Block] = BlockCache(lambda key: Block(), lambda key: 100, max_bytes=400, num_threads=0)
    for key in range(20):
        cache.get(key)
    assert max(most) == 4
    cache.close()


def test_one_block_larger_than_the_bound_is_kept():
    decoder = Decoder()
    cache: BlockCache[int, bytes] = BlockCache(decoder, lambda key: 1000, max_bytes=10)
    cache.announce([(1, 5)])
    for _ in range(5):
        cache.get(1)
    assert decoder.counts == {1: 1}
    cache.close()


def test_close_ends_the_threads_and_a_later_read_starts_afresh():
    others = decode_threads()
    decoder, cache = make(4)
    cache.announce([(0, 1), (1, 1)])
    cache.get(0)
    cache.close()
    cache.close()
    assert decode_threads() <= others
    assert cache.get(0) == b"%10d" % 0
    assert decoder.counts[0] == 2
    cache.close()


def test_copies_are_empty():
    decode, size_of = str, len
    cache: BlockCache[str, str] = BlockCache(decode, size_of, max_bytes=100)
    cache.get("abc")
    for twin in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert twin._stores == {}
        assert twin.get("abc") == "abc"
        assert (twin.max_bytes, twin.num_threads) == (100, cache.num_threads)


def test_a_forked_child_decodes_for_itself_while_the_parent_is_decoding():
    decoder, cache = make(4)
    cache.get(5)
    decoder.go.clear()
    cache.announce([(1, 1)])
    assert decoder.started.acquire(timeout=30)
    assert decoder.started.acquire(timeout=30)
    pid = os.fork()
    if pid == 0:
        decoder.go.set()
        right = cache.get(1) == b"%10d" % 1 and cache.get(5) == b"%10d" % 5 and decoder.counts[5] == 2
        os._exit(0 if right else 1)
    decoder.go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cache.get(1) == b"%10d" % 1
    assert decoder.counts == {5: 1, 1: 1}
    cache.close()


def test_threads_under_load_get_right_values():
    others = decode_threads()
    _, cache = make(5)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            keys = rng.choice(12, 4, replace=False).tolist()
            cache.announce([(key, 1) for key in rng.choice(12, 3, replace=False).tolist()])
            got = dict(cache.read([(key, 1) for key in keys]))
            wrong.extend(key for key in keys if got[key] != b"%10d" % key)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert wrong == []
    assert decode_threads() <= others


@pytest.mark.parametrize("num_rows", [0, 1, 7, 500])
@pytest.mark.parametrize("num_columns", [3, 1000])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_are_split_by_block_and_put_in_place(num_rows, num_columns, is_sorted):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 100, (60, num_columns))
    bounds = np.array([0, 1, 20, 24, 60])
    rows = rng.integers(0, 60, num_rows)
    rows = np.sort(rows) if is_sorted else rows
    out = np.full((num_rows, num_columns), -1)
    for block, positions, local in split_by_block(rows, bounds):
        copy_rows(data[bounds[block] : bounds[block + 1]], local, out, positions)
    np.testing.assert_array_equal(out, data[rows])


def test_blocks_of_one_length_are_split_alike():
    rows = np.random.default_rng(0).integers(0, 60, 100)
    bounds = np.array([0, 7, 14, 21, 28, 35, 42, 49, 56, 60])
    for even, uneven in zip(split_evenly(rows, 7), split_by_block(rows, bounds), strict=True):
        assert even.block == uneven.block
        np.testing.assert_array_equal(even.positions, uneven.positions)
        np.testing.assert_array_equal(even.rows, uneven.rows)
