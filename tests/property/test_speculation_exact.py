"""Whatever drafts ride, the tokens are those of plain decoding: the whole client state machine over a deterministic fake fleet."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.messages import StreamId
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.ngram import NgramDrafter
from langchain_pshard.pipeline.speculation import Drafting
from langchain_pshard.pipeline.stream import StreamRequest
from tests.support.caller import Caller
from tests.unit.test_session import Fleet
from tests.unit.test_stream import EOS, VOCAB, fake_next, plain


class Random:
    """Guesses that are right with a given chance, each draft apart."""

    def __init__(self, prompt: Sequence[int], chance: float, seed: int) -> None:
        self._text = list(prompt)
        self._chance = chance
        self._draws = random.Random(seed)

    def extend(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def propose(self, max_tokens: int) -> Sequence[int]:
        text = list(self._text)
        for _ in range(self._draws.randint(0, max_tokens)):
            token = fake_next(text)
            text.append(token if self._draws.random() < self._chance else (token + 1) % VOCAB)
        return text[len(self._text) :]


STREAMS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=300),
        st.integers(1, 40),
        st.sampled_from([None, "ngram", 0.0, 0.5, 0.75, 1.0]),
        st.one_of(st.none(), st.integers(1, 20)),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(streams=STREAMS, max_steps_ahead=st.sampled_from([0, 1, 7, 64]), order=st.randoms(use_true_random=False))
def test_any_drafter_any_acceptance_any_number_of_drafts(
    streams: list[tuple[list[int], int, str | float | None, int | None, bool]], max_steps_ahead: int, order: random.Random
) -> None:
    fleet = Fleet(max_steps_ahead=max_steps_ahead)
    callers: list[Caller] = []
    for number, (prompt, max_tokens, drafter, num_drafts, has_eos) in enumerate(streams, start=1):
        drafting: Drafting | None = None
        if drafter == "ngram":
            drafting = NgramDrafter().begin(prompt)
        elif isinstance(drafter, float):
            drafting = Random(prompt, drafter, number)
        callers.append(Caller())
        request = StreamRequest(
            prompt=tuple(prompt), max_tokens=max_tokens, sampling=SamplingParams(), eos_token_ids=frozenset({EOS} if has_eos else ()),
            vocab_size=VOCAB, sink=callers[-1].take, drafting=drafting, num_drafts=num_drafts,
        )  # fmt: skip
        fleet.do(fleet.session.submit(StreamId(number), request, fleet.now))
    while fleet.sent or fleet.steps:
        fleet.now += 0.001
        if fleet.steps and (not fleet.sent or order.random() < 0.3):
            fleet.answer_step()
        else:
            fleet.handle_one()
    for (prompt, max_tokens, _, _, has_eos), caller in zip(streams, callers, strict=True):
        assert caller.tokens == plain(prompt, max_tokens, has_eos)
        assert len(caller.ends) == 1
    assert not fleet.reserved
