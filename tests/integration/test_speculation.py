"""Speculation on real workers: int4 weights, `fast` numerics, 128 tokens, greedy and sampled: the tokens are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle

CHANCES = (0.0, 0.75, 1.0)
PROMPTS = ("one and two and one and two and", "a list:\n1. salt\n2. oil\n3.")


@pytest.fixture(scope="module")
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle("llama", weights=WeightMode.INT4, num_stages=2)


@dataclass
class Known:
    """Drafts from the known answer, each right with a given chance."""

    answer: Sequence[int]
    chance: float
    num_done: int = 0
    draws: random.Random = field(default_factory=lambda: random.Random(3))

    def begin(self, prompt: Sequence[int]) -> Known:
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        self.num_done += len(tokens)

    def propose(self, max_tokens: int) -> Sequence[int]:
        ahead = self.answer[self.num_done : self.num_done + max_tokens]
        return [token if self.draws.random() < self.chance else (token + 1) % 200 for token in ahead]


def test_drafts_never_change_a_token(bundle: Path, tmp_path: Path) -> None:
    options = ClientOptions(cache_dir=tmp_path)
    with LocalFleet(bundle, num_threads=1) as fleet, PipelineClient.connect(fleet.addresses, options=options) as client:
        assert {stage.numerics.name for stage in client.chain.stages} == {"fast"}
        for prompt in PROMPTS:
            for sampling in (SamplingParams(), SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.1, seed=7)):
                plain = GenerationParams(max_tokens=128, ignore_eos=True, sampling=sampling, draft=None)
                expected = client.complete(prompt, plain)
                assert expected.stats.num_drafted_tokens == 0
                for drafted in (replace(plain, draft="auto"), replace(plain, draft="ngram", draft_tokens=7)):
                    assert client.complete(prompt, drafted).token_ids == expected.token_ids
                for chance in CHANCES:
                    for draft_tokens in (3, "auto"):
                        params = replace(plain, draft_tokens=draft_tokens)
                        found = client.complete(prompt, params, drafter=Known(expected.token_ids, chance))
                        assert found.token_ids == expected.token_ids
                        stats = found.stats
                        assert stats.num_steps + stats.num_accepted_tokens == 128
                        assert draft_tokens == "auto" or abs(stats.acceptance - (0.0, 0.58, 1.0)[CHANCES.index(chance)]) < 0.2
                        assert stats.hop_ms > 0
                assert found.stats.num_steps < 64  # the last one: always right, as many as pay


def test_where_rewinds_are_not_exact_drafts_are_off_unless_asked_for(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ClientOptions(cache_dir=tmp_path)
    fleet = LocalFleet(bundle, num_threads=1, runner="stateful")
    with fleet, PipelineClient.connect(fleet.addresses, options=options) as client:
        assert not client.chain.stages[0].is_resumable
        params = GenerationParams(max_tokens=48, ignore_eos=True)
        assert client.complete(PROMPTS[0], params).stats.num_drafted_tokens == 0
        assert "not exact" not in caplog.text
        asked = client.complete(PROMPTS[0], replace(params, draft="ngram", draft_tokens=2))
        assert asked.stats.num_drafted_tokens > 0
        assert "drafts are not exact on this fleet (stage 0 at " in caplog.text
        with pytest.raises(InvalidOptionError, match="none of this fleet does"):
            client.complete(PROMPTS[0], replace(params, draft="model"))
