"""Hidden states between two stages as int8, for links where bytes count: what travels is about a quarter of float32.

A row of n float32 values becomes n int8 values and one bf16 scale for each group of 16 of them, all in one row of bytes: so rows are cut,
joined and forwarded as any others. Every row is quantized by itself, so that a stream's tokens still depend on neither company nor chunks,
and rewinds stay exact. What is given up: the rounding happens at every boundary, so the tokens depend on where the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import InferenceError, InvalidOptionError
from langchain_pshard.core.numerics import DType, Numerics
from workers.runners.runner import NO_TOKENS, NOT_FINITE, Logits, Runner, RunSlice, StreamKey, TokenArray

GROUP_SIZE = 16
"""Values that share a scale. A few channels are a hundred times as large as the rest: a scale for a whole row would round those away."""
_SCALE_BYTES = 2
_SCALE_BITS = 16
_LARGEST = np.float32(127)

Quantized = npt.NDArray[np.int8]
Float32s = npt.NDArray[np.float32]


def row_width(boundary: DType, hidden_size: int) -> int:
    """Elements of a row of hidden states on the wire."""
    return hidden_size + hidden_size // GROUP_SIZE * _SCALE_BYTES if boundary is DType.I8 else hidden_size


def quantize(hidden: Float32s) -> Quantized:
    """[tokens, hidden] -> [tokens, row_width]. Pure; `hidden` is finite."""
    groups = hidden.reshape(len(hidden), -1, GROUP_SIZE)  # [tokens, groups, GROUP_SIZE]
    exact = np.abs(groups).max(axis=2) / _LARGEST
    scales = (exact.view(np.uint32) + _ROUND_UP >> _SCALE_BITS).astype("<u2")  # [tokens, groups]; up, so that nothing exceeds 127
    steps = _as_float32(scales)
    # A group of zeros has no scale to divide by; with any other the zeros stay zeros.
    values = np.rint(groups / np.where(steps > 0, steps, np.float32(1))[:, :, None]).astype(np.int8)
    return np.concatenate([values.reshape(len(hidden), -1), scales.view(np.int8)], axis=1)


def dequantize(rows: Quantized, hidden_size: int) -> Float32s:
    """[tokens, row_width] -> [tokens, hidden]. Pure."""
    values = rows[:, :hidden_size].reshape(len(rows), -1, GROUP_SIZE)
    scales = np.ascontiguousarray(rows[:, hidden_size:]).view("<u2")  # [tokens, groups]
    hidden: Float32s = (values * _as_float32(scales)[:, :, None]).reshape(len(rows), hidden_size)
    return hidden


_ROUND_UP = np.uint32((1 << _SCALE_BITS) - 1)


def _as_float32(scales: npt.NDArray[np.uint16]) -> Float32s:
    """bf16 is the upper half of float32."""
    return (scales.astype(np.uint32) << _SCALE_BITS).view(np.float32)


def check_hidden_size(hidden_size: int) -> None:
    """Refuse before any work.

    Raises:
        InvalidOptionError: rows of this model do not consist of whole groups.
    """
    if hidden_size % GROUP_SIZE:
        raise InvalidOptionError(
            f"--activation int8 needs a hidden size that is a multiple of {GROUP_SIZE}; this model has {hidden_size}: leave it out"
        )


def check_finite(hidden: Float32s, slices: Sequence[RunSlice]) -> None:
    """Stop what is no number at the stage where it comes up: the next one could not tell whose fault it is.

    Raises:
        InferenceError: naming the streams of the run.
    """
    if not np.isfinite(hidden).all():
        streams = ", ".join(str(piece.key.stream) for piece in slices)
        raise InferenceError(f"the hidden states of stream {streams} are {NOT_FINITE}")


class Int8Boundary:
    """A `Runner` that takes and gives hidden states as int8, over one that computes them in float32."""

    def __init__(self, runner: Runner, *, hidden_size: int, is_last: bool) -> None:
        """
        Args:
            runner: its boundary is float32.
            hidden_size: of the model; a multiple of the group size.
            is_last: its output is logits, which stay as they are.
        """
        self._runner = runner
        self._hidden_size = hidden_size
        self._is_last = is_last

    @property
    def numerics(self) -> Numerics:
        return msgspec.structs.replace(self._runner.numerics, boundary=DType.I8)

    @property
    def is_rewind_exact(self) -> bool:
        return self._runner.is_rewind_exact

    @property
    def kv_capacity_tokens(self) -> int:
        return self._runner.kv_capacity_tokens

    @property
    def kv_stream_tokens(self) -> int | None:
        return self._runner.kv_stream_tokens

    @property
    def kv_used_tokens(self) -> int:
        return self._runner.kv_used_tokens

    def open(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS, *, shares_generated: bool = False) -> int:
        return self._runner.open(key, num_tokens, prompt, shares_generated=shares_generated)

    def close_stream(self, key: StreamKey) -> None:
        self._runner.close_stream(key)

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor | Logits:
        taken = None if hidden is None else dequantize(cast(Quantized, hidden), self._hidden_size)
        output = cast(Float32s, self._runner.run(slices, taken))
        if self._is_last:
            return output
        check_finite(output, slices)  # a quantized row could not show it
        return quantize(output)

    def close(self) -> None:
        self._runner.close()
