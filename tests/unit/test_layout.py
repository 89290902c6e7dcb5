"""Slices to subsequences, and a decode step moved in place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.kv import BLOCK_TOKENS, num_blocks_for
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from workers.blocks import BlockTable
from workers.runners.layout import ARRAYS, Layout, lay_out
from workers.runners.runner import RunSlice, StreamKey

FIELDS = (
    "tokens",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
    "sampled_rows",
)
RESERVED = 4 * BLOCK_TOKENS


def table(first_block: int) -> BlockTable:
    blocks = np.arange(first_block, first_block + num_blocks_for(RESERVED), dtype=np.int32)
    return BlockTable(blocks=blocks, num_reserved=RESERVED, max_blocks=len(blocks), num_taken=len(blocks))


def piece(stream: int, start: int, tokens: list[int], kind: SliceKind, num_sampled: int = 1) -> RunSlice:
    key = StreamKey(ClientId("c"), StreamId(stream))
    return RunSlice(key=key, start=start, tokens=np.array(tokens, dtype=np.int32), kind=kind, num_sampled=num_sampled)


def as_lists(layout: Layout) -> dict[str, object]:
    return {name: getattr(layout, name).tolist() for name in FIELDS}


def test_prefill_and_rows_of_two_streams() -> None:
    layout = lay_out(
        [piece(1, 0, [5, 6, 7], SliceKind.PREFILL, 0), piece(2, 31, [8, 9], SliceKind.ROWS, 2)],
        [table(10), table(20)],
    )
    assert as_lists(layout) == {
        "tokens": [5, 6, 7, 8, 9],
        "position_ids": [0, 1, 2, 31, 32],
        "past_lens": [0, 31, 32, 0],  # the last subsequence is empty
        "subsequence_begins": [0, 3, 4, 5, 5],
        "block_indices": [10, 20, 20, 21],  # position 32 is the first of the second block
        "block_indices_begins": [0, 1, 2, 4, 4],
        "max_context_len": 33,
        "sampled_rows": [3, 4],
    }
    assert not layout.move([piece(1, 3, [5], SliceKind.ROWS)], [table(10)])


def test_rows_of_another_table_are_laid_out_anew() -> None:
    layout = lay_out([piece(1, 3, [5], SliceKind.ROWS)], [table(0)])
    before = as_lists(layout)
    assert not layout.move([piece(1, 3, [6], SliceKind.ROWS)], [table(0)])  # the stream was closed and another one opened
    assert as_lists(layout) == before


ROWS = st.lists(st.tuples(st.integers(0, RESERVED - 5), st.integers(1, 4), st.integers(0, 1)), min_size=1, max_size=4)


@given(ROWS, st.lists(st.integers(-40, 40), min_size=4, max_size=4))
def test_a_moved_layout_equals_a_fresh_one(rows: list[tuple[int, int, int]], shifts: list[int]) -> None:
    tables = [table(10 * idx) for idx in range(len(rows))]
    first = [piece(idx, start, [idx] * count, SliceKind.ROWS, sampled) for idx, (start, count, sampled) in enumerate(rows)]
    second = [
        piece(idx, min(max(0, start + shifts[idx]), RESERVED - count), [9] * count, SliceKind.ROWS, sampled)
        for idx, (start, count, sampled) in enumerate(rows)
    ]
    layout = lay_out(first, tables)
    before = as_lists(layout)
    if layout.move(second, tables):
        assert as_lists(layout) == as_lists(lay_out(second, tables))
    else:
        assert as_lists(layout) == before


def test_the_next_token_of_the_same_streams_moves() -> None:
    tables = [table(0), table(10)]
    layout = lay_out([piece(1, 3, [5], SliceKind.ROWS), piece(2, 40, [6], SliceKind.ROWS)], tables)
    assert layout.move([piece(1, 4, [7], SliceKind.ROWS), piece(2, 41, [8], SliceKind.ROWS)], tables)
    assert layout.position_ids.tolist() == [4, 41]
    assert layout.past_lens.tolist() == [4, 41, 0]


def test_a_layout_takes_the_memory_of_the_last_one_where_it_fits() -> None:
    first, second, third = table(0), table(10), table(20)
    old = lay_out([piece(1, 3, [5], SliceKind.ROWS), piece(2, 9, [6], SliceKind.ROWS)], [first, second])
    mine = lay_out([piece(3, 40, [7], SliceKind.ROWS), piece(2, 10, [8], SliceKind.ROWS)], [third, second])
    expected = as_lists(mine)
    layout, unset = mine.over(old)
    assert unset == ("block_indices",)  # position 40 is in a second block
    assert as_lists(layout) == expected
    assert all((getattr(layout, name) is getattr(old, name)) == (name not in unset) for name in ARRAYS)
    assert layout.move([piece(3, 41, [9], SliceKind.ROWS), piece(2, 11, [9], SliceKind.ROWS)], [third, second])
    assert old.position_ids.tolist() == [41, 11]
