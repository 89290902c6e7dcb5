"""A session whose fleet has a worker that drafts: who waits for it, and who does not."""

from __future__ import annotations

import random

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
from langchain_pshard.pipeline.model_drafts import MAX_WAIT_S
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.session import Session
from langchain_pshard.pipeline.stream import StreamRequest
from tests.support.caller import Caller
from tests.unit.test_chain import A, B, C, drafting
from tests.unit.test_session import Fleet
from tests.unit.test_stream import VOCAB, fake_next, plain


class DraftFleet(Fleet):
    """The two workers of `Fleet`, and one that drafts at `C`."""

    def __init__(self, texts: dict[StreamId, list[int]], chance: float, draws: random.Random, *, max_steps_ahead: int = 7) -> None:
        super().__init__()
        options = ClientOptions(step_timeout_s=5.0, max_steps_ahead=max_steps_ahead)
        self.session = Session(ClientId("me"), [A, B, C], software="0.1.0", connect_timeout_s=30.0, options=options, now=0.0)
        self.asks: list[DraftAsk] = []
        self.guessing: dict[StreamId, list[int]] = {}
        self.num_restarts = 0
        self.texts = texts
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
            case Join(request=request, is_ring=is_ring):
                self.guessing.clear()
                self.reply(C, Joined(request=request, is_ring=is_ring))
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
        assert held == self.texts[ask.stream][: len(held)], "the draft model was told another text"
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


def submit(fleet: DraftFleet, number: int, *, by_model: bool, max_tokens: int = 20) -> Caller:
    caller = Caller()
    prompt = (1, 2, number)
    fleet.texts[StreamId(number)] = [*prompt, *plain(prompt, max_tokens, False)]
    request = StreamRequest(
        prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(), eos_token_ids=frozenset(), vocab_size=VOCAB,
        sink=caller.take, drafts_by_model=by_model, num_drafts=3,
    )  # fmt: skip
    fleet.do(fleet.session.submit(StreamId(number), request, fleet.now))
    return caller


def test_others_go_on_while_a_guess_is_on_its_way() -> None:
    fleet = DraftFleet({}, 1.0, random.Random(1))
    slow, quick = submit(fleet, 1, by_model=True), submit(fleet, 2, by_model=False)
    while not fleet.asks:
        fleet.handle_one()
    fleet.answer_ask("there")  # the prompt
    fleet.settle()
    assert len(fleet.asks) == 1
    assert quick.tokens == plain((1, 2, 2), 20, False)
    assert (len(quick.ends), len(slow.ends)) == (1, 0)
    num_waiting = len(slow.tokens)
    assert num_waiting < 20
    fleet.pass_time(MAX_WAIT_S - 0.1)
    fleet.settle()
    assert len(slow.tokens) == num_waiting
    fleet.pass_time(0.2)
    fleet.settle()  # and on it goes without asking again, until the answer is there
    assert slow.tokens == plain((1, 2, 1), 20, False)
    assert len(fleet.asks) == 0  # its end took the ask back


def test_a_prompt_that_the_draft_model_still_reads_is_not_waited_for() -> None:
    fleet = DraftFleet({}, 1.0, random.Random(1))
    caller = submit(fleet, 1, by_model=True)
    fleet.settle()
    assert caller.tokens == plain((1, 2, 1), 20, False)
    assert len(caller.ends) == 1


def test_right_guesses_save_steps_and_a_lost_role_costs_only_them() -> None:
    fleet = DraftFleet({}, 1.0, random.Random(1))
    caller = submit(fleet, 1, by_model=True, max_tokens=200)
    num_steps = 0
    while len(caller.tokens) < 100:
        while fleet.sent:
            fleet.handle_one()
        if fleet.asks:
            fleet.answer_ask("there")
        elif fleet.steps:
            fleet.answer_step()
            num_steps += 1
    assert num_steps <= 27  # three guesses and one token a step, and the first ones
    fleet.restart()
    fleet.settle()
    assert caller.tokens == plain((1, 2, 1), 200, False)
    assert len(caller.ends) == 1
