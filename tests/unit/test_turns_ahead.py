"""How many steps the client lets the chain take by itself, and how it keeps its books while the chain does; without a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.grammar import Grammar, GrammarKind
from langchain_pshard.core.messages import MAX_STEPS_AHEAD, Slice, SliceKind, SliceResult, StepId, StreamId
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.prompt_costs import PromptLoad
from langchain_pshard.pipeline.step_costs import StepCosts
from tests.support.client_turns import EOS, TIMINGS, Client, granted, route

# --- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_steps_ahead", "max_tokens", "expected"), [(7, 100, 7), (0, 100, 0), (64, 100, 64), (7, 5, 3), (7, 9, 7), (7, 8, 6), (7, 2, 0)]
)
def test_no_more_than_the_options_and_the_text_allow(max_steps_ahead: int, max_tokens: int, expected: int) -> None:
    client = Client(max_steps_ahead)
    client.decoding(1, max_tokens)
    assert granted(client.turn()) == [(1, expected)]


def test_the_row_is_the_last_token_and_samples_one() -> None:
    client = Client()
    client.decoding(1)
    [piece] = client.turn().slices
    assert piece == Slice(stream=StreamId(1), start=3, tokens=pack_tokens([5]), kind=SliceKind.ROWS, num_sampled=1, num_ahead=7)


def test_all_streams_of_a_turn_get_what_the_one_with_the_least_left_can_have() -> None:
    client = Client()
    for number, max_tokens in ((1, 100), (2, 5), (3, 50)):
        client.add(number, max_tokens)
    client.land_prompts()
    assert granted(client.turn()) == [(1, 3), (2, 3), (3, 3)]


def test_none_while_a_prompt_waits() -> None:
    client = Client()
    client.decoding(1)
    client.add(2, prompt=[1] * 2000)
    turn = client.turn()
    assert granted(turn) == [(1, 0)]
    assert [piece.stream for piece in turn.slices] == [1, 2]
    client.land(turn.step_id)
    assert granted(client.turn()) == [(1, 0)]


def test_none_while_the_answer_to_a_prompt_is_awaited() -> None:
    client = Client()
    client.decoding(1)
    assert granted(client.turn()) == [(1, 7)]
    client.land(2)
    client.add(2)
    prompt = client.turn()
    assert [(piece.stream, piece.num_sampled) for piece in prompt.slices] == [(2, 1)]
    for step_id in range(3, 10):
        client.land(step_id)
    alone = client.turn()
    assert granted(alone) == [(1, 0)]
    client.land(prompt.step_id)
    client.land(alone.step_id)
    assert sorted(granted(client.turn())) == [(1, 7), (2, 7)]


def test_a_prompt_that_came_while_the_chain_is_ahead_goes_at_once() -> None:
    client = Client()
    client.decoding(1)
    client.turn()
    client.add(2)
    turn = client.turn()
    assert [(piece.stream, piece.kind) for piece in turn.slices] == [(2, SliceKind.PREFILL)]


def test_none_beside_drafts_and_drafts_only_in_steps_of_the_client() -> None:
    class Sure:
        def extend(self, tokens: Sequence[int]) -> None: ...

        def propose(self, max_tokens: int) -> Sequence[int]:
            return [6, 7][:max_tokens]

    client = Client()
    client.add(1)
    client.add(2, drafting=Sure(), num_drafts=2)
    client.land_prompts()
    turn = client.turn()
    assert [(piece.stream, piece.num_sampled, piece.num_ahead) for piece in turn.slices] == [(1, 1, 0), (2, 3, 0)]


@pytest.mark.parametrize("more", [{"grammar": Grammar(GrammarKind.REGEX, "a*")}, {"drafts_by_model": True}], ids=["grammar", "draft model"])
def test_none_where_each_answer_may_bring_drafts(more: dict[str, Any]) -> None:
    client = Client()
    client.decoding(1, **more)
    assert granted(client.turn()) == [(1, 0)]


class Silent:
    """Guesses when it is told to."""

    def __init__(self) -> None:
        self.guess: tuple[int, ...] = ()
        self.told: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.told += tokens

    def propose(self, max_tokens: int) -> Sequence[int]:
        return self.guess[:max_tokens]


def ahead_by_turn(client: Client, num_turns: int, after_s: float) -> list[int]:
    """Steps ahead of a lone stream, turn by turn, when every answer takes so long."""
    found: list[int] = []
    for _ in range(num_turns):
        turn = client.turn()
        [(_, num_ahead)] = granted(turn)
        found.append(num_ahead)
        for step_id in range(turn.step_id, turn.step_id + num_ahead + 1):
            client.land(step_id, after_s=after_s)
    return found


@pytest.mark.parametrize(
    # Two stages of 1.3 ms, of the way between machines a third is spared. A turn in which a draft would have ridden is worth 1.5 tokens.
    ("after_s", "patience"),
    [(0.052, 1.5 * 52.6 / (50 / 3)), (0.005, 1.5 * 5.6 / 1.0), (0.0023, 1.5 * 2.9 / 0.1)],
)
def test_a_stream_that_drafts_goes_ahead_the_longer_it_has_not_and_the_sooner_the_farther_the_client(
    after_s: float, patience: float
) -> None:
    client = Client()
    client.decoding(1, 10_000, drafting=Silent(), num_drafts=1, after_s=after_s)
    found = ahead_by_turn(client, round(8.5 * patience), after_s)
    assert found == sorted(found)
    assert set(found) == set(range(8))
    assert found.index(1) == pytest.approx(patience, rel=0.2, abs=1)
    assert found.index(7) == pytest.approx(7 * patience, rel=0.2, abs=1)


def test_where_the_client_costs_no_way_a_stream_that_drafts_does_not_go_ahead() -> None:
    client = Client()
    client.decoding(1, 1000, drafting=Silent(), num_drafts=1, after_s=0.002)
    assert set(ahead_by_turn(client, 100, 0.002)) == {0}


def test_a_draft_that_rides_ends_going_ahead() -> None:
    client, drafter = Client(), Silent()
    stream = client.decoding(1, 1000, drafting=drafter, num_drafts=1, after_s=0.05)
    assert ahead_by_turn(client, 60, 0.05)[-1] == 7
    drafter.guess = (6,)
    turn = client.turn()
    assert [(piece.num_sampled, piece.num_ahead) for piece in turn.slices] == [(2, 0)]
    assert drafter.told == stream.tokens  # what the chain said by itself included
    stream.apply(SliceResult(stream.id, pack_tokens([6, 5])), client.turns.landed(turn.step_id, TIMINGS, 1.0).trip, 1.0)  # type: ignore[union-attr]
    drafter.guess = ()
    assert granted(client.turn()) == [(1, 0)]  # and all over again


@pytest.mark.parametrize(("value", "is_fine"), [(-1, False), (0, True), (MAX_STEPS_AHEAD, True), (MAX_STEPS_AHEAD + 1, False)])
def test_the_option_is_checked(value: int, is_fine: bool) -> None:
    if is_fine:
        assert ClientOptions(max_steps_ahead=value).max_steps_ahead == value
        return
    with pytest.raises(InvalidOptionError, match=f"max_steps_ahead={value} is out of range; valid: 0 to {MAX_STEPS_AHEAD}"):
        ClientOptions(max_steps_ahead=value)


# --- the books -------------------------------------------------------------------------------------------------------


def test_ids_follow_one_another_and_are_used_once() -> None:
    client = Client(3)
    client.decoding(1)
    turn = client.turn()
    assert (turn.step_id, client.in_flight) == (2, [2])
    for step_id in (2, 3, 4):
        client.land(step_id)
        assert client.in_flight == [step_id + 1]
        assert client.waits
    client.land(5)
    assert client.in_flight == []
    assert client.turn().step_id == 6


def test_an_answer_that_comes_twice_or_before_its_time_counts_once() -> None:
    client = Client()
    stream = client.decoding(1)
    turn = client.turn()
    assert client.turns.landed(StepId(turn.step_id + 1), TIMINGS, client.now) is None
    client.land(turn.step_id)
    assert client.turns.landed(turn.step_id, TIMINGS, client.now) is None
    assert (len(stream.tokens), client.in_flight) == (2, [turn.step_id + 1])


def test_a_stream_is_told_of_every_token_as_it_comes() -> None:
    client = Client(3)
    stream = client.decoding(1)
    turn = client.turn()
    assert (stream.num_in_flight, stream.waiting_since) == (4, client.now)
    for offset, token in enumerate((6, 7, 8, 9)):
        assert not stream.is_ready
        delivery = client.land(turn.step_id + offset, {1: token})[1]
        assert (delivery.tokens, delivery.finish_reason) == ((token,), None)
        assert stream.waiting_since == client.now  # it gets on: no timeout of a step counts from before
    assert stream.is_ready
    assert stream.tokens == [5, 6, 7, 8, 9]


def test_a_stream_that_ends_in_the_middle_leaves_nothing_behind() -> None:
    client = Client()
    client.decoding(1)
    turn = client.turn()
    client.land(turn.step_id)
    assert client.land(turn.step_id + 1, {1: EOS})[1].finish_reason is not None
    assert client.in_flight == []
    for late in range(2, 8):  # whatever was on its way
        assert client.turns.landed(StepId(turn.step_id + late), TIMINGS, client.now) is None
    client.decoding(2)
    assert granted(client.turn()) == [(2, 7)]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_one_of_several_ends_and_the_others_go_on(is_cancelled: bool) -> None:
    client = Client(3)
    for number in (1, 2):
        client.add(number)
    client.land_prompts()
    turn = client.turn()
    assert granted(turn) == [(1, 3), (2, 3)]
    if is_cancelled:
        client.end(2)
    else:
        assert sorted(client.land(turn.step_id, {2: EOS})) == [1, 2]
    for step_id in range(turn.step_id + (not is_cancelled), turn.step_id + 4):
        assert sorted(client.land(step_id)) == [1]
    assert client.in_flight == []
    assert granted(client.turn()) == [(1, 3)]


def test_a_new_chain_begins_with_nothing_under_way_and_other_ids() -> None:
    client = Client()
    client.decoding(1)
    turn = client.turn()
    client.turns.reset(route(2), max_steps_ahead=7)
    client.streams.clear()
    assert client.in_flight == []
    client.add(2)
    assert client.turn().step_id == turn.step_id + 8


@pytest.mark.parametrize(("num_stages", "num_hops"), [(1, 2 + 2 + 3 * 0), (2, 3 + 3 + 3 * 2)])
def test_steps_links_and_times_are_counted(num_stages: int, num_hops: int) -> None:
    client = Client(3, num_stages=num_stages)
    stream = client.decoding(1)
    turn = client.turn()
    for offset in range(4):
        stats = client.land(turn.step_id + offset, after_s=0.002 if offset == 3 else 0.010)[1].stats
    assert stats.num_steps == 5
    assert stats.num_hops == num_hops
    assert stats.stage_compute_ms == (5.0,) * num_stages
    # From one answer to the next, without what the stages took: the prompt's 5 ms, three times 10, and 2; between steps that a lone worker
    # takes by itself there is no way.
    assert stats.way_ms == pytest.approx(37.0 - 5 * num_stages if num_stages > 1 else (5.0 - 1) + (10.0 - 1))
    assert stats.hop_ms == pytest.approx(stats.way_ms / num_hops)
    assert client.turns._costs.way_ms == pytest.approx(5.0 - num_stages)  # of the prompt: a step of the chain's own tells nothing of it
    assert stream.is_ready


def test_what_rows_cost_is_learned_from_those_that_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(3)
    for number in (1, 2, 3):
        client.add(number)
    client.land_prompts()
    seen: list[int] = []
    observe = client.turns._costs.observe

    def watched(*, num_rows: int, **more: Any) -> float:
        seen.append(num_rows)
        return observe(num_rows=num_rows, **more)

    monkeypatch.setattr(client.turns._costs, "observe", watched)
    turn = client.turn()
    client.end(3)  # whose row is in the step that is under way, and in none that follows
    client.land(turn.step_id)
    client.land(turn.step_id + 1, {2: EOS})
    client.land(turn.step_id + 2)
    assert seen == [3, 2, 1]


def test_what_a_round_trip_takes_is_learned_from_the_clients_own_steps() -> None:
    costs = StepCosts(2)
    for is_round, round_trip_ms in ((True, 12.0), (False, 5.0), (True, 11.0), (False, 3.0)):
        way_ms = costs.observe(num_rows=1, prompt=PromptLoad(), timings=TIMINGS, round_trip_ms=round_trip_ms, is_round=is_round)
        assert way_ms == round_trip_ms - 2.0
    assert costs.way_ms == 9.0
