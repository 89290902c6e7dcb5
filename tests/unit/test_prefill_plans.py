"""How prompts are cut, over simulated pipelines: as good as the best cut into equal durations, soon, and within all bounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.messages import StreamId
from langchain_pshard.pipeline.prompt_costs import PromptLoad, PromptPrice
from langchain_pshard.pipeline.scheduler import (
    CHUNK_STEP,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    PREFILL_BUDGET_TOKENS,
    SILENCE_MS,
    STALL_MS,
    Prefilling,
    Situation,
    best_turn_ms,
    plan,
)
from langchain_pshard.pipeline.step_costs import StepCosts
from tests.support.simulated_prefill import MEASURED, Prompts, best_finish_ms, observe, prefill, price

PRICES = st.builds(price, st.floats(0.1, 100), st.floats(0.05, 5), st.floats(0, 5e-3))


def knowing(*stages: PromptPrice) -> StepCosts:
    """Costs learned from many chunks of any length and place."""
    costs = StepCosts(len(stages))
    chance = random.Random(1)
    for _ in range(60):
        observe(costs, stages, PromptLoad.of(chance.randrange(4_000), chance.randrange(2, 256)))
    return costs


def decoding(prompts: Prompts, turn: int) -> Situation:
    """Somebody decodes beside the prompts, and is ready."""
    ready = [StreamId(10_000)]
    return Situation(num_in_flight=0, num_decode_in_flight=0, num_decoding=1, ready=ready, prefilling=prompts.waiting, turn=turn)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "stage", [MEASURED, price(9.0, 0.225, 1.4e-4), price(2.5, 0.225, 0.0), price(2.5, 0.225, 6e-4), price(40.0, 1.0, 1e-3)]
)
@pytest.mark.parametrize("lengths", [[1_000], [1_003, 2, 40], [100] * 10, [40] * 25, [400, 300, 200, 100]])
def test_prompts_are_through_nearly_as_soon_as_in_the_best_equal_durations(stage: PromptPrice, num_stages: int, lengths: list[int]) -> None:
    stages = [stage] * num_stages
    costs = StepCosts(num_stages)
    for _ in range(4):
        prefill(costs, stages, [1_000])
    found = prefill(costs, stages, lengths)
    allowed = 1.03 if len(lengths) == 1 else 1.09  # whole short prompts leave some room
    assert found.finished_ms <= allowed * best_finish_ms(stages, lengths)


def test_the_measured_prompt_goes_in_about_ten_chunks_of_one_duration() -> None:
    stages = [MEASURED, MEASURED]
    costs = StepCosts(2)
    first, *_, last = [prefill(costs, stages, [1_000]) for _ in range(4)]
    assert [load.num_tokens for load in first.loads[:3]] == [MIN_CHUNK_TOKENS] * 3  # nothing was known
    assert first.finished_ms < 1.04 * best_finish_ms(stages, [1_000])
    assert 9 <= len(last.loads) <= 12
    durations = [MEASURED.at(load) for load in last.loads]
    assert max(durations) < 1.4 * min(durations)  # they are rounded
    assert all(load.num_tokens % CHUNK_STEP == 0 for load in last.loads[:-1])  # few lengths, which come again
    assert last.loads[0].num_tokens > 1.3 * last.loads[-1].num_tokens


@given(stage=PRICES, num_stages=st.integers(1, 4), lengths=st.lists(st.integers(1, 3_000), min_size=1, max_size=6), is_known=st.booleans())
def test_every_prompt_is_cut_within_the_bounds(stage: PromptPrice, num_stages: int, lengths: list[int], is_known: bool) -> None:
    stages = [stage] * num_stages
    found = prefill(knowing(*stages) if is_known else StepCosts(num_stages), stages, lengths)
    assert sum(load.num_tokens for load in found.loads) == sum(lengths)
    assert all(load.num_tokens <= (PREFILL_BUDGET_TOKENS if num_stages == 1 else MAX_CHUNK_TOKENS) for load in found.loads)
    assert all(chunk.num_tokens <= MAX_CHUNK_TOKENS for chunk in found.chunks)
    # A lone token runs another kernel: it is a whole prompt or nothing.
    assert all(chunk.num_tokens > 1 or lengths[chunk.stream - 1] == 1 for chunk in found.chunks)
    if len(lengths) == 1 and is_known and num_stages > 1:  # no tiny rest
        assert all(load.num_tokens >= min(lengths[0], MIN_CHUNK_TOKENS) - 1 for load in found.loads[:-1])
        assert found.loads[-1].num_tokens >= min(lengths[0], MIN_CHUNK_TOKENS) // 2


@given(stage=PRICES, num_stages=st.integers(1, 3), lengths=st.lists(st.integers(2, 3_000), min_size=1, max_size=6))
def test_prompts_never_stall_those_who_decode(stage: PromptPrice, num_stages: int, lengths: list[int]) -> None:
    costs = knowing(*[stage] * num_stages)
    prompts = Prompts(dict(enumerate(lengths, start=1)))
    for turn in range(sum(lengths)):
        found = plan(decoding(prompts, turn), costs)
        assert found is not None
        load = prompts.send(found.chunks)
        known, _ = costs.prompt_prices(load)
        # Less than the shortest chunk would not get a prompt on.
        assert known.at(load) <= STALL_MS * (1 + 1e-9) or load.num_tokens <= MIN_CHUNK_TOKENS
        if not prompts.waiting:
            return
    pytest.fail("a prompt starved")


def test_while_somebody_decodes_the_same_time_holds_fewer_tokens_the_later_they_stand() -> None:
    costs = knowing(price(5.0, 0.5, 1e-3))
    sizes = []
    for start in (0, 500, 2_000, 5_000):
        waiting = [Prefilling(stream=StreamId(1), begin=0, start=start, num_left=2_000)]
        found = plan(Situation(num_in_flight=0, num_decode_in_flight=0, num_decoding=1, ready=[StreamId(2)], prefilling=waiting), costs)
        assert found is not None
        sizes.append(found.chunks[0].num_tokens)
    # 55 ms are n (0.5 + 0.001 (start + n / 2)); at 5,000, where they are ten tokens, the shortest chunk goes all the same.
    exact = [2 * 55 / (each + math.sqrt(each**2 + 2 * 1e-3 * 55)) for each in (0.5, 1.0, 2.5)]
    assert exact == pytest.approx([100.0, 53.6, 21.8], rel=0.01)
    assert sizes == [96, 48, MIN_CHUNK_TOKENS, MIN_CHUNK_TOKENS]


def test_nobody_waits_for_long_on_a_worker_that_is_silent() -> None:
    slow = price(400.0, 20.0, 0.012)
    found = prefill(knowing(slow), [slow], [2_000])
    durations = [slow.at(load) for load in found.loads]
    assert max(durations) < SILENCE_MS * 1.02
    assert min(durations[:-1]) > 0.7 * SILENCE_MS


def test_one_stage_takes_the_longest_chunks() -> None:
    found = prefill(knowing(MEASURED), [MEASURED], [1_000])
    assert [chunk.num_tokens for chunk in found.chunks] == [256, 256, 256, 232]


def test_a_light_second_stage_is_worth_few_chunks() -> None:
    """With 16 of 18 layers on one stage, the other one is filled in no time."""
    light = price(0.5, 0.05, 3e-5)
    heavy = price(4.0, 0.4, 2.5e-4)
    even = prefill(knowing(MEASURED, MEASURED), [MEASURED, MEASURED], [1_000])
    found = prefill(knowing(heavy, light), [heavy, light], [1_000])
    assert 4 <= len(found.loads) <= 5 < len(even.loads)


def test_the_rest_of_a_prompt_goes_on_as_it_began() -> None:
    costs = knowing(MEASURED, MEASURED)
    whole, rest = PromptLoad.of(0, 1_000), PromptLoad.of(700, 300)
    assert best_turn_ms(whole, rest, costs) == pytest.approx(best_turn_ms(whole, whole, costs), rel=0.15)
    assert best_turn_ms(rest, rest, costs) < 0.8 * best_turn_ms(whole, rest, costs)  # were the 700 cached, there would be less to overlap
    assert best_turn_ms(whole, PromptLoad(), costs, 60.0) == 60.0
    assert best_turn_ms(whole, whole, costs, 1.0) == 1.0  # not even a token fits
    assert best_turn_ms(whole, whole, costs, 20.0) <= 20.0


@pytest.mark.parametrize("seed", range(4))
def test_what_was_learned_on_a_busy_machine_is_good_enough(seed: int) -> None:
    """Stages that are up to three times as slow for a while, and back: the proportions stay near the usual ones, and so do the cuts."""
    chance = random.Random(seed)
    stages, costs = [MEASURED, MEASURED], StepCosts(2)
    factors = [1.0, 1.0]
    for _ in range(100):
        if chance.random() < 0.3:
            factors[chance.randrange(2)] = chance.choice([1.0, 1.0, 1.3, 2.0, 3.0])
        slowed = [
            price(factor * stage.base_ms, factor * stage.slope_ms, factor * stage.curve_ms)
            for factor, stage in zip(factors, stages, strict=True)
        ]
        observe(costs, slowed, PromptLoad.of(100 * chance.randrange(10), chance.randrange(60, 140)))
    assert prefill(costs, stages, [1_000]).finished_ms < 1.05 * best_finish_ms(stages, [1_000])
