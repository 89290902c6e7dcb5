"""What prompt tokens cost, learned from a simulated stage, and how many fit into a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import astuple

from langchain_pshard.pipeline.prompt_costs import PromptFit, PromptLoad, PromptPrice
from tests.support.simulated_prefill import MEASURED, price

PRICES = st.builds(price, st.floats(0, 50), st.floats(1e-3, 5), st.floats(0, 1e-2))
Lengths = Callable[[], Iterator[int]]


def every(num_tokens: int) -> Lengths:
    return lambda: iter(lambda: num_tokens, None)


def of_one_duration() -> Iterator[int]:
    """Eleven chunks of a prompt of 1,000."""
    return iter([115, 107, 101, 97, 92, 88, 85, 82, 80, 77, 76])


def of_any_length() -> Iterator[int]:
    chooser = random.Random(1)
    return (chooser.randint(32, 256) for _ in count())


def prompt(lengths: Lengths, num_tokens: int = 1_000) -> Iterator[PromptLoad]:
    """The chunks of one prompt."""
    start = 0
    for length in lengths():
        piece = min(length, num_tokens - start)
        yield PromptLoad.of(start, piece)
        start += piece
        if start == num_tokens:
            return


def learned(stage: PromptPrice, lengths: Lengths, *, num_prompts: int = 3, disturbed: Callable[[float], float] = float) -> PromptPrice:
    """What is known of a stage that computed so many prompts."""
    fit = PromptFit()
    for _ in range(num_prompts):
        for load in prompt(lengths):
            fit.observe(load, disturbed(stage.at(load)))
    return fit.price


def test_a_load_is_the_same_however_it_is_cut() -> None:
    assert PromptLoad.of(0, 4) == PromptLoad(4, 8.0)
    assert PromptLoad.of(100, 4) == PromptLoad(4, 408.0)
    assert sum([PromptLoad.of(0, 30), PromptLoad.of(30, 70)], start=PromptLoad()) == PromptLoad.of(0, 100)
    assert not PromptLoad()
    assert PromptLoad.of(0, 1)


def test_a_token_costs_more_the_later_it_stands() -> None:
    assert MEASURED.at(PromptLoad.of(0, 250)) == pytest.approx(2.5 + 56.25 + 4.375)
    assert MEASURED.at(PromptLoad.of(750, 250)) == pytest.approx(2.5 + 56.25 + 30.625)


@given(cost=PRICES, start=st.integers(0, 100_000), num_tokens=st.integers(1, 512))
def test_the_tokens_of_a_time_are_those_that_take_it(cost: PromptPrice, start: int, num_tokens: int) -> None:
    work_ms = cost.work_ms(PromptLoad.of(start, num_tokens))
    assert cost.tokens_within(work_ms, start) == pytest.approx(num_tokens, rel=1e-6)
    assert cost.tokens_within(work_ms, start + 1) <= cost.tokens_within(work_ms, start)


def test_no_tokens_fit_into_no_time_and_any_number_where_they_cost_nothing() -> None:
    assert MEASURED.tokens_within(0.0, 5) == 0
    assert MEASURED.tokens_within(-3.0, 5) == 0
    assert price(1.0, 0.0, 0.0).tokens_within(1.0, 5) == float("inf")
    assert price(1.0, 0.0, 0.5).tokens_within(1.0, 0) == pytest.approx(2.0)


@pytest.mark.parametrize("lengths", [every(32), every(84), every(110), every(250), of_one_duration, of_any_length])
def test_the_measured_stage_is_recovered_within_a_few_prompts(lengths: Lengths) -> None:
    found = learned(MEASURED, lengths)
    assert found.base_ms == pytest.approx(MEASURED.base_ms, rel=0.15)
    assert found.slope_ms == pytest.approx(MEASURED.slope_ms, rel=0.03)
    assert found.curve_ms == pytest.approx(MEASURED.curve_ms, rel=0.15)
    for load in prompt(lengths):
        assert found.at(load) == pytest.approx(MEASURED.at(load), rel=0.02)


@pytest.mark.parametrize("stage", [price(9.0, 0.225, 1.4e-4), price(0.5, 0.225, 1.4e-4), price(2.5, 0.225, 0.0), price(40.0, 1.0, 5e-3)])
def test_other_proportions_are_learned_from_chunks_that_differ(stage: PromptPrice) -> None:
    found = learned(stage, of_any_length, num_prompts=20)
    for load in (PromptLoad.of(0, 32), PromptLoad.of(0, 256), PromptLoad.of(900, 100)):
        assert found.at(load) == pytest.approx(stage.at(load), rel=0.08)


def test_one_short_chunk_makes_the_next_choice_sensible() -> None:
    fit = PromptFit()
    fit.observe(PromptLoad.of(0, 32), MEASURED.at(PromptLoad.of(0, 32)))
    assert fit.price.at(PromptLoad.of(0, 256)) == pytest.approx(MEASURED.at(PromptLoad.of(0, 256)), rel=0.1)
    assert fit.price.at(PromptLoad.of(750, 250)) == pytest.approx(MEASURED.at(PromptLoad.of(750, 250)), rel=0.1)


@pytest.mark.parametrize("load", [PromptLoad.of(0, 32), PromptLoad.of(0, 256), PromptLoad.of(5_000, 100)])
def test_the_same_chunk_for_ever_tells_one_thing_and_the_proportions_stay_as_they_were(load: PromptLoad) -> None:
    fit = PromptFit()
    fit.observe(load, 30.0)
    before = fit.price
    for _ in range(2_000):
        fit.observe(load, 30.0)
    assert fit.price.at(load) == pytest.approx(30.0, rel=1e-3)
    assert astuple(fit.price) == pytest.approx(astuple(before), rel=0.05)


@pytest.mark.parametrize("lengths", [every(110), of_one_duration, of_any_length])
def test_what_else_runs_on_the_machine_hardly_shows(lengths: Lengths) -> None:
    chance = random.Random(7)

    def disturbed(milliseconds: float) -> float:
        return milliseconds * (1 + abs(chance.gauss(0, 0.03)) + 2 * (chance.random() < 0.05))

    found = learned(MEASURED, lengths, num_prompts=8, disturbed=disturbed)
    for load in prompt(lengths):
        assert found.at(load) == pytest.approx(MEASURED.at(load), rel=0.15)
    assert found.base_ms == pytest.approx(MEASURED.base_ms, rel=0.5)


def test_a_stage_that_becomes_slower_is_believed_in_time() -> None:
    fit = PromptFit()
    for factor in (1, 5):
        for _ in range(40):
            for load in prompt(of_one_duration):
                fit.observe(load, factor * MEASURED.at(load))
    assert fit.price.at(PromptLoad.of(500, 90)) == pytest.approx(5 * MEASURED.at(PromptLoad.of(500, 90)), rel=0.05)


def test_a_time_of_nothing_is_no_price_for_ever() -> None:
    fit = PromptFit()
    fit.observe(PromptLoad.of(0, 64), 0.0)
    assert fit.price == price(0.0, 0.0, 0.0)
    for _ in range(20):
        for load in prompt(of_one_duration):
            fit.observe(load, MEASURED.at(load))
    assert fit.price.at(PromptLoad.of(500, 90)) == pytest.approx(MEASURED.at(PromptLoad.of(500, 90)), rel=0.05)


@example(observed=[(0, 1, 8.4e-156)], start=0, num_tokens=0)
@given(
    observed=st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 512), st.floats(0, 1e5)), min_size=1, max_size=40),
    start=st.integers(0, 10_000),
    num_tokens=st.integers(0, 512),
)
def test_prices_are_never_negative_and_more_never_costs_less(observed: list[tuple[int, int, float]], start: int, num_tokens: int) -> None:
    fit = PromptFit()
    for at, seen, milliseconds in observed:
        fit.observe(PromptLoad.of(at, seen), milliseconds)
    found = fit.price
    assert min(found.base_ms, found.slope_ms, found.curve_ms) >= 0
    assert found.at(PromptLoad.of(start, num_tokens + 1)) >= found.at(PromptLoad.of(start, num_tokens))
    assert found.at(PromptLoad.of(start + 1, num_tokens)) >= found.at(PromptLoad.of(start, num_tokens))
