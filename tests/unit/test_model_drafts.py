"""What a stream asks of the draft model, how long it waits, and how many tokens are worth asking for; with fake time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.messages import (
    ClientId,
    Draft,
    DraftAsk,
    Drafted,
    DraftResult,
    Epoch,
    SliceKind,
    SliceResult,
    StepId,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.roles import DraftOffer
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.adaptive_k import num_to_ask
from langchain_pshard.pipeline.chain import DraftRole
from langchain_pshard.pipeline.instructions import Instruction, Send, Warn
from langchain_pshard.pipeline.model_drafts import (
    LATE_FACTOR,
    MAX_PROBE_EVERY,
    MAX_WAIT_S,
    MIN_WAIT_S,
    PIECE_TOKENS,
    PROBE_DRAFTS,
    PROBE_EVERY,
    ModelDrafts,
)
from langchain_pshard.pipeline.stream import Stream, StreamRequest
from tests.unit.test_stream import NO_TRIP, VOCAB, fake_next

LOST_S = 5.0


def role(context_length: int = 4096) -> DraftRole:
    offer = DraftOffer(model_name="small", num_bytes=1, kv_capacity_tokens=10_000, context_length=context_length)
    return DraftRole(address="tcp://c:1", offer=offer)


def asked(drafts: ModelDrafts, step_ms: Callable[[int], float], now: float) -> list[tuple[DraftAsk, ...]]:
    """The asks that go out, message by message."""
    messages = []
    for each in drafts.ask(step_ms, now):
        assert isinstance(each, Send)
        assert isinstance(each.message, Draft)
        assert (each.address, each.message.client, each.message.epoch) == ("tcp://c:1", "me", 1)
        messages.append(each.message.asks)
    return messages


class Talking:
    """One stream, its target and its draft model, step by step. A step takes 10 ms for a row and 1 ms for each more."""

    def __init__(self, prompt: Sequence[int] = (1, 2, 3), *, max_tokens: int = 1000, context_length: int = 4096, num: int | None = None):
        request = StreamRequest(
            prompt=tuple(prompt), max_tokens=max_tokens, sampling=SamplingParams(), eos_token_ids=frozenset(), vocab_size=VOCAB,
            sink=lambda _: True, drafts_by_model=True, num_drafts=num, prefix_cache=False,
        )  # fmt: skip
        self.now = 0.0
        self.stream = Stream(StreamId(1), request, 0.0)
        self.drafts = ModelDrafts(ClientId("me"), max_draft_tokens=8, lost_after_s=LOST_S)
        self.drafts.follow(Epoch(1), role(context_length), [self.stream], 0.0)
        self._step = 0

    def ask(self) -> DraftAsk | None:
        asks = [ask for message in asked(self.drafts, lambda rows: 9.0 + rows, self.now) for ask in message]
        return asks[0] if asks else None

    def answer(self, num_positions: int, tokens: Sequence[int], after_s: float = 0.0) -> list[Instruction]:
        self.now += after_s
        return self.drafts.on_drafted(
            Drafted(epoch=Epoch(1), results=(DraftResult(self.stream.id, num_positions, pack_tokens(tokens)),)), self.now
        )

    def begin(self) -> None:
        """The prompt is taken in by both, and the first token is there."""
        ask = self.ask()
        assert ask is not None
        assert (ask.start, ask.kind, ask.num_drafts) == (0, SliceKind.PREFILL, 0)
        assert not self.stream.awaits_guess
        self.first_token()
        self.answer(len(self.stream.request.prompt), [])

    def first_token(self) -> None:
        self._step += 1
        self.stream.next_chunk(len(self.stream.request.prompt), StepId(self._step), self.now)
        self.stream.apply(SliceResult(StreamId(1), pack_tokens([self.right()])), NO_TRIP, self.now)

    def right(self) -> int:
        return fake_next([*self.stream.request.prompt, *self.stream.tokens])

    def guess(self, count: int, *, is_right: bool = True) -> list[int]:
        text = [*self.stream.request.prompt, *self.stream.tokens]
        for _ in range(count):
            token = fake_next(text)
            text.append(token if is_right else (token + 1) % VOCAB)
        return text[len(text) - count :]

    def step(self, num_drafts: int | None = None) -> None:
        """A turn with as many of the guess as said, or all of it."""
        offer = self.stream.guess(8)
        self._step += 1
        piece = self.stream.next_rows(len(offer.gains) if num_drafts is None else num_drafts, StepId(self._step), self.now)
        text = [*self.stream.request.prompt, *self.stream.tokens]
        tokens = [text[-1], *unpack_tokens(piece.tokens)[1:]]
        sampled = [fake_next([*text[:-1], *tokens[: idx + 1]]) for idx in range(len(tokens))]
        self.now += (9.0 + len(tokens)) / 1e3
        self.stream.apply(SliceResult(StreamId(1), pack_tokens(sampled)), NO_TRIP, self.now)


def texts(out: Sequence[Instruction]) -> list[str]:
    return [each.text for each in out if isinstance(each, Warn)]


def test_an_ask_tells_what_the_draft_model_does_not_hold() -> None:
    talk = Talking(num=3)
    talk.begin()
    ask = talk.ask()
    assert ask is not None
    assert (ask.start, unpack_tokens(ask.tokens), ask.kind, ask.num_drafts) == (3, talk.stream.tokens, SliceKind.ROWS, 3)
    assert (ask.num_positions, ask.is_shared) == (1003, False)
    assert not talk.stream.is_ready
    assert talk.ask() is None
    right = talk.guess(3)
    talk.answer(4, [right[0], right[1], (right[2] + 1) % VOCAB], after_s=0.004)
    assert talk.stream.is_ready
    assert talk.ask() is None  # the guess has not ridden yet
    talk.step()
    assert talk.stream.tokens[1:] == right  # two guesses came true, and the target's own token
    ask = talk.ask()
    assert ask is not None
    # It wrote the first two guesses, which came true; so only the token behind them is new to it.
    assert (ask.start, unpack_tokens(ask.tokens)) == (6, [right[2]])
    talk.answer(7, talk.guess(3))
    talk.step()
    ask = talk.ask()
    assert ask is not None
    # All three came true, but the last was never written.
    assert (ask.start, unpack_tokens(ask.tokens)) == (9, talk.stream.tokens[-2:])
    assert talk.stream._account.stats().guess_ms == pytest.approx(4.0)


def test_one_token_at_least_is_told() -> None:
    talk = Talking(num=4)
    talk.begin()
    talk.ask()
    talk.answer(4, talk.guess(4))
    talk.step(num_drafts=1)  # fewer than there were: the text is no longer than what the draft model wrote
    ask = talk.ask()
    assert ask is not None
    assert (ask.start, unpack_tokens(ask.tokens)) == (5, talk.stream.tokens[-1:])


def test_a_late_guess_is_waited_for_no_longer_and_the_next_ask_waits_for_it() -> None:
    talk = Talking(num=2)
    talk.begin()
    talk.ask()
    talk.answer(4, talk.guess(2), after_s=0.05)  # now it is known what a guess takes
    talk.step()
    talk.ask()
    asked_at = talk.now
    talk.now = asked_at + LATE_FACTOR * 0.05 - 0.01
    assert talk.drafts.expire(talk.now) == []
    assert not talk.stream.is_ready
    talk.now = asked_at + LATE_FACTOR * 0.05 + 0.01
    assert talk.drafts.expire(talk.now) == []
    assert talk.stream.is_ready
    talk.step()
    assert talk.ask() is None
    num_tokens = len(talk.stream.tokens)
    talk.answer(3 + num_tokens - 1, [1, 2])  # too late to be of use
    assert not talk.stream.has_guess
    ask = talk.ask()
    assert ask is not None
    assert (ask.start, unpack_tokens(ask.tokens)) == (3 + num_tokens - 1, talk.stream.tokens[-1:])


def test_the_wait_is_bounded_both_ways() -> None:
    talk = Talking(num=1)
    talk.begin()
    talk.ask()  # nothing is known yet
    talk.drafts.expire(talk.now + MAX_WAIT_S - 0.01)
    assert not talk.stream.is_ready
    talk.answer(4, talk.guess(1), after_s=0.001)
    talk.step()
    talk.ask()
    talk.drafts.expire(talk.now + MIN_WAIT_S - 0.001)
    assert not talk.stream.is_ready
    talk.drafts.expire(talk.now + MIN_WAIT_S)
    assert talk.stream.is_ready


def test_a_lost_ask_turns_drafts_off_and_is_told_once() -> None:
    talk = Talking(num=1)
    talk.begin()
    talk.ask()
    assert texts(talk.drafts.expire(talk.now + LOST_S)) == [
        "a text goes on without drafts (deadline): the draft has not answered for 5 s. The same is not told again"
    ]
    assert talk.stream.is_ready
    talk.step()
    assert talk.ask() is None
    talk.drafts.add(talk.stream)  # as another stream would
    talk.ask()
    assert texts(talk.drafts.expire(talk.now + LOST_S)) == []


def test_refusals_and_nonsense_turn_drafts_off() -> None:
    for answer, word in (
        (Drafted(epoch=Epoch(1), results=(), failures=(StreamFailure(StreamId(1), "capacity", "no room"),)), "(capacity): no room"),
        (Drafted(epoch=Epoch(1), results=(DraftResult(StreamId(1), 4, pack_tokens([1, 2, 3])),)), "answered 3 tokens where 2 were"),
        (Drafted(epoch=Epoch(1), results=(DraftResult(StreamId(1), 4, pack_tokens([VOCAB])),)), f"answered token {VOCAB}"),
        (Drafted(epoch=Epoch(1), results=(DraftResult(StreamId(1), 4, b"odd"),)), "3 bytes"),
    ):
        talk = Talking(num=2)
        talk.begin()
        talk.ask()
        [text] = texts(talk.drafts.on_drafted(answer, talk.now))
        assert word in text
        assert talk.stream.is_ready
        assert not talk.stream.has_guess
        talk.step()
        assert talk.ask() is None


def test_a_prompt_goes_in_pieces_and_what_the_draft_cannot_hold_is_not_asked_for() -> None:
    talk = Talking([1] * (2 * PIECE_TOKENS + 1), context_length=3 * PIECE_TOKENS)
    messages = asked(talk.drafts, lambda _: 1.0, 0.0)
    assert [(ask.start, len(ask.tokens) // 4) for [ask] in messages] == [
        (0, PIECE_TOKENS), (PIECE_TOKENS, PIECE_TOKENS - 1), (2 * PIECE_TOKENS - 1, 2)
    ]  # fmt: skip
    assert Talking([1] * 64, context_length=64).ask() is None
    talk = Talking(num=8, context_length=6)
    talk.begin()
    ask = talk.ask()
    assert ask is not None
    assert (ask.num_positions, ask.num_drafts) == (6, 3)  # two of them are written behind the four positions of the text
    talk.answer(4, talk.guess(3))
    talk.step()
    assert len(talk.stream.tokens) == 5
    assert talk.ask() is None


def test_a_new_role_begins_anew() -> None:
    talk = Talking(num=2)
    talk.begin()
    talk.ask()
    talk.drafts.follow(Epoch(1), None, [talk.stream], talk.now)
    assert talk.stream.is_ready
    talk.step()
    assert talk.ask() is None
    talk.drafts.follow(Epoch(1), role(), [talk.stream], talk.now)
    ask = talk.ask()
    assert ask is not None
    assert (ask.start, unpack_tokens(ask.tokens)) == (0, [1, 2, 3])
    talk.answer(3, [])
    ask = talk.ask()
    assert ask is not None
    assert (ask.start, unpack_tokens(ask.tokens)) == (3, talk.stream.tokens)


# --- how many --------------------------------------------------------------------------------------------------------


def test_the_number_that_gives_most_tokens_per_second() -> None:
    def step_ms(rows: int) -> float:
        return 9.0 + rows

    assert num_to_ask([], step_ms=step_ms, guess_ms=lambda _: 0.0) == 0
    assert num_to_ask([0.9, 0.8, 0.7], step_ms=step_ms, guess_ms=lambda count: 1.0 * count) == 3
    assert num_to_ask([0.9, 0.8, 0.7], step_ms=step_ms, guess_ms=lambda count: 20.0 * count) == 0
    # A single one does not pay for the way to the draft model, four do.
    assert num_to_ask([1.0] * 4, step_ms=step_ms, guess_ms=lambda count: 15.0 + count) == 4
    assert num_to_ask([1.0], step_ms=step_ms, guess_ms=lambda count: 15.0 + count) == 0
    assert num_to_ask([0.5, 0.25, 0.1, 0.01], step_ms=step_ms, guess_ms=lambda count: 2.0 * count) == 1


def test_streams_that_ask_together_ask_for_the_same_number() -> None:
    """So their answers come together, and they go on in one step."""
    good, bad = Talking(), Talking()
    bad.stream.id = StreamId(2)
    bad.drafts = good.drafts
    good.drafts.add(bad.stream)
    assert len(asked(good.drafts, lambda _: 1.0, 0.0)) == 2  # both prompts
    for talk in (good, bad):
        talk.first_token()
        talk.answer(3, [])
    for _ in range(40):
        good.stream._acceptance.observe(6, 6)
        bad.stream._acceptance.observe(2, 3)
    [asks] = asked(good.drafts, lambda rows: 9.0 + 2 * rows, 0.0)
    numbers = [ask.num_drafts for ask in asks]
    assert [ask.stream for ask in asks] == [1, 2]
    assert numbers[0] == numbers[1] > 3


@pytest.mark.parametrize(("is_right", "guess_ms", "pays"), [(True, 1.0, True), (False, 1.0, False), (True, 30.0, False)])
def test_asks_follow_what_they_bring(is_right: bool, guess_ms: float, pays: bool) -> None:
    talk = Talking()
    talk.begin()
    asked: list[tuple[int, int]] = []
    while len(talk.stream.tokens) < 700:
        ask = talk.ask()
        if ask is not None:
            asked.append((len(talk.stream.tokens), ask.num_drafts))
            guess = talk.guess(ask.num_drafts, is_right=is_right)
            talk.answer(3 + len(talk.stream.tokens), guess, after_s=guess_ms * ask.num_drafts / 1e3)
        talk.step()
    if pays:
        assert asked[-1][1] == 8  # as many as it may
        assert len(asked) < 100
        return
    late = [(at, count) for at, count in asked if at > 50]
    assert all(count == PROBE_DRAFTS for _, count in late)
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(late)]
    assert min(gaps) >= PROBE_EVERY
    assert sorted(gaps) == gaps
    if is_right:  # not even right guesses pay
        assert min(gaps) >= MAX_PROBE_EVERY
    assert max(gaps) <= MAX_PROBE_EVERY + 4
    assert len(late) < 8


def test_the_wait_follows_a_worker_that_gets_busy_within_a_few_guesses() -> None:
    """Otherwise every guess would be late, waited for, and of no use."""
    talk = Talking(num=2)
    talk.begin()
    waits = []
    for turn in range(30):
        while talk.ask() is None:
            talk.step()
        asked_at, guess_s = talk.now, 0.06 if turn < 15 else 0.17
        guess = talk.guess(2)
        end = 3 + len(talk.stream.tokens)
        while talk.now < asked_at + guess_s:
            talk.now += 0.005
            talk.drafts.expire(talk.now)
        waits.append(talk.stream.awaits_guess)
        talk.answer(end, guess)
        talk.step()
    assert all(waits[:15])
    assert not waits[15]
    assert all(waits[20:])
