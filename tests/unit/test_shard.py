"""Options of a worker's stages are checked before anything is loaded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError
from tests.unit.test_bundle import a_manifest
from workers.shard import Settings, head_activation_group_size


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


@pytest.mark.parametrize(
    ("hidden_size", "head_mode", "of_layers", "expected"),
    [
        (640, WeightMode.INT8, 128, 320),
        (64, WeightMode.INT8, 64, 64),
        (704, WeightMode.INT8, 64, 352),
        (1152, WeightMode.INT8, 128, 384),
        (4096, WeightMode.INT8, 128, 512),
        (544, WeightMode.INT8, 32, 32),  # 17 x 32
        (640, WeightMode.INT4, 128, 128),  # groups of its weights
        (640, WeightMode.FP16, 128, 128),  # not quantized, whatever is asked for
        (640, WeightMode.INT8, 0, 0),  # layers that are not compressed
    ],
)
def test_the_head_quantizes_in_the_largest_groups_that_divide_it(
    hidden_size: int, head_mode: WeightMode, of_layers: int, expected: int
) -> None:
    model = msgspec.structs.replace(a_manifest(), hidden_size=hidden_size, head_mode=head_mode, activation_group_size=of_layers)
    assert head_activation_group_size(model) == expected
