"""The group in which activations are quantized suits every matrix."""

from __future__ import annotations

import pytest

from export_tools.compress import WeightModes, activation_group_size
from langchain_pshard.core.bundle import WeightMode


@pytest.mark.parametrize(
    ("channel_counts", "mode", "group_size", "expected"),
    [
        ([640, 1024, 2048], WeightMode.INT4, 128, 128),
        ([640, 1024, 2048], WeightMode.INT4, 32, 32),
        ([640, 1024, 2048], WeightMode.INT4, 256, 128),
        ([4096, 11008], WeightMode.INT8, 128, 128),
        ([64, 128], WeightMode.INT8, 128, 64),
        ([896, 4864], WeightMode.INT4, 128, 128),
        ([1056, 2048], WeightMode.INT4, 128, 32),
        ([1040, 2048], WeightMode.INT4, 128, 0),
        ([640], WeightMode.FP16, 128, 0),
        ([640], WeightMode.FP32, 128, 0),
    ],
)
def test_largest_group_that_divides_everything(channel_counts: list[int], mode: WeightMode, group_size: int, expected: int) -> None:
    modes = WeightModes.of(mode, embedding=None, head=None, group_size=group_size)
    assert activation_group_size(channel_counts, modes) == expected
