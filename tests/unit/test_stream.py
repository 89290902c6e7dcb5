"""One generation and speculation on a deterministic fake model: any pattern of drafts gives exactly the plain tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.errors import InvalidOptionError, ProtocolError
from langchain_pshard.core.messages import Slice, SliceKind, SliceResult, StageTiming, StepId, StreamId
from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs
from langchain_pshard.pipeline.account import Trip
from langchain_pshard.pipeline.generation import FinishReason
from langchain_pshard.pipeline.recovery import Replay, replay_plan
from langchain_pshard.pipeline.speculation import Drafting, draft
from langchain_pshard.pipeline.stream import Delivery, Stream, StreamRequest

VOCAB = 13
EOS = 0
NO_TRIP = Trip((), 0.0, 0)


def fake_next(text: Sequence[int]) -> int:
    return sum((idx + 1) * (token + 1) for idx, token in enumerate(text)) % VOCAB


def plain(prompt: Sequence[int], max_tokens: int, eos: bool) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(fake_next([*prompt, *tokens]))
        if eos and tokens[-1] == EOS:
            break
    return tokens


class FakeFleet:
    """Holds the stream's KV as its tokens and follows the one step rule."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.most = 0

    def run(self, piece: Slice) -> SliceResult:
        assert piece.start <= len(self.held)
        tokens = unpack_tokens(piece.tokens)
        self.held[piece.start :] = tokens
        self.most = max(self.most, len(self.held))
        first = len(self.held) - piece.num_sampled
        return SliceResult(piece.stream, pack_tokens([fake_next(self.held[: idx + 1]) for idx in range(first, len(self.held))]))


def make(prompt: Sequence[int], max_tokens: int = 8, *, eos: bool = True, drafting: Drafting | None = None) -> Stream:
    request = StreamRequest(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        eos_token_ids=frozenset({EOS} if eos else ()),
        vocab_size=VOCAB,
        sink=lambda _: True,
        drafting=drafting,
    )
    return Stream(StreamId(1), request, now=0.0)


@pytest.mark.parametrize(("num_prompt", "cached", "start"), [(1, 0, 0), (1, 1, 0), (2, 2, 0), (40, 32, 32), (64, 64, 62), (40, 0, 0)])
def test_what_is_cached_is_not_sent_and_two_tokens_are_left(num_prompt: int, cached: int, start: int) -> None:
    stream = make([1] * num_prompt)
    assert unpack_tokens(stream.shared_prompt) == [1] * num_prompt
    stream.skip_cached(cached)
    assert stream.num_prompt_left == num_prompt - start
    assert stream.next_chunk(num_prompt - start, StepId(1), 0.0).start == start
    result = SliceResult(StreamId(1), pack_tokens([7]))
    delivery = stream.apply(result, NO_TRIP, 0.0)
    assert delivery is not None
    assert delivery.stats.num_cached_tokens == start


def test_a_prompt_that_is_not_to_be_shared_is_not_told() -> None:
    request = dataclasses.replace(make([1] * 40).request, prefix_cache=False)
    assert Stream(StreamId(1), request, now=0.0).shared_prompt == b""


def run(stream: Stream, max_drafts: int = 8) -> tuple[list[int], Delivery, FakeFleet]:
    fleet = FakeFleet()
    step, tokens = 0, list[int]()
    piece = stream.next_chunk(stream.num_prompt_left, StepId(1), 0.0)
    while True:
        delivery = stream.apply(fleet.run(piece), NO_TRIP, float(step))
        assert delivery is not None
        tokens += delivery.tokens
        if delivery.finish_reason is not None:
            return tokens, delivery, fleet
        step += 1
        assert stream.is_ready
        piece = next_rows(stream, max_drafts, StepId(step + 1), float(step))


def next_rows(stream: Stream, max_drafts: int, step: StepId, now: float) -> Slice:
    return stream.next_rows(len(stream.guess(max_drafts).gains), step, now)


