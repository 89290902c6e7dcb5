"""Guesses of a draft model that is right, wrong, late, lost, full, gone or restarted: the tokens are those of plain decoding, every stream
ends, and what the client believes the draft model to hold is what it holds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.messages import StreamId
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.stream import StreamRequest
from tests.support.caller import Caller
from tests.unit.test_session_drafts import DraftFleet
from tests.unit.test_stream import EOS, VOCAB, plain

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
    max_steps_ahead=st.sampled_from([0, 1, 7, 64]),
    order=st.randoms(use_true_random=False),
)
def test_any_fate_of_any_guess(
    streams: list[tuple[list[int], int, bool, int | None, bool]],
    chance: float,
    trouble: float,
    max_steps_ahead: int,
    order: random.Random,
) -> None:
    numbered = {StreamId(number): each for number, each in enumerate(streams, start=1)}
    texts = {number: [*prompt, *plain(prompt, max_tokens, has_eos)] for number, (prompt, max_tokens, _, _, has_eos) in numbered.items()}
    fleet = DraftFleet(texts, chance, order, max_steps_ahead=max_steps_ahead)
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
