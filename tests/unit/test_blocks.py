"""The block pool: its invariants under any order of events, with a memory that shows who wrote what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from langchain_pshard.core.errors import CapacityError, StateLostError
from langchain_pshard.core.kv import BLOCK_TOKENS, MAX_SLICE_TOKENS, num_blocks_for
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from workers.blocks import BlockPool, BlockTable
from workers.prefix import name_blocks
from workers.runners.runner import StreamKey, TokenArray

NUM_BLOCKS = 12
MIB_PER_BLOCK = 2
PREFILL, ROWS = SliceKind.PREFILL, SliceKind.ROWS


class Kv(NamedTuple):
    """Stands for what a position's KV depends on: all tokens up to it and how each was computed."""

    exact: int
    text: int
    """The tokens alone."""


NOTHING = Kv(0, 0)


def key(number: int) -> StreamKey:
    return StreamKey(ClientId("c"), StreamId(number))


def make_pool(num_blocks: int = NUM_BLOCKS, *, window: int | None = None, max_slice_tokens: int = MAX_SLICE_TOKENS) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_bytes=MIB_PER_BLOCK << 20, window=window, max_slice_tokens=max_slice_tokens)


def held(table: BlockTable) -> list[int]:
    """The blocks that a table holds, in order of position."""
    return [int(block) for block in table.blocks[table.num_passed : table.num_taken]]


def text(num_tokens: int, *branches: tuple[int, int]) -> TokenArray:
    """Zeros, but for a number at each of the given positions: texts that part there."""
    tokens = np.zeros(num_tokens, dtype=np.int32)
    for position, token in branches:
        tokens[position:] = token
    return tokens


@dataclass
class Open:
    prompt: TokenArray
    num_reserved: int
    content: list[Kv] = field(default_factory=list)
    """What the stream holds, in order of position."""
    shares_generated: bool = False
    last_start: int = 0
    """Of the slices so far."""

    def compute(self, tokens: Sequence[int], kind: SliceKind) -> None:
        for token in tokens:
            before = self.content[-1] if self.content else NOTHING
            self.content.append(Kv(hash((before.exact, int(token), kind)), hash((before.text, int(token)))))


