"""The block pool: its invariants under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from langchain_pshard.core.errors import CapacityError
from langchain_pshard.core.messages import ClientId, StreamId
from workers.blocks import BLOCK_TOKENS, BlockPool, num_blocks_for
from workers.runners.runner import StreamKey

NUM_BLOCKS = 12
MIB_PER_BLOCK = 2


def key(number: int) -> StreamKey:
    return StreamKey(ClientId("c"), StreamId(number))


def make_pool() -> BlockPool:
    return BlockPool(num_blocks=NUM_BLOCKS, block_bytes=MIB_PER_BLOCK << 20)


class Pool(RuleBasedStateMachine):
    """Streams come, grow, rewind and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.open: dict[StreamKey, int] = {}
        self.next_stream = 0

    @rule(num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_TOKENS + 40))
    def take(self, num_tokens: int) -> None:
        name = key(self.next_stream)
        self.next_stream += 1
        fits = num_blocks_for(num_tokens) * BLOCK_TOKENS <= self.pool.free_tokens
        before = self.pool.free_tokens
        if fits:
            self.pool.take(name, num_tokens)
            self.open[name] = num_tokens
        else:
            with pytest.raises(CapacityError):
                self.pool.take(name, num_tokens)
            assert self.pool.free_tokens == before

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        table = self.pool.table(name)
        start = data.draw(st.integers(0, min(table.length, self.open[name] - 1)))
        count = data.draw(st.integers(1, self.open[name] - start))
        before = table.blocks.tolist()
        table.advance(start, count)
        assert table.length == start + count
        assert table.blocks.tolist() == before  # a rewind gives nothing back

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.pool.release(name)
        del self.open[name]
        self.pool.release(name)  # twice is harmless

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for name in self.open for block in self.pool.table(name).blocks.tolist()]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(NUM_BLOCKS))
        assert self.pool.free_tokens + len(owned) * BLOCK_TOKENS == self.pool.num_tokens == NUM_BLOCKS * BLOCK_TOKENS
        assert self.pool.used_tokens == len(owned) * BLOCK_TOKENS

    @invariant()
    def tables_cover_their_reservation(self) -> None:
        for name, num_tokens in self.open.items():
            table = self.pool.table(name)
            assert len(table.blocks) == num_blocks_for(num_tokens)
            assert table.length <= num_tokens <= len(table.blocks) * BLOCK_TOKENS


TestPool = Pool.TestCase


def test_refusal_tells_needed_free_and_total() -> None:
    pool = make_pool()
    pool.take(key(1), 10 * BLOCK_TOKENS)
    with pytest.raises(CapacityError) as caught:
        pool.take(key(2), 3 * BLOCK_TOKENS - 1)
    text = str(caught.value)
    assert "96 positions (6.0 MiB)" in text
    assert "64 positions (4.0 MiB) are free of 384 positions (24.0 MiB)" in text


@pytest.mark.parametrize(("start", "count"), [(6, 1), (0, 11), (-1, 1), (0, 0)])
def test_a_step_against_the_rule_is_our_own_bug(start: int, count: int) -> None:
    pool = make_pool()
    pool.take(key(1), 10)
    table = pool.table(key(1))
    table.advance(0, 5)
    with pytest.raises(AssertionError):
        table.advance(start, count)
