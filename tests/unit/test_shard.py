"""Options of a worker's stages are checked before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_pshard.core.errors import InvalidOptionError
from workers.shard import Settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "fastest"}, ["runner='fastest'", "paged, stateful"]),
        ({"numerics": "sloppy"}, ["numerics='sloppy'", "fast, exact"]),
        ({"activation": "int4"}, ["activation='int4'", "f32, int8"]),
        ({"kv_precision": "u4"}, ["kv_precision='u4'", "f16, f32, u8"]),
        ({"threads": 0}, ["threads=0", "1 or more"]),
        ({"kv_memory_bytes": 0}, ["kv_memory_bytes=0", "1 or more"]),
    ],
)
def test_an_option_out_of_range_is_named_with_what_is_valid(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Settings(**options)
    assert all(word in str(caught.value) for word in words)
