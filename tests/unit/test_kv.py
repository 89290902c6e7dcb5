"""How much KV a stage keeps of a stream: exact figures."""

from __future__ import annotations

import pytest

from langchain_pshard.core.kv import kept_tokens, max_stream_blocks, num_blocks_for, widest_window


def test_blocks_are_whole() -> None:
    assert [num_blocks_for(num_tokens) for num_tokens in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_one_layer_that_sees_everything_keeps_everything() -> None:
    assert widest_window([512, 8, 512]) == 512
    assert widest_window([512, None]) is None
    assert widest_window([None]) is None
    assert widest_window([]) is None


@pytest.mark.parametrize(("window", "num_blocks"), [(None, None), (1, 17), (16, 18), (33, 18), (34, 19), (512, 33), (1024, 49)])
def test_a_stream_keeps_its_window_and_a_slice(window: int | None, num_blocks: int | None) -> None:
    assert max_stream_blocks(window) == num_blocks


def test_several_streams_keep_a_window_each_but_never_more_than_there_is() -> None:
    assert kept_tokens([512, 512], 100_000, 1) == 33 * 32
    assert kept_tokens([512, 512], 100_000, 7) == 7 * 33 * 32
    assert kept_tokens([512, 512], 1000, 1) == 1000
    assert kept_tokens([512, 512], 100_000, None) == 100_000
    assert kept_tokens([512, None], 100_000, 1) == 100_000
