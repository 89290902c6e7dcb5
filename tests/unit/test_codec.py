"""Message <-> frames: what goes in comes out, and nothing malformed comes through."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.codec import MAX_HEADER_BYTES, decode, encode, pack_tokens, tensor_spec, unpack_tokens
from langchain_pshard.core.errors import ProtocolError
from langchain_pshard.core.messages import (
    ClientId,
    Epoch,
    Message,
    MicroBatch,
    Open,
    Ping,
    RequestId,
    Slice,
    SliceKind,
    SliceResult,
    StageTiming,
    Step,
    StepId,
    StepResult,
    StreamId,
)
from langchain_pshard.core.numerics import DType, TensorSpec
from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs


def a_micro_batch(hidden: TensorSpec | None = None) -> MicroBatch:
    piece = Slice(stream=StreamId(3), start=100, tokens=pack_tokens([5, 262_143]), kind=SliceKind.ROWS, num_sampled=2)
    step = Step(client=ClientId("c" * 16), epoch=Epoch(1), step_id=StepId(77), slices=(piece,), timings=(StageTiming(5, 7_000),))
    return MicroBatch(stage_idx=1, steps=(step,), hidden=hidden)


@pytest.mark.parametrize(
    "message",
    [
        a_micro_batch(),
        Ping(request=RequestId(1), client=None),
        Open(
            request=RequestId(9),
            client=ClientId("c"),
            epoch=Epoch(2),
            stream=StreamId(0),
            num_tokens=640,
            sampling=SamplingParams(temperature=0.5, top_logprobs=3, seed=2**63 - 1),
        ),
        StepResult(
            epoch=Epoch(1),
            step_id=StepId(4),
            results=(SliceResult(StreamId(1), pack_tokens([1]), (TokenLogprobs(-0.5, ((1, -0.5),)),)),),
            timings=(StageTiming(1, 2), StageTiming(3, 4)),
        ),
    ],
)
def test_message_survives_the_wire(message: Message) -> None:
    decoded, tensor = decode(encode(message))
    assert decoded == message
    assert tensor is None


@pytest.mark.parametrize(("dtype", "wire"), [(np.float32, DType.F32), (np.uint16, DType.BF16)])
def test_tensor_travels_untouched_and_uncopied(dtype: type[np.generic], wire: DType) -> None:
    hidden = np.arange(12, dtype=dtype).reshape(3, 4)
    frames = encode(a_micro_batch(tensor_spec(hidden)), hidden)
    message, tensor = decode(frames)
    assert isinstance(message, MicroBatch)
    assert message.hidden == TensorSpec(wire, (3, 4))
    assert tensor is not None
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor, hidden)
    assert np.shares_memory(tensor, hidden)


def test_logits_travel_beside_a_result() -> None:
    logits = np.arange(8, dtype=np.float32).reshape(2, 4)
    results = (SliceResult(StreamId(3), pack_tokens([1, 2])),)
    result = StepResult(
        epoch=Epoch(1), step_id=StepId(4), results=results, timings=(), logits=tensor_spec(logits), logits_of=(StreamId(3),)
    )
    message, tensor = decode(encode(result, logits))
    assert message == result
    np.testing.assert_array_equal(tensor, logits)
    with pytest.raises(ProtocolError, match="header announces a tensor"):
        decode(encode(result))


def test_reply_of_one_token_takes_at_most_48_bytes() -> None:
    reply = StepResult(
        epoch=Epoch(3),
        step_id=StepId(70_000),
        results=(SliceResult(StreamId(9), pack_tokens([262_143])),),
        timings=(StageTiming(90, 12_000), StageTiming(70, 9_000)),
    )
    assert len(encode(reply)[0]) <= 48


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([], "0"),
        ([b"", b"", b""], "3"),
        ([b"\xc1"], "decoded"),
        ([b"\x93\xa4pong\x01" + b"\x91" * 100_000], "nested|decoded"),
        ([b"\xa0" * (MAX_HEADER_BYTES + 1)], "at most"),
        ([msgspec.msgpack.encode(["no-such-message", 1])], "decoded"),
        ([msgspec.msgpack.encode(["ping", "one"])], "decoded"),
        ([msgspec.msgpack.encode(["open", 1, "c", 1, 2, 3, {"temperature": -1.0}])], "temperature"),
        ([*encode(Ping(request=RequestId(1))), b"tensor"], "no tensor"),
        (encode(a_micro_batch(TensorSpec(DType.F32, (2, 2)))), "a tensor"),
        ([*encode(a_micro_batch(TensorSpec(DType.F32, (2, 2)))), b"\0" * 15], "16 bytes"),
        ([*encode(a_micro_batch(TensorSpec(DType.F32, (-1, 4)))), b"\0" * 16], "each above 0"),
        ([*encode(a_micro_batch(TensorSpec(DType.BF16, (2**40, 2**40)))), b"\0" * 16], "2 dimensions"),
        ([*encode(a_micro_batch(TensorSpec(DType.BF16, (2**27, 2**27)))), b"\0" * 16], "takes"),
        # What numpy refuses in its own words, though the bytes agree.
        ([*encode(a_micro_batch(TensorSpec(DType.F32, (0, 2**62)))), b""], "each above 0"),
        ([*encode(a_micro_batch(TensorSpec(DType.F32, (0, 2**64 - 1)))), b""], "each above 0"),
        ([*encode(a_micro_batch(TensorSpec(DType.F32, (1,) * 65))), b"\0" * 4], "65 dimensions"),
        ([*encode(a_micro_batch(TensorSpec(DType.F32, ()))), b"\0" * 4], "0 dimensions"),
    ],
)
def test_malformed_frames_are_refused(frames: list[bytes], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_never_do_anything_but_decode_or_be_refused(frames: list[bytes]) -> None:
    try:
        message, _ = decode(frames)
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_tokens_round_trip(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


def test_tokens_of_a_broken_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="5 bytes"):
        unpack_tokens(b"12345")
