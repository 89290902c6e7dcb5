"""Guesses of a draft model that is right, wrong, late, lost, full, gone or restarted: the tokens are those of plain decoding, every stream
ends, and what the client believes the draft model to hold is what it holds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.messages import (
    ClientId,
    Close,
    Draft,
    DraftAsk,
    Drafted,
    DraftResult,
    Hello,
    Join,
    Joined,
    Message,
    Ping,
    Pong,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.session import Session
from langchain_pshard.pipeline.stream import StreamRequest
from tests.unit.test_chain import A, B, C, drafting
from tests.unit.test_session import Caller, Fleet
from tests.unit.test_stream import EOS, VOCAB, fake_next, plain


class DraftFleet(Fleet):
    """The two workers of `Fleet`, and one that drafts at `C`."""

    def __init__(self, texts: dict[StreamId, list[int]], chance: float, draws: random.Random) -> None:
        super().__init__()
        self.session = Session(
            ClientId("me"), [A, B, C], software="0.1.0", connect_timeout_s=30.0, options=ClientOptions(step_timeout_s=5.0), now=0.0
        )
        self.asks: list[DraftAsk] = []
        self.guessing: dict[StreamId, list[int]] = {}
        self.num_restarts = 0
        self._texts = texts
        self._chance = chance
        self._draws = draws

    def handle_one(self) -> None:
        address, message = self.sent[0]
        if address != C:
            return super().handle_one()
        self.sent.pop(0)
        match message:
            case Hello():
                self.reply(C, drafting(worker=f"d{self.num_restarts}"))
            case Join(request=request):
                self.guessing.clear()
                self.reply(C, Joined(request=request))
            case Ping(request=request):
                self.reply(C, Pong(request=request))
            case Draft(asks=asks):
                self.asks += asks
            case Close(streams=streams):
                self.asks = [ask for ask in self.asks if ask.stream not in streams]
                for stream in streams:
                    self.guessing.pop(stream, None)
        return None

    def answer_ask(self, fate: str) -> None:
        ask = self.asks.pop(0)
        if fate == "lost":
            return None
        held = self.guessing.setdefault(ask.stream, [])
        if fate == "full" or ask.start > len(held):
            code = "capacity" if fate == "full" else "state-lost"
            return self._say(Drafted(epoch=self.epoch, results=(), failures=(StreamFailure(ask.stream, code, fate),)))
        held[ask.start :] = unpack_tokens(ask.tokens)
        assert held == self._texts[ask.stream][: len(held)], "the draft model was told another text"
        end = len(held)
        assert end + max(0, ask.num_drafts - 1) <= ask.num_positions
        for _ in range(ask.num_drafts):
            token = fake_next(held)
            held.append(token if self._draws.random() < self._chance else (token + 1) % VOCAB)
        guess = held[end:]
        del held[max(end, len(held) - 1) :]  # the last guess is never taken in
        return self._say(Drafted(epoch=self.epoch, results=(DraftResult(ask.stream, end, pack_tokens(guess)),)))

    def _say(self, message: Message) -> None:
        self.reply(C, message)

    def restart(self) -> None:
        """The worker that drafts dies, and is there again with nothing in its memory."""
        self.num_restarts += 1
        self.asks.clear()
        self.guessing.clear()
        self.sent = [each for each in self.sent if each[0] != C]
        self.do(self.session.on_lost(C, self.now))


STREAMS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=80),
        st.integers(1, 40),
        st.sampled_from([True, True, False]),
        st.one_of(st.none(), st.integers(1, 20)),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(
    streams=STREAMS,
    chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    trouble=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    order=st.randoms(use_true_random=False),
)
def test_any_fate_of_any_guess(
    streams: list[tuple[list[int], int, bool, int | None, bool]], chance: float, trouble: float, order: random.Random
) -> None:
    numbered = {StreamId(number): each for number, each in enumerate(streams, start=1)}
    texts = {number: [*prompt, *plain(prompt, max_tokens, has_eos)] for number, (prompt, max_tokens, _, _, has_eos) in numbered.items()}
    fleet = DraftFleet(texts, chance, order)
    callers: dict[StreamId, Caller] = {}
    for number, (prompt, max_tokens, by_model, num_drafts, has_eos) in numbered.items():
        callers[number] = Caller()
        request = StreamRequest(
            prompt=tuple(prompt), max_tokens=max_tokens, sampling=SamplingParams(), eos_token_ids=frozenset({EOS} if has_eos else ()),
            vocab_size=VOCAB, sink=callers[number].take, drafts_by_model=by_model, num_drafts=num_drafts,
        )  # fmt: skip
        fleet.do(fleet.session.submit(number, request, fleet.now))
    while not all(caller.ends for caller in callers.values()):
        fleet.now += 0.001
        choices = [name for name, there in (("sent", fleet.sent), ("step", fleet.steps), ("ask", fleet.asks)) if there]
        match order.choice(choices) if choices else "time":
            case "sent":
                fleet.handle_one()
            case "step":
                fleet.answer_step()
            case "ask":
                if order.random() < trouble / 5:
                    fleet.restart()
                elif order.random() < trouble:
                    fleet.answer_ask(order.choice(["lost", "full", "late"]))
                else:
                    fleet.answer_ask("there")
            case _:
                fleet.pass_time(0.05)
        if not fleet.sent and not fleet.steps and order.random() < 0.1:  # what is late is the draft model's answer alone
            fleet.pass_time(order.choice([0.05, 0.3, 1.1]))
    for number, (prompt, max_tokens, _, _, has_eos) in numbered.items():
        assert callers[number].tokens == plain(prompt, max_tokens, has_eos)
    while fleet.sent:
        fleet.handle_one()
    assert not fleet.reserved
    assert not fleet.guessing
