"""The block pool of a stage whose layers all have windows: what they pass comes free."""

from __future__ import annotations

import pytest

from langchain_pshard.core.errors import CapacityError, StateLostError
from langchain_pshard.core.kv import BLOCK_TOKENS
from tests.support.block_pool import NUM_BLOCKS, Pool, compute, held, key, make_pool, text
from workers.blocks import BlockPool


class WindowedPool(Pool):
    """The same where windows pass blocks: a stream of up to eight blocks holds three."""

    window = 20
    max_slice_tokens = 40
    max_blocks = 3


TestWindowedPool = WindowedPool.TestCase


def windowed(num_blocks: int = NUM_BLOCKS) -> BlockPool:
    """A stream holds three blocks at most: 19 positions before a slice, 40 in it, from anywhere in a block."""
    return make_pool(num_blocks, window=20, max_slice_tokens=40)


def test_a_stream_is_promised_what_it_can_hold_at_once() -> None:
    pool = windowed()
    assert pool.max_stream_tokens == 96
    for number in range(4):
        assert pool.take(key(number), 10_000) == 0
    with pytest.raises(CapacityError, match=r"a stream of 10000 positions needs 96 positions \(6.0 MiB\) of KV; 0 positions"):
        pool.take(key(5), 10_000)
    for start in range(0, 10_000, 40):
        for number in range(4):
            pool.begin_write(key(number), start, 40)
            assert len(held(pool.table(key(number)))) <= 3
    assert pool.used_tokens == NUM_BLOCKS * BLOCK_TOKENS
    assert make_pool().max_stream_tokens is None


def test_what_the_window_has_passed_comes_free_and_its_places_lead_to_a_block_of_the_stream() -> None:
    pool = windowed()
    pool.take(key(1), 400)
    for start in (0, 40, 80, 120):
        pool.begin_write(key(1), start, 40)
    table = pool.table(key(1))
    assert (table.num_passed, table.num_taken) == (2, 5)
    assert table.blocks[:3].tolist() == [table.blocks[2]] * 3
    assert len(set(held(table))) == 3


def test_a_rewind_behind_the_window_has_lost_state_unless_it_begins_anew() -> None:
    pool = windowed()
    pool.take(key(1), 400)
    for start in range(0, 160, 40):
        pool.begin_write(key(1), start, 40)
    assert pool.table(key(1)).min_start == 2 * 32 + 19
    pool.begin_write(key(1), 83, 1)
    with pytest.raises(StateLostError, match=r"back to position 82; its KV before position 64 was given up, .* window of at most 20 had"):
        pool.begin_write(key(1), 82, 1)
    assert pool.table(key(1)).length == 84
    pool.begin_write(key(1), 0, 40)
    assert (pool.table(key(1)).num_passed, pool.table(key(1)).length) == (0, 40)


def test_a_prompt_that_the_window_has_passed_stays_cached_and_is_found_as_a_whole() -> None:
    pool = windowed()
    prompt = text(300)
    pool.take(key(1), 400, prompt)
    for start in range(0, 300, 40):
        compute(pool, key(1), prompt[: min(300, start + 40)], start)
    pool.release(key(1))
    assert pool.cached_tokens == 9 * BLOCK_TOKENS
    assert pool.take(key(2), 400, prompt) == 288  # it may begin anywhere in these
    assert pool.free_tokens == (NUM_BLOCKS - 9) * BLOCK_TOKENS
    pool.begin_write(key(2), 256, 40)
    assert pool.free_tokens == (NUM_BLOCKS - 3) * BLOCK_TOKENS
    assert pool.table(key(2)).num_passed == 7
    assert pool.cached_tokens == (9 - 1) * BLOCK_TOKENS  # all but the one that it still sees before position 256


def test_of_a_prompt_longer_than_the_room_the_beginning_stays() -> None:
    pool = windowed(6)
    prompt = text(300)
    pool.take(key(1), 400, prompt)
    for start in range(0, 300, 40):
        compute(pool, key(1), prompt[: min(300, start + 40)], start)
    pool.release(key(1))
    pool.take(key(2), 400, prompt)
    assert pool.table(key(2)).length == 3 * BLOCK_TOKENS
