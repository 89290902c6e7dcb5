"""The block pool: its invariants under any order of events, what it shares and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_pshard.core.errors import CapacityError
from langchain_pshard.core.kv import BLOCK_TOKENS
from tests.support.block_pool import PREFILL, ROWS, Pool, compute, held, key, make_pool, text
from workers.blocks import BlockPool
from workers.prefix import name_blocks
from workers.runners.runner import StreamKey, TokenArray

TestPool = Pool.TestCase


def test_refusal_names_needed_free_and_all() -> None:
    pool = make_pool()
    pool.take(key(1), 10 * BLOCK_TOKENS)
    with pytest.raises(CapacityError) as caught:
        pool.take(key(2), 2 * BLOCK_TOKENS + 1)
    assert str(caught.value) == (
        "a stream of 65 positions needs 96 positions (6.0 MiB) of KV; 64 positions (4.0 MiB) are free of 384 positions (24.0 MiB):"
        " wait for other streams to end, ask for fewer tokens, or raise --kv-memory"
    )


def test_a_name_stands_for_all_text_before_its_end() -> None:
    names = name_blocks(text(100), BLOCK_TOKENS)
    assert len(set(names)) == 3
    other = name_blocks(text(100, (40, 1)), BLOCK_TOKENS)
    assert [mine == theirs for mine, theirs in zip(names, other, strict=True)] == [True, False, False]
    assert name_blocks(text(31), BLOCK_TOKENS) == []


def test_a_prefix_is_found_in_full_blocks_and_leaves_two_tokens() -> None:
    pool = make_pool()
    prompt = text(64)
    assert pool.take(key(1), 70, prompt) == 0
    assert pool.take(key(2), 70, prompt) == 0  # nothing is computed yet
    compute(pool, key(1), prompt)
    for number, (num_tokens, num_cached) in enumerate({33: 0, 34: 32, 64: 32, 65: 32, 66: 64, 80: 64}.items(), start=3):
        assert pool.take(key(number), 80, text(num_tokens)) == num_cached
        pool.release(key(number))
    assert pool.take(key(9), 80, text(80, (40, 1))) == 32
    assert pool.take(key(10), 1) == 0


def test_shared_blocks_count_once_after_the_first_slice() -> None:
    pool = make_pool()
    prompt = text(100)
    pool.take(key(1), 128, prompt)
    compute(pool, key(1), prompt)
    assert pool.take(key(2), 128, prompt) == 96
    assert pool.used_tokens == (4 + 1) * BLOCK_TOKENS
    assert pool.free_tokens == (12 - 8) * BLOCK_TOKENS  # its first slice may start at 0
    compute(pool, key(2), prompt, 96)
    assert pool.free_tokens == (12 - 5) * BLOCK_TOKENS
    assert pool.table(key(2)).blocks[:3].tolist() == pool.table(key(1)).blocks[:3].tolist()


def test_a_stage_that_holds_more_than_the_others_goes_back() -> None:
    pool = make_pool(8)
    prompt = text(100)
    pool.take(key(1), 128, prompt)
    compute(pool, key(1), prompt)
    shared = held(pool.table(key(1)))
    assert pool.take(key(2), 128, prompt) == 96
    assert pool.free_tokens == 0
    assert not pool.begin_write(key(2), 32, 68)
    blocks = pool.table(key(2)).blocks.tolist()
    assert blocks[0] == shared[0]
    assert not set(blocks[1:]) & set(shared)
    assert held(pool.table(key(1))) == shared
    assert pool.free_tokens == BLOCK_TOKENS


def test_a_slice_that_begins_inside_a_shared_block_takes_a_copy_along() -> None:
    pool = make_pool()
    prompt = text(64)
    pool.take(key(1), 80, prompt)
    compute(pool, key(1), prompt)
    old = int(pool.table(key(1)).blocks[1])
    [(source, target)] = pool.begin_write(key(1), 40, 2)
    assert source == old
    assert target == pool.table(key(1)).blocks[1] != old


def test_the_least_recently_used_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    pool = make_pool(6)
    first, second = text(64), text(64, (0, 1))
    for number, prompt in ((1, first), (2, second)):
        pool.take(key(number), 66, prompt)
        compute(pool, key(number), prompt)
        pool.release(key(number))
    assert pool.used_tokens == 0
    assert pool.cached_tokens == 4 * BLOCK_TOKENS
    assert pool.free_tokens == 6 * BLOCK_TOKENS

    pool.take(key(3), 66, np.append(first, [5, 5]).astype(np.int32))  # used now, so that the second is the older one
    pool.release(key(3))
    pool.take(key(4), 3 * BLOCK_TOKENS)
    pool.begin_write(key(4), 0, 3 * BLOCK_TOKENS)  # gives up the end of the second
    assert pool.take(key(5), 34, second[:34]) == 32
    pool.begin_write(key(5), 32, 2)  # and this the end of the first
    pool.release(key(5))
    assert pool.take(key(6), 34, first[:34]) == 32
    assert pool.cached_tokens == BLOCK_TOKENS


def test_what_is_promised_and_not_taken_still_holds_the_texts_of_others() -> None:
    pool = make_pool(6)
    prompt = text(64)
    pool.take(key(1), 66, prompt)
    compute(pool, key(1), prompt)
    pool.release(key(1))
    pool.take(key(2), 6 * BLOCK_TOKENS)
    assert (pool.free_tokens, pool.cached_tokens) == (0, 2 * BLOCK_TOKENS)
    pool.begin_write(key(2), 0, 5 * BLOCK_TOKENS)
    assert pool.cached_tokens == BLOCK_TOKENS
    pool.begin_write(key(2), 5 * BLOCK_TOKENS, 1)
    assert pool.cached_tokens == 0


def test_rows_and_single_tokens_are_never_shared() -> None:
    pool = make_pool()
    prompt = text(40)
    pool.take(key(1), 80, prompt)
    pool.begin_write(key(1), 0, 40)
    pool.wrote(key(1), 0, prompt, ROWS)
    pool.take(key(2), 80, prompt)
    pool.begin_write(key(2), 0, 1)
    pool.wrote(key(2), 0, prompt[:1], PREFILL)
    pool.begin_write(key(2), 1, 39)
    pool.wrote(key(2), 1, prompt[1:], PREFILL)
    assert pool.take(key(3), 80, prompt) == 0


def test_what_follows_a_rewind_into_the_prompt_by_rows_is_not_shared() -> None:
    pool = make_pool()
    prompt = text(100)
    pool.take(key(1), 128, prompt)
    compute(pool, key(1), prompt[:64])
    pool.begin_write(key(1), 40, 24)  # the same tokens, as rows
    pool.begin_write(key(1), 64, 36)
    pool.wrote(key(1), 64, prompt[64:], PREFILL)
    assert pool.take(key(2), 128, prompt) == 64  # what was named before the rewind


def test_a_prompt_that_is_not_what_was_announced_is_not_shared() -> None:
    pool = make_pool()
    pool.take(key(1), 80, text(64))
    compute(pool, key(1), text(64, (33, 1)))
    assert pool.take(key(2), 80, text(64)) == 0
    assert pool.take(key(3), 80, text(64, (33, 1))) == 0


def test_writing_again_what_others_share_by_now_needs_room_for_a_copy() -> None:
    pool = make_pool(4)
    prompt = text(64)
    pool.take(key(1), 64, prompt)
    compute(pool, key(1), prompt)
    pool.take(key(2), 64, prompt)
    compute(pool, key(2), prompt, 32)
    pool.take(key(3), 32)
    with pytest.raises(CapacityError, match=r"positions from 0 on are shared with other streams, .* needs 32 positions .*; 0 positions"):
        pool.begin_write(key(1), 0, 64)
    pool.release(key(3))
    before = pool.table(key(2)).blocks.tolist()
    pool.begin_write(key(1), 0, 64)
    assert pool.table(key(2)).blocks.tolist() == before
    assert not set(before) & set(pool.table(key(1)).blocks.tolist())


# --- generated text ------------------------------------------------------------------------------------------------------


def generate(pool: BlockPool, name: StreamKey, start: int, tokens: TokenArray) -> None:
    """Row by row."""
    for position, token in enumerate(tokens, start=start):
        pool.begin_write(name, position, 1)
        pool.wrote(name, position, np.array([token], dtype=np.int32), ROWS)


def test_generated_text_is_found_by_those_who_ask_for_it_and_left_by_them() -> None:
    pool = make_pool(40)
    whole = text(130, (40, 1))
    for number, shares_generated in ((1, True), (2, False)):
        pool.take(key(number), 130, whole[:40], shares_generated=shares_generated)
        compute(pool, key(number), whole[:40])
    generate(pool, key(2), 40, whole[40:])
    pool.release(key(2))
    assert pool.take(key(3), 130, whole, shares_generated=True) == 32
    generate(pool, key(1), 40, whole[40:100])
    assert pool.take(key(4), 130, whole, shares_generated=True) == 96
    assert pool.take(key(5), 130, whole) == 32
    for number in (3, 4, 5):
        pool.release(key(number))
    generate(pool, key(1), 100, whole[100:])
    pool.release(key(1))
    assert pool.take(key(6), 130, whole, shares_generated=True) == 128


def test_what_is_prefilled_behind_generated_text_is_no_exact_prefix() -> None:
    pool = make_pool(40)
    whole = text(200, (40, 1))
    pool.take(key(1), 100, whole[:40], shares_generated=True)
    compute(pool, key(1), whole[:40])
    generate(pool, key(1), 40, whole[40:100])
    pool.release(key(1))
    assert pool.take(key(2), 200, whole, shares_generated=True) == 96
    compute(pool, key(2), whole, 96)
    pool.release(key(2))
    assert pool.take(key(3), 200, whole) == 32
    assert pool.take(key(4), 200, whole, shares_generated=True) == 192


def test_a_slice_that_failed_leaves_no_name() -> None:
    pool = make_pool(40)
    pool.take(key(1), 100, text(40), shares_generated=True)
    compute(pool, key(1), text(40))
    pool.begin_write(key(1), 40, 60)
    pool.release(key(1))
    assert pool.take(key(2), 100, text(100), shares_generated=True) == 32
