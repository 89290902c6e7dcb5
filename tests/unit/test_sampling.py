"""Choosing a token: exact sets of candidates, and frequencies within what chance allows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.sampling import History, SamplingParams, penalized, sample, token_logprobs, uniform

NOTHING = History((), ())
PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = np.log(PROBABILITIES).astype(np.float32)


def drawn(params: SamplingParams, logits: npt.NDArray[np.float32] = LOGITS, num: int = 4_000) -> npt.NDArray[np.int64]:
    return np.array([sample(logits, params, position=i, history=NOTHING) for i in range(num)])


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(np.array([1, 7, 7, 3], dtype=np.float32), SamplingParams(), position=0, history=NOTHING) == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1.0, seed=1), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(temperature=1.0, top_k=2, seed=2), [0.625, 0.375, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.9, seed=3), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (SamplingParams(temperature=1.0, top_p=0.5, seed=4), [1, 0, 0, 0]),
        (SamplingParams(temperature=1.0, min_p=0.2, seed=5), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (SamplingParams(temperature=0.5, seed=6), list(PROBABILITIES**2 / (PROBABILITIES**2).sum())),
    ],
)
def test_frequencies_follow_the_parameters(params: SamplingParams, expected: list[float]) -> None:
    counts = np.bincount(drawn(params), minlength=4) / 4_000
    np.testing.assert_allclose(counts, expected, atol=0.03)  # about four standard deviations of 4,000 draws
    assert all(count == 0 for count, share in zip(counts, expected, strict=True) if share == 0)


def test_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    once = drawn(params, num=50)
    np.testing.assert_array_equal(once, drawn(params, num=50))
    assert (once != drawn(SamplingParams(temperature=1.0, seed=12), num=50)).any()
    assert uniform(11, 3) == uniform(11, 3)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), top_k=st.integers(0, 5_000), top_p=st.floats(0.01, 1.0), position=st.integers(0, 10_000))
def test_large_vocabulary_equals_the_plain_definition(seed: int, top_k: int, top_p: float, position: int) -> None:
    logits = np.random.default_rng(seed % 7).normal(size=20_000).astype(np.float32) * 2
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, seed=seed)
    token = sample(logits, params, position=position, history=NOTHING)
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits - logits.max()) / np.float32(1.3)).astype(np.float64)[order]
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    nucleus = np.searchsorted(np.cumsum(weights), top_p * weights.sum() * (1 + 1e-9)) + 1
    assert token in order[:nucleus]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), vocab=st.sampled_from([4, 511, 512, 513, 5_000]), min_p=st.sampled_from([0.0, 0.01, 0.5]), hot=st.booleans()
)
def test_a_draw_from_the_whole_vocabulary_equals_the_plain_definition(seed: int, vocab: int, min_p: float, hot: bool) -> None:
    logits = np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * (1 if hot else 40)  # the rest of 40 underflows to 0
    token = sample(logits, SamplingParams(temperature=0.8, min_p=min_p, seed=seed), position=3, history=NOTHING)
    weights = np.exp((logits - logits.max()) / np.float32(0.8)).astype(np.float64)
    weights[weights < np.float32(min_p)] = 0.0
    cumulative = np.cumsum(weights)
    target = uniform(seed, 3) * cumulative[-1]
    assert weights[token] > 0
    assert cumulative[token] - weights[token] - 1e-9 <= target <= cumulative[token] + 1e-9


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2**-53])
def test_the_ends_of_a_draw_are_tokens_that_have_weight(draw: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_pshard.core.sampling.uniform", lambda seed, position, draw_idx: draw)
    logits = np.full(3_000, -1e9, dtype=np.float32)
    logits[700:1_500] = np.random.default_rng(1).normal(size=800)
    expected = 700 if draw == 0.0 else 1_499
    assert sample(logits, SamplingParams(temperature=1.0), position=0, history=NOTHING) == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1_000),
    vocab=st.sampled_from([3, 700, 4_096, 5_001]),
    k=st.integers(1, 20),
    num_levels=st.sampled_from([2, 50, 10**6]),
)
def test_the_best_are_ranked_by_logit_and_then_by_id(seed: int, vocab: int, k: int, num_levels: int) -> None:
    logits = np.random.default_rng(seed).integers(0, num_levels, vocab).astype(np.float32)
    ranked = token_logprobs(logits, 0, SamplingParams(top_logprobs=k), NOTHING).top
    assert [token for token, _ in ranked] == np.lexsort((np.arange(vocab), -logits))[:k].tolist()


def test_penalties_follow_their_definitions() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    history = History((0, 1), (2, 2))
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    np.testing.assert_allclose(penalized(logits, params, history), [1.0, -4.0, 0.5 - 0.25 - 1.0, 0.5])
    np.testing.assert_array_equal(logits, np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32))
    assert sample(logits, params, position=0, history=history) == 0


def test_logprobs_of_the_chosen_and_the_best() -> None:
    result = token_logprobs(LOGITS, 2, SamplingParams(top_logprobs=2), NOTHING)
    assert result.chosen == pytest.approx(math.log(0.15), abs=1e-6)
    assert [token for token, _ in result.top] == [0, 1]
    assert [value for _, value in result.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)
    assert token_logprobs(LOGITS, 2, SamplingParams(top_logprobs=0), NOTHING).top == ()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": 11.0},
        {"frequency_penalty": -11.0},
        {"seed": -1},
        {"top_logprobs": 21},
    ],
)
def test_nonsense_is_refused_by_name_and_value(options: dict[str, float]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(InvalidOptionError, match=f"{name}={value!r}"):
        SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_a_temperature_below_float32_takes_the_highest(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 2.9999998, 3.0 - 1e-6], dtype=np.float32)
    params = SamplingParams(temperature=temperature, seed=3)
    assert {sample(logits, params, position=position, history=History((), ())) for position in range(50)} == {1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 2**64},
        {"top_k": 2.5},
        {"top_k": True},
        {"seed": None},
        {"seed": 1.0},
        {"temperature": "1"},
        {"top_p": None},
        {"top_logprobs": 2.0},
    ],
)
def test_what_a_worker_would_not_read_is_refused_at_once(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(InvalidOptionError, match=f"{name}="):
        SamplingParams(**wrong)
