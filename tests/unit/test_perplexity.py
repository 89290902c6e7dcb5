"""The arithmetic of the perplexity benchmark."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.perplexity import ModeResult, smallest_within, token_losses
from langchain_pshard.core.bundle import WeightMode


def result(mode: WeightMode, exact: float, fast: float) -> ModeResult:
    return ModeResult(mode=mode, num_bytes=1, num_tokens=9, exact=exact, fast=fast)


def test_losses_are_those_of_the_definition() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32)) + np.float32(700)  # beyond what exp can hold
    assert token_losses(logits, [0, 2]).tolist() == pytest.approx([-math.log(0.5), -math.log(0.8)], abs=1e-4)


def test_the_smallest_mode_counts_by_its_worse_class() -> None:
    base = result(WeightMode.FP32, 20.0, 20.0)
    int4, int8 = result(WeightMode.INT4, 21.0, 21.4), result(WeightMode.INT8, 20.1, 20.2)
    assert int4.ratio(base) == pytest.approx(1.07)
    assert smallest_within([int4, int8, base], 1.06) is int8
    assert smallest_within([int4, int8, base], 1.08) is int4
    assert smallest_within([int4, int8, base], 1.001) is base
