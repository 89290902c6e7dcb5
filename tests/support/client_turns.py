"""A client's turns and streams without a fleet: tests say when a step comes back, and what with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.messages import SliceKind, SliceResult, StageTiming, StepId, StreamId
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.chain import Route
from langchain_pshard.pipeline.stream import Delivery, Stream, StreamRequest
from langchain_pshard.pipeline.turns import Turn, Turns

VOCAB = 13
EOS = 0
TIMINGS = (StageTiming(0, 1000), StageTiming(0, 1000))


def route(num_stages: int) -> Route:
    """One worker for each stage."""
    return Route(num_stages, num_stages + 1, num_stages if num_stages > 1 else 0)


class Client:
    """Turns and streams; `land` answers a step as a chain would."""

    def __init__(self, max_steps_ahead: int = 7, *, num_stages: int = 2) -> None:
        self.turns = Turns(max_draft_tokens=8, max_chunk_tokens=256)
        self.turns.reset(route(num_stages), max_steps_ahead=max_steps_ahead)
        self.streams: dict[StreamId, Stream] = {}
        self.now = 0.0
        self.num_stages = num_stages

    def add(self, number: int, max_tokens: int = 100, prompt: Sequence[int] = (1, 2, 3), **more: Any) -> Stream:
        request = StreamRequest(
            prompt=tuple(prompt), max_tokens=max_tokens, sampling=SamplingParams(), eos_token_ids=frozenset({EOS}), vocab_size=VOCAB,
            sink=lambda _: True, **more,
        )  # fmt: skip
        stream = self.streams[StreamId(number)] = Stream(StreamId(number), request, self.now)
        return stream

    def decoding(self, number: int, max_tokens: int = 100, *, after_s: float = 0.005, **more: Any) -> Stream:
        """A stream whose first token is there."""
        stream = self.add(number, max_tokens, **more)
        turn = self.turn()
        assert [piece.stream for piece in turn.slices] == [number]
        self.land(turn.step_id, after_s=after_s)
        return stream

    def turn(self) -> Turn:
        found = self.turns.next_turn(self.streams, self.now)
        assert found is not None
        return found

    @property
    def waits(self) -> bool:
        return self.turns.next_turn(self.streams, self.now) is None

    def land(self, step_id: int, says: Mapping[int, int] | None = None, *, after_s: float = 0.005) -> dict[int, Delivery]:
        """A step comes back: token 5 for every stream that `says` nothing of. Streams that end are forgotten."""
        self.now += after_s
        landing = self.turns.landed(StepId(step_id), TIMINGS[: self.num_stages], self.now)
        assert landing is not None
        told: dict[int, Delivery] = {}
        for stream_id in landing.streams:
            result = SliceResult(stream_id, pack_tokens([(says or {}).get(stream_id, 5)]))
            delivery = self.streams[stream_id].apply(result if self.streams[stream_id].num_awaited else None, landing.trip, self.now)
            if delivery is not None:
                told[stream_id] = delivery
                if delivery.finish_reason is not None:
                    self.end(stream_id)
        return told

    def land_prompts(self) -> None:
        """Turn by turn, until every stream has its first token and could go on."""
        while not all(stream.is_ready for stream in self.streams.values()):
            self.land(self.turn().step_id)

    def end(self, number: int) -> None:
        """As a cancel does, and every end."""
        del self.streams[StreamId(number)]
        self.turns.forget([StreamId(number)])

    @property
    def in_flight(self) -> list[int]:
        return sorted(self.turns._flights)


def granted(turn: Turn) -> list[tuple[int, int]]:
    """(stream, steps ahead) of the rows."""
    return [(piece.stream, piece.num_ahead) for piece in turn.slices if piece.kind is SliceKind.ROWS]