class Pool(RuleBasedStateMachine):
    """Streams with prompts that begin alike come, prefill, generate, rewind anywhere and go; their memory is checked at every position."""

    window: int | None = None
    max_slice_tokens = MAX_SLICE_TOKENS
    max_blocks = NUM_BLOCKS
    """Of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(window=self.window, max_slice_tokens=self.max_slice_tokens)
        self.memory: dict[tuple[int, int], Kv] = {}
        self.open: dict[StreamKey, Open] = {}
        self.next_stream = 0

    def _held(self, name: StreamKey, first: int, length: int) -> list[Kv | None]:
        blocks = self.pool.table(name).blocks
        return [self.memory.get((int(blocks[position // BLOCK_TOKENS]), position % BLOCK_TOKENS)) for position in range(first, length)]

    @rule(
        num_prompt=st.integers(0, 5 * BLOCK_TOKENS),
        num_more=st.integers(1, 3 * BLOCK_TOKENS),
        branch=st.sampled_from([0, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 5]),
        token=st.integers(0, 2),
        shares_generated=st.booleans(),
    )
    def take(self, num_prompt: int, num_more: int, branch: int, token: int, shares_generated: bool) -> None:
        name = key(self.next_stream)
        self.next_stream += 1
        prompt, num_tokens = text(num_prompt, (branch, token)), num_prompt + num_more
        free, used = self.pool.free_tokens, self.pool.used_tokens
        needed = min(num_blocks_for(num_tokens), self.max_blocks) * BLOCK_TOKENS
        if needed > free:
            with pytest.raises(CapacityError):
                self.pool.take(name, num_tokens, prompt)
            assert (self.pool.free_tokens, self.pool.used_tokens) == (free, used)
            return
        num_cached = self.pool.take(name, num_tokens, prompt, shares_generated=shares_generated)
        assert num_cached % BLOCK_TOKENS == 0
        assert num_cached <= max(0, num_prompt - 2)
        stream = self.open[name] = Open(prompt, num_tokens, shares_generated=shares_generated)
        stream.compute(prompt[:num_cached], PREFILL)
        if shares_generated:  # then it may be of any kind, but of no other text
            given = [kv or NOTHING for kv in self._held(name, 0, num_cached)]
            assert [kv.text for kv in given] == [kv.text for kv in stream.content]
            stream.content = given
        assert self.pool.free_tokens == free - max(needed, num_cached)  # admitted as if it shared nothing

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(SliceKind), sticks_to_prompt=st.booleans(), fails=st.booleans())
    def step(self, data: st.DataObject, kind: SliceKind, sticks_to_prompt: bool, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        stream = self.open[name]
        start = data.draw(st.integers(0, min(len(stream.content), stream.num_reserved - 1)) | st.just(len(stream.content)))
        if start == stream.num_reserved:
            return
        count = data.draw(st.integers(1, min(stream.num_reserved - start, self.max_slice_tokens)))
        tokens = text(count, (0, 9))
        if data.draw(st.booleans()):  # what another's prompt may be
            tokens = text(start + count)[start:]
        if sticks_to_prompt and start < len(stream.prompt):
            tokens = stream.prompt[start : start + count]
        before = held(self.pool.table(name))
        try:
            copies = self.pool.begin_write(name, start, len(tokens))
        except CapacityError:
            assert not self.pool.table(name).passes_blocks
            assert self.pool.free_tokens < NUM_BLOCKS * BLOCK_TOKENS - len(before) * BLOCK_TOKENS
            assert held(self.pool.table(name)) == before
            return
        except StateLostError:
            assert self.window is not None
            assert 0 < start < stream.last_start  # a repeated slice, or what follows it, never fails
            assert held(self.pool.table(name)) == before
            return
        stream.last_start = start
        assert len(copies) <= 1
        for source, target in copies:
            for offset in range(BLOCK_TOKENS):
                self.memory[target, offset] = self.memory.get((source, offset), NOTHING)
        self._write(name, start, tokens, kind)
        if not fails:
            self.pool.wrote(name, start, tokens, kind)

    def _write(self, name: StreamKey, start: int, tokens: Sequence[int], kind: SliceKind) -> None:
        stream = self.open[name]
        del stream.content[start:]
        # A token alone runs the decode kernel, whatever it is called.
        stream.compute(tokens, ROWS if len(tokens) == 1 else kind)
        blocks = self.pool.table(name).blocks
        others = {block for other in self.open if other != name for block in held(self.pool.table(other))}
        for position in range(start, start + len(tokens)):
            block = int(blocks[position // BLOCK_TOKENS])
            assert block not in others, "a shared block is written"
            self.memory[block, position % BLOCK_TOKENS] = stream.content[position]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.pool.release(name)
        del self.open[name]
        self.pool.release(name)  # twice is harmless

    @invariant()
    def every_stream_holds_what_it_computed(self) -> None:
        """As far back as its next slice can see. And what it was given is what a prefill of its own would have written."""
        for name, stream in self.open.items():
            first = self.pool.table(name).num_passed * BLOCK_TOKENS
            assert first == 0 or first <= len(stream.content) - self.window + 1
            assert self._held(name, first, len(stream.content)) == stream.content[first:]

    @invariant()
    def blocks_are_counted_once(self) -> None:
        tables = [self.pool.table(name) for name in self.open]
        assert all(len(set(held(table))) == table.num_taken - table.num_passed for table in tables)
        in_use = {block for table in tables for block in held(table)}
        assert self.pool.used_tokens == (len(in_use) + sum(table.num_promised for table in tables)) * BLOCK_TOKENS
        assert 0 <= self.pool.free_tokens <= self.pool.num_tokens - self.pool.used_tokens
        assert self.pool.cached_tokens <= self.pool.num_tokens - len(in_use) * BLOCK_TOKENS

    @invariant()
    def a_table_covers_its_length_and_leads_nowhere_else(self) -> None:
        for name, stream in self.open.items():
            table = self.pool.table(name)
            assert len(table.blocks) == num_blocks_for(stream.num_reserved)
            assert num_blocks_for(len(stream.content)) <= table.num_taken <= len(table.blocks)
            assert table.length == len(stream.content)
            assert set(table.blocks[: table.num_passed].tolist()) <= set(held(table))

    def teardown(self) -> None:
        for name in self.open:
            self.pool.release(name)
        assert self.pool.used_tokens == 0
        assert self.pool.free_tokens == NUM_BLOCKS * BLOCK_TOKENS


TestPool = Pool.TestCase


class WindowedPool(Pool):
    """The same where windows pass blocks: a stream of up to eight blocks holds three."""

    window = 20
    max_slice_tokens = 40
    max_blocks = 3


TestWindowedPool = WindowedPool.TestCase


def compute(pool: BlockPool, name: StreamKey, prompt: TokenArray, start: int = 0) -> None:
    pool.begin_write(name, start, len(prompt) - start)
    pool.wrote(name, start, prompt[start:], PREFILL)


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


# --- windows -----------------------------------------------------------------------------------------------------------


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
