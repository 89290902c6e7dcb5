"""Hidden states as int8 rows: how far from float32, and that every row stands for itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import InferenceError, InvalidOptionError
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from langchain_pshard.core.numerics import DType
from workers.runners.boundary import GROUP_SIZE, Int8Boundary, check_hidden_size, dequantize, quantize, row_width
from workers.runners.runner import RunSlice, StreamKey

HIDDEN = 3 * GROUP_SIZE
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(HIDDEN)), elements=FINITE)


@given(hidden=ROWS)
def test_no_value_is_off_by_more_than_half_a_step_of_its_group(hidden: np.ndarray) -> None:
    rows = quantize(hidden)
    assert rows.dtype == np.int8
    assert rows.shape == (len(hidden), row_width(DType.I8, HIDDEN))
    back = dequantize(rows, HIDDEN)
    assert back.dtype == np.float32
    largest = np.abs(hidden.reshape(-1, GROUP_SIZE)).max(axis=1, keepdims=True).astype(np.float64)
    off = np.abs(back.reshape(-1, GROUP_SIZE).astype(np.float64) - hidden.reshape(-1, GROUP_SIZE))
    tiny = np.finfo(np.float32).tiny  # scales below are coarse
    assert (off <= largest / 127 * 0.5 * (1 + 2**-7) + tiny).all()


@given(hidden=ROWS)
def test_a_row_does_not_depend_on_its_company(hidden: np.ndarray) -> None:
    rows = quantize(hidden)
    assert all(np.array_equal(quantize(hidden[idx : idx + 1])[0], rows[idx]) for idx in range(len(hidden)))
    back = dequantize(rows, HIDDEN)
    assert all(np.array_equal(dequantize(rows[idx : idx + 1], HIDDEN)[0], back[idx]) for idx in range(len(hidden)))


def test_a_large_channel_spoils_its_own_group_only() -> None:
    hidden = np.full((1, HIDDEN), 0.5, dtype=np.float32)
    hidden[0, 0] = 1e4
    back = dequantize(quantize(hidden), HIDDEN)[0]
    assert back[1:GROUP_SIZE].tolist() == [0.0] * (GROUP_SIZE - 1)
    assert np.abs(back[GROUP_SIZE:] - 0.5).max() <= 0.5 / 127


def test_row_widths() -> None:
    assert row_width(DType.I8, 640) == 640 + 40 * 2
    assert row_width(DType.F32, 640) == 640


def test_hidden_sizes_without_whole_groups_are_refused() -> None:
    check_hidden_size(HIDDEN)
    with pytest.raises(InvalidOptionError, match=r"--activation int8 needs .* multiple of 16; this model has 100: leave it out"):
        check_hidden_size(100)


class Computes:
    """A stage that adds one."""

    def __init__(self, result: float | None = None) -> None:
        self.result = result
        self.seen: Tensor | None = None

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor:
        self.seen = hidden
        if self.result is not None or hidden is None:
            return np.full((1, HIDDEN), self.result, dtype=np.float32)
        return hidden + np.float32(1)


PIECE = RunSlice(
    key=StreamKey(ClientId("c"), StreamId(7)), start=0, tokens=np.zeros(1, dtype=np.int32), kind=SliceKind.PREFILL, num_sampled=1
)


def test_a_middle_stage_takes_and_gives_int8_and_computes_in_float32() -> None:
    inner = Computes()
    stage = Int8Boundary(inner, hidden_size=HIDDEN, is_last=False)  # type: ignore[arg-type]
    output = stage.run([PIECE], quantize(np.full((1, HIDDEN), 2, dtype=np.float32)))
    assert inner.seen is not None
    assert (inner.seen.dtype, output.dtype) == (np.float32, np.int8)
    assert np.abs(dequantize(output, HIDDEN) - 3).max() < 0.05  # type: ignore[arg-type]


def test_the_last_stage_gives_logits_as_they_are() -> None:
    stage = Int8Boundary(Computes(0.123), hidden_size=HIDDEN, is_last=True)  # type: ignore[arg-type]
    assert stage.run([PIECE], quantize(np.zeros((1, HIDDEN), dtype=np.float32)))[0, 5] == np.float32(0.123)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_stopped_before_int8_hides_it(value: float) -> None:
    stage = Int8Boundary(Computes(value), hidden_size=HIDDEN, is_last=False)  # type: ignore[arg-type]
    with pytest.raises(InferenceError, match="the hidden states of stream 7 are not finite"):
        stage.run([PIECE], None)
