"""Pure: matrices of float32 to integers with scales, by the arithmetic of NNCF, whose bytes these are (tests/integration/test_compress.py).

NNCF itself is not asked (docs/decisions/0007-own-compression.md): it takes seven times as long, and decides by a matrix's place in the
graph, which a cut changes; here a matrix is all there is. Rows are worked on in pieces that stay in the processor's caches, so that a
matrix of any size needs little beyond its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_PIECE_NUMBERS = 1 << 18  # a MiB of float32
_SMALLEST_SCALE = np.finfo(np.float32).eps
_INT4_LOW, _INT4_HIGH = np.float32(-8), np.float32(7)
_INT8_HIGH = np.float32(255)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Matrix:
    """Weights in [-8, 7], `packed * scales`."""

    packed: NDArray[np.uint8]
    """[rows, columns / 2]: two weights a byte, the first in the lower half."""
    scales: NDArray[np.float16]
    """[rows, columns / group]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Matrix:
    """Weights in [0, 255], `(values - zero_points) * scales`."""

    values: NDArray[np.uint8]
    """[rows, columns]."""
    scales: NDArray[np.float16]
    """[rows, 1]."""
    zero_points: NDArray[np.uint8]
    """[rows, 1]."""


def to_int4(matrix: Floats, group_size: int) -> Int4Matrix:
    """Symmetric, one scale for each group of a row.

    The scale is signed: the number farthest from zero becomes -8, so that all sixteen values are used.

    Args:
        matrix: [rows, columns], finite.
        group_size: even, and a divisor of the columns.
    """
    num_rows, num_columns = matrix.shape
    packed = np.empty((num_rows, num_columns // 2), dtype=np.uint8)
    scales = np.empty((num_rows, num_columns // group_size), dtype=np.float16)
    for piece in _pieces(matrix):
        grouped = matrix[piece].reshape(-1, num_columns // group_size, group_size)
        lowest, highest = grouped.min(axis=-1), grouped.max(axis=-1)
        scale = _not_zero(np.where(np.abs(lowest) >= highest, np.abs(lowest), -highest) / -_INT4_LOW)
        values = grouped / scale[..., None]
        np.clip(np.rint(values, out=values), _INT4_LOW, _INT4_HIGH, out=values)
        nibbles = values.astype(np.int8).view(np.uint8).reshape(-1, num_columns // 2, 2)
        packed[piece] = (nibbles[..., 0] & 15) | (nibbles[..., 1] << 4)
        scales[piece] = scale
    return Int4Matrix(packed=packed, scales=scales)


def to_int8(matrix: Floats) -> Int8Matrix:
    """Asymmetric, one scale and zero point for each row; zero itself stays exact.

    Args:
        matrix: [rows, columns], finite.
    """
    num_rows, num_columns = matrix.shape
    values = np.empty((num_rows, num_columns), dtype=np.uint8)
    scales = np.empty((num_rows, 1), dtype=np.float16)
    zero_points = np.empty((num_rows, 1), dtype=np.uint8)
    for piece in _pieces(matrix):
        rows = matrix[piece]
        lowest, highest = np.minimum(rows.min(axis=-1, keepdims=True), 0), np.maximum(rows.max(axis=-1, keepdims=True), 0)
        scale = _not_zero((highest - lowest) / _INT8_HIGH)
        zero_point = np.clip(-np.rint(lowest / scale), 0, _INT8_HIGH)
        shifted = rows / scale
        shifted += zero_point
        np.clip(np.rint(shifted, out=shifted), 0, _INT8_HIGH, out=shifted)
        values[piece] = shifted
        scales[piece], zero_points[piece] = scale, zero_point
    return Int8Matrix(values=values, scales=scales, zero_points=zero_points)


def _pieces(matrix: NDArray[Any]) -> Iterator[slice]:
    """Slices of rows."""
    num_rows, num_columns = matrix.shape
    step = max(1, _PIECE_NUMBERS // max(1, num_columns))
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _not_zero(scale: Floats) -> Floats:
    return np.where(np.abs(scale) < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
