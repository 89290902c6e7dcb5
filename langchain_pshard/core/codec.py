"""Message <-> frames, as pure functions: one header frame, and the tensor's own bytes as a second one when there is a tensor."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from langchain_pshard.core.errors import ProtocolError
from langchain_pshard.core.messages import Message, MicroBatch, StepResult
from langchain_pshard.core.numerics import DType, TensorSpec

Tensor = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.int8]
"""Hidden states: float32, the bits of bf16 in uint16, or int8 values and the bytes of their scales."""
Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 1 << 20
MAX_TENSOR_BYTES = 256 << 20
MAX_TENSOR_DIMS = 4
MAX_LOGITS_BYTES = 16 << 20
"""Of all slices of a step together."""

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {DType.F32: np.dtype("<f4"), DType.BF16: np.dtype("<u2"), DType.I8: np.dtype("i1")}
_WIRE_DTYPES = {numpy_dtype: dtype for dtype, numpy_dtype in NUMPY_DTYPES.items()}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def tensor_spec(tensor: Tensor) -> TensorSpec:
    """The spec that describes `tensor` on the wire; any other element type than those of `DType` is our own bug."""
    return TensorSpec(_WIRE_DTYPES[tensor.dtype], tensor.shape)


def encode(message: Message, tensor: Tensor | None = None) -> list[Buffer]:
    """Frames of a message. The tensor's memory is not copied: it must not change until the frames are sent."""
    header = _encoder.encode(message)
    if tensor is None:
        return [header]
    return [header, np.ascontiguousarray(tensor).data.cast("B")]


def decode(frames: Sequence[Buffer]) -> tuple[Message, Tensor | None]:
    """Message and tensor (a view on the second frame) of received frames.

    Raises:
        ProtocolError: a number of frames, a size, a field or a kind that the protocol does not know.
    """
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message has 1 or 2 frames, this one has {len(frames)}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frames[0])} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        message: Message = _decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"header cannot be decoded: {error}") from error
    except RecursionError as error:
        raise ProtocolError("header is nested too deeply") from error
    spec = _spec_in(message)
    if (spec is None) != (len(frames) == 1):
        raise ProtocolError(f"header announces {'a' if spec else 'no'} tensor, the message has {len(frames)} frames")
    return message, None if spec is None else _view(spec, frames[1])


def _spec_in(message: Message) -> TensorSpec | None:
    match message:
        case MicroBatch():
            return message.hidden
        case StepResult():
            return message.logits
        case _:
            return None


def _view(spec: TensorSpec, data: Buffer) -> Tensor:
    dtype = NUMPY_DTYPES[spec.dtype]
    # Bounded before they are multiplied or reach numpy, which refuses what it cannot address with errors of its own, zero bytes or not.
    if not 1 <= len(spec.shape) <= MAX_TENSOR_DIMS or min(spec.shape) < 1 or max(spec.shape) > MAX_TENSOR_BYTES:
        raise ProtocolError(
            f"tensor of {len(spec.shape)} dimensions, the first {list(spec.shape[:MAX_TENSOR_DIMS])};"
            f" valid: 1 to {MAX_TENSOR_DIMS}, each above 0"
        )
    num_bytes = prod(spec.shape) * dtype.itemsize
    if num_bytes != len(data) or num_bytes > MAX_TENSOR_BYTES:
        raise ProtocolError(
            f"tensor {spec.dtype.value}{list(spec.shape)} takes {num_bytes} bytes, the frame has {len(data)};"
            f" at most {MAX_TENSOR_BYTES} are allowed"
        )
    return np.ndarray(spec.shape, dtype, data)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian bytes."""
    return struct.pack(f"<{len(tokens)}i", *tokens)  # several times as fast as numpy for the few that a step has


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of `pack_tokens`.

    Raises:
        ProtocolError: the length is no multiple of four.
    """
    if len(data) % 4:
        raise ProtocolError(f"token ids take 4 bytes each, got {len(data)} bytes")
    return list(struct.unpack(f"<{len(data) // 4}i", data))  # twice as fast as numpy for the few that results have