class Scripted:
    """Drafts of a given length, right up to a given place."""

    def __init__(self, prompt: Sequence[int], script: list[tuple[int, int]]) -> None:
        self._tokens = list(prompt)
        self._script = script
        self._turn = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, max_tokens: int) -> Sequence[int]:
        tokens = self._tokens
        length, right = self._script[self._turn % len(self._script)]
        self._turn += 1
        text = list(tokens)
        for idx in range(length):
            token = fake_next(text)
            text.append(token if idx < right else (token + 1) % VOCAB)
        return text[len(tokens) :]


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    max_tokens=st.integers(1, 60),
    eos=st.booleans(),
    script=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=8),
    max_drafts=st.integers(0, 9),
)
def test_any_acceptance_pattern_yields_the_plain_tokens(
    prompt: list[int], max_tokens: int, eos: bool, script: list[tuple[int, int]], max_drafts: int
) -> None:
    stream = make(prompt, max_tokens, eos=eos, drafting=Scripted(prompt, script))
    tokens, last, fleet = run(stream, max_drafts)
    assert tokens == plain(prompt, max_tokens, eos)
    assert fleet.most <= stream.request.num_positions
    stats = last.stats
    assert stats.num_generated_tokens == len(tokens)
    assert stats.num_accepted_tokens <= stats.num_drafted_tokens
    assert stats.num_steps + stats.num_accepted_tokens >= len(tokens)


@pytest.mark.parametrize("end", [4, 7])
def test_every_end_token_ends(end: int) -> None:
    request = StreamRequest(
        prompt=(1, 2), max_tokens=8, sampling=SamplingParams(), eos_token_ids=frozenset({4, 7}), vocab_size=VOCAB, sink=lambda _: True
    )  # fmt: skip
    stream = Stream(StreamId(1), request, now=0.0)
    stream.next_chunk(2, StepId(1), 0.0)
    first = stream.apply(SliceResult(stream.id, pack_tokens([3])), NO_TRIP, 0.0)
    assert first is not None
    assert first.finish_reason is None
    stream.guess(0)
    stream.next_rows(0, StepId(2), 0.0)
    last = stream.apply(SliceResult(stream.id, pack_tokens([end])), NO_TRIP, 0.0)
    assert last is not None
    assert (last.tokens, last.finish_reason) == ((end,), FinishReason.STOP)


def test_prompt_in_chunks_behind_one_another() -> None:
    stream, fleet = make([1, 2, 3, 4, 5], max_tokens=3, eos=False), FakeFleet()
    first = stream.next_chunk(3, StepId(1), 0.0)
    second = stream.next_chunk(2, StepId(2), 0.5)
    assert (first.start, first.num_tokens, first.num_sampled, first.kind) == (0, 3, 0, SliceKind.PREFILL)
    assert (second.start, second.num_tokens, second.num_sampled) == (3, 2, 1)
    assert stream.apply(fleet.run(first), NO_TRIP, 1.0) is None
    assert not stream.is_ready
    delivery = stream.apply(fleet.run(second), NO_TRIP, 2.0)
    assert delivery is not None
    assert list(delivery.tokens) == plain([1, 2, 3, 4, 5], 1, False)
    row = stream.next_rows(0, StepId(3), 2.0)
    assert (row.start, row.num_tokens, row.num_sampled, row.kind) == (5, 1, 1, SliceKind.ROWS)


def test_stats() -> None:
    stream, fleet = make([1, 2], max_tokens=2, eos=False), FakeFleet()
    timings = (StageTiming(100, 2000), StageTiming(50, 1000))
    stream.apply(fleet.run(stream.next_chunk(2, StepId(1), 0.25)), Trip(timings, 6.0, 3), 1.0)
    last = stream.apply(fleet.run(stream.next_rows(0, StepId(2), 1.0)), Trip(timings, 3.0, 2), 1.5)
    assert last is not None
    assert last.finish_reason is FinishReason.LENGTH
    stats = last.stats
    assert (stats.queue_ms, stats.first_token_ms, stats.decode_ms) == (250.0, 1000.0, 500.0)
    assert (stats.stage_compute_ms, stats.stage_queue_ms) == ((4.0, 2.0), (0.2, 0.1))
    assert stats.tokens_per_s == 2.0
    assert (stats.way_ms, stats.num_hops, stats.hop_ms) == (9.0, 5, 1.8)
    assert stats.acceptance == 0.0


