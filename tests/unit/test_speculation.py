"""How many drafts ride, what steps cost, and the n-gram drafter against a naive search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.messages import StageTiming
from langchain_pshard.pipeline.adaptive_k import Acceptance, Offer, choose
from langchain_pshard.pipeline.cost_line import CostLine
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.ngram import MAX_NGRAM, NgramDrafter
from langchain_pshard.pipeline.prompt_costs import PromptLoad
from langchain_pshard.pipeline.speculation import num_accepted
from langchain_pshard.pipeline.step_costs import StepCosts

# --- the n-gram drafter ----------------------------------------------------------------------------------------------


def naive(text: Sequence[int], max_tokens: int) -> list[int]:
    """Search the whole text for the latest earlier occurrence of its longest suffix, and copy, over the end if need be."""
    for length in range(min(MAX_NGRAM, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if list(text[end - length : end]) == list(text[-length:]):
                copied = list(text)
                while len(copied) < len(text) + max_tokens:
                    copied.append(copied[end + len(copied) - len(text)])
                return copied[len(text) :]
    return []


TEXTS = st.lists(st.integers(0, 4), max_size=60)


@given(prompt=TEXTS, pieces=st.lists(TEXTS, max_size=5), max_tokens=st.integers(0, 20))
def test_ngram_index_finds_what_a_naive_search_finds(prompt: list[int], pieces: list[list[int]], max_tokens: int) -> None:
    drafting = NgramDrafter().begin(prompt)
    text = list(prompt)
    assert drafting.propose(max_tokens) == naive(text, max_tokens)
    for piece in pieces:
        drafting.extend(piece)
        text += piece
        assert drafting.propose(max_tokens) == naive(text, max_tokens)
        assert drafting.propose(max_tokens) == naive(text, max_tokens)  # asking changes nothing


def test_ngrams_of_different_lengths_never_meet() -> None:
    assert NgramDrafter().begin([0, 0, 5, 0]).propose(2) == [5, 0]
    assert NgramDrafter().begin([2**31 - 1, 7, 2**31 - 1]).propose(1) == [7]


# --- acceptance and the choice -----------------------------------------------------------------------------------------


def test_acceptance_is_learned_by_depth() -> None:
    acceptance = Acceptance()
    assert acceptance.gains(3) == [0.5, 0.25, 0.125]
    for _ in range(200):
        acceptance.observe(2, 3)  # two right, the third wrong
    first, second, third, fourth = acceptance.gains(4)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.1
    assert fourth <= third


@given(
    observed=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=60),
    num_drafts=st.integers(0, 40),
)
def test_gains_are_chances_and_never_rise(observed: list[tuple[int, int]], num_drafts: int) -> None:
    acceptance = Acceptance()
    for num_right, num_wrong in observed:
        acceptance.observe(num_right, num_right + min(1, num_wrong))
    gains = acceptance.gains(num_drafts)
    assert len(gains) == num_drafts
    assert all(0 <= gain <= 1 for gain in gains)
    assert gains == sorted(gains, reverse=True)


GAINS = st.lists(st.floats(0, 1), max_size=4).map(lambda chances: [min(chances[: idx + 1]) ** (idx + 1) for idx in range(len(chances))])


@given(
    offers=st.lists(GAINS, min_size=1, max_size=3),
    base=st.floats(1, 100),
    slope=st.floats(0.01, 10),
    most=st.integers(0, 12),
)
def test_the_choice_is_the_best_of_all(offers: list[list[float]], base: float, slope: float, most: int) -> None:
    def step_ms(rows: int) -> float:
        return base + slope * rows

    def rate(counts: Sequence[int]) -> float:
        tokens = len(offers) + sum(sum(gains[:count]) for gains, count in zip(offers, counts, strict=True))
        return tokens / step_ms(len(offers) + sum(counts))

    chosen = choose([Offer(gains) for gains in offers], max_drafts=most, step_ms=step_ms)
    assert sum(chosen) <= most
    assert all(count <= len(gains) for count, gains in zip(chosen, offers, strict=True))
    best = max(rate(counts) for counts in product(*(range(len(gains) + 1) for gains in offers)) if sum(counts) <= most)
    assert rate(chosen) == pytest.approx(best, rel=1e-9)


def test_who_chose_a_number_gets_it_and_hopeless_guesses_get_nothing() -> None:
    def step_ms(rows: int) -> float:
        return 10.0 + rows

    hopeless, good = [0.01] * 5, [0.9, 0.8, 0.7]
    assert choose([Offer(hopeless), Offer(hopeless, 3), Offer(good)], max_drafts=100, step_ms=step_ms) == [0, 3, 3]
    assert choose([Offer(hopeless, 5), Offer(good, 9)], max_drafts=6, step_ms=step_ms) == [5, 1]
    assert choose([Offer([]), Offer([])], max_drafts=6, step_ms=step_ms) == [0, 0]


def test_a_long_way_makes_doubtful_drafts_worth_their_rows() -> None:
    gains = [0.4**depth for depth in range(1, 9)]
    near = choose([Offer(gains)], max_drafts=100, step_ms=lambda rows: 5.0 + 5.0 * rows)
    far = choose([Offer(gains)], max_drafts=100, step_ms=lambda rows: 5.0 + 5.0 * rows + 300.0)
    assert near == [0]
    assert far[0] >= 3


def test_adaptive_k_never_loses_much_and_gains_where_there_is_something_to_gain() -> None:
    """Rows that cost a quarter of a step: texts that are never, sometimes, always and in turn predictable."""

    def time_of(chances: Sequence[float], *, num_fixed: int | None = None) -> float:
        draws, acceptance, done, spent = random.Random(5), Acceptance(), 0, 0.0
        while done < len(chances):
            guess = min(16, len(chances) - done)
            right = 0
            while right < guess and draws.random() < chances[done + right]:
                right += 1
            offer = Offer(acceptance.gains(guess), num_fixed)
            count = choose([offer], max_drafts=100, step_ms=lambda rows: 0.75 + 0.25 * rows)[0]
            new = min(right, count) + 1
            acceptance.observe(min(right, new), min(guess, new))
            done += new
            spent += 1 + 0.25 * count
        return spent

    never, always = [0.02] * 512, [0.97] * 512
    assert time_of(never) < 1.03 * 512
    assert time_of(never, num_fixed=3) > 1.6 * 512
    assert time_of(always) < 512 / 2.5
    assert time_of([*never, *always]) < 512 * 1.03 + 512 / 2.3  # it begins again


# --- what steps cost ---------------------------------------------------------------------------------------------------


def test_a_line_is_learned_where_it_is_used_and_one_hiccup_is_no_price() -> None:
    line = CostLine(0.1)
    for turn in range(100):
        count = 1 + turn % 9
        line.observe(count, 10.0 + 2.0 * count)
    assert line.at(1) == pytest.approx(12.0, rel=0.05)
    assert line.at(32) == pytest.approx(74.0, rel=0.05)
    line.observe(5, 5000.0)
    assert line.at(5) < 22.0


def test_a_time_of_nothing_is_no_price_for_ever() -> None:
    line = CostLine(0.1)
    line.observe(1, 0.0)
    for _ in range(200):
        line.observe(1, 10.0)
    assert line.at(1) == pytest.approx(10.0, rel=0.1)


def test_a_slope_that_is_not_seen_any_more_goes_back_to_the_prior() -> None:
    line = CostLine(0.1)
    for _ in range(20):
        line.observe(1, 10.0)
        line.observe(4, 40.0)
    steep = line.slope_ms
    for _ in range(400):
        line.observe(1, 10.0)
    assert steep > 8.0
    assert line.slope_ms == pytest.approx(1.0, rel=0.1)


@given(
    observed=st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1e4)), min_size=1, max_size=50),
    count=st.integers(0, 500),
)
def test_costs_are_never_negative_and_never_fall(observed: list[tuple[int, float]], count: int) -> None:
    line = CostLine(0.1)
    for seen, milliseconds in observed:
        line.observe(seen, milliseconds)
    assert line.base_ms >= 0
    assert line.slope_ms >= 0
    assert line.at(count + 1) >= line.at(count)


def test_the_way_is_what_the_stages_do_not_account_for() -> None:
    costs = StepCosts(2)
    timings = [StageTiming(1000, 4000), StageTiming(0, 5000)]
    assert costs.observe(num_rows=1, prompt=PromptLoad(), timings=timings, round_trip_ms=16.0) == 6.0
    assert costs.observe(num_rows=1, prompt=PromptLoad(), timings=timings, round_trip_ms=110.0) == 100.0
    assert costs.way_ms == 6.0  # the other one waited behind somebody
    assert costs.cycle_ms(1, 1) == pytest.approx(9.0 + 6.0 + 0.6, rel=0.05)
    before = costs.cycle_ms(1, 1)
    costs.observe(num_rows=1, prompt=PromptLoad.of(0, 64), timings=[StageTiming(0, 10**6)] * 2, round_trip_ms=2e3)
    assert costs.cycle_ms(1, 1) <= before  # a mixed step teaches nothing of rows
    assert costs.prompt_prices(PromptLoad())[0].at(PromptLoad.of(0, 64)) > 500.0  # and of prompts what rows do not account for
    assert costs.observe(num_rows=1, prompt=PromptLoad(), timings=timings[:1], round_trip_ms=1.0) == 0.0


# --- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "magic"}, "draft='magic' is unknown; valid: 'auto', 'ngram', 'model', None"),
        ({"prefix_cache": "most"}, "prefix_cache='most' is unknown; valid: True, False, 'all'"),
        ({"draft_tokens": 0}, "draft_tokens=0 is out of range; valid: 'auto', or 1 to 64"),
        ({"draft_tokens": True}, "draft_tokens=True"),
        ({"draft_tokens": 65}, "draft_tokens=65"),
        ({"draft_tokens": "many"}, "draft_tokens='many'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        GenerationParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafts", "sampled", "expected"),
    [([], [5], 0), ([5], [5, 6], 1), ([5, 7], [5, 6, 8], 1), ([4, 6], [5, 6, 7], 0), ([5, 6], [5, 6, 7], 2)],
)
def test_num_accepted(drafts: list[int], sampled: list[int], expected: int) -> None:
    assert num_accepted(drafts, sampled) == expected
