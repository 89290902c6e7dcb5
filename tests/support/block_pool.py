"""A block pool under any order of events, beside a memory that shows who wrote what; and small pools for single tests."""

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


def compute(pool: BlockPool, name: StreamKey, prompt: TokenArray, start: int = 0) -> None:
    pool.begin_write(name, start, len(prompt) - start)
    pool.wrote(name, start, prompt[start:], PREFILL)