def test_logprobs_are_those_of_the_tokens_delivered() -> None:
    stream = make([1, 2], max_tokens=2, eos=False, drafting=Scripted([1, 2], [(1, 0)]))
    fleet = FakeFleet()
    stream.apply(fleet.run(stream.next_chunk(2, StepId(1), 0.0)), NO_TRIP, 0.0)
    plain_result = fleet.run(next_rows(stream, 4, StepId(2), 0.0))
    all_of_them = tuple(TokenLogprobs(-float(idx), ()) for idx in range(len(unpack_tokens(plain_result.tokens))))
    delivery = stream.apply(SliceResult(plain_result.stream, plain_result.tokens, all_of_them), NO_TRIP, 0.0)
    assert delivery is not None
    assert delivery.logprobs == all_of_them[:1]


@pytest.mark.parametrize("tokens", [[], [1, 2], [VOCAB], [-1]])
def test_a_wrong_answer_is_a_protocol_error(tokens: list[int]) -> None:
    stream = make([1, 2])
    stream.next_chunk(2, StepId(1), 0.0)
    with pytest.raises(ProtocolError, match="the last stage answered"):
        stream.apply(SliceResult(StreamId(1), pack_tokens(tokens)), NO_TRIP, 0.0)


class Fixed:
    """Always the same guess; keeps what it was told."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens
        self.told: list[int] = []
        self.asked: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.told += tokens

    def propose(self, max_tokens: int) -> Sequence[int]:
        self.asked.append(max_tokens)
        return self._tokens


def test_drafts_are_checked_and_cut() -> None:
    drafting = Fixed(1, 2, VOCAB)
    assert draft(drafting, [1], max_tokens=2, vocab_size=VOCAB) == (1, 2)
    assert draft(drafting, [4, 5], max_tokens=0, vocab_size=VOCAB) == ()
    assert drafting.told == [1, 4, 5]
    with pytest.raises(InvalidOptionError, match=f"proposed token {VOCAB}; valid: 0 to {VOCAB - 1}"):
        draft(drafting, [], max_tokens=3, vocab_size=VOCAB)


def test_a_drafter_hears_every_token_once_and_never_drafts_beyond_the_end() -> None:
    drafting = Fixed(*range(1, 9))
    tokens, _, _ = run(make([1, 2], max_tokens=12, eos=False, drafting=drafting))
    assert drafting.told == tokens[: len(drafting.told)]
    assert all(count <= 12 - 1 - 1 for count in drafting.asked)
    assert drafting.told


def test_a_guess_that_does_not_ride_still_teaches_what_one_draft_would_bring() -> None:
    class Right:
        def __init__(self) -> None:
            self.text = [1, 2]

        def extend(self, tokens: Sequence[int]) -> None:
            self.text += tokens

        def propose(self, max_tokens: int) -> Sequence[int]:
            return [fake_next(self.text)]

    stream, fleet = make([1, 2], max_tokens=40, eos=False, drafting=Right()), FakeFleet()
    stream.apply(fleet.run(stream.next_chunk(2, StepId(1), 0.0)), NO_TRIP, 0.0)
    before = stream.guess(4).gains[0]
    for step in range(2, 12):
        stream.apply(fleet.run(stream.next_rows(0, StepId(step), 0.0)), NO_TRIP, 0.0)
        after = stream.guess(4).gains[0]
    assert before == 0.5
    assert after > 0.9


def test_replay_plan_keeps_the_kinds() -> None:
    assert replay_plan([1, 2, 3], []) == (Replay(0, 3, SliceKind.PREFILL),)
    assert replay_plan([1, 2, 3], [4]) == (Replay(0, 3, SliceKind.PREFILL),)
    assert replay_plan([1, 2, 3], [4, 5, 6]) == (Replay(0, 3, SliceKind.PREFILL), Replay(3, 5, SliceKind.ROWS))
