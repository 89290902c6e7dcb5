"""How a worker computes: what two stages must have in common to serve one stream, and the types in which hidden states travel."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class DType(StrEnum):
    """Element types a tensor may have on the wire. numpy has no bf16: its bits travel and are handled as uint16."""

    F32 = "f32"
    BF16 = "bf16"
    I8 = "i8"
    """Rows of int8 values, each followed by the bf16 scales of its groups (`workers.runners.boundary`)."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of the tensor frame that follows the header, row-major, little-endian."""

    dtype: DType
    shape: tuple[int, ...]


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's numerics class: two stages may serve one stream only when all of it is equal."""

    name: str
    """`fast` or `exact`."""
    runner: str
    """`paged` or `stateful`."""
    device: str
    openvino: str
    inference_precision: str
    kv_precision: str
    dynamic_quantization_group_size: int
    """Of the layers; 0 when activations are not quantized."""
    head_quantization_group_size: int
    """The same in front of the head."""
    boundary: DType
    """Type in which hidden states leave a stage."""
