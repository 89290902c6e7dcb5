"""Eight users at once on real workers, with the settings that a user gets without asking: each reads what it would have read alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import DemoBundle, TinyBundle

NUM_TOKENS = 128
PROMPTS = (
    "The lighthouse stood on the last rock before the open sea. Every evening the keeper",
    "def fibonacci(n):",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "1. Preheat the oven to 180 degrees.\n2.",
    "Die Hauptstadt von Frankreich ist",
    "Q: Why is the sky blue?\nA:",
    "Once",
    "日本の首都は東京です。東京は",
)


def assert_alone_equals_together(bundle: Path, cache_dir: Path, sampling: SamplingParams) -> None:
    params = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling)
    with (
        LocalFleet(bundle, kv_memory="256MiB") as fleet,
        PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=cache_dir)) as client,
        ThreadPoolExecutor(len(PROMPTS)) as users,
    ):
        together = list(users.map(lambda prompt: client.complete(prompt, params), PROMPTS))
        alone = [client.complete(prompt, params).token_ids for prompt in PROMPTS]
        status = client.status()
    assert [generation.token_ids for generation in together] == alone
    assert all(len(tokens) == NUM_TOKENS for tokens in alone)
    assert len(set(alone)) == len(PROMPTS)
    # They did share steps: apart, the two rounds would have taken twice the tokens of one.
    num_steps = status.workers[0].status.stages[0].num_steps if status.workers[0].status else 0
    assert num_steps < 1.5 * len(PROMPTS) * NUM_TOKENS


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=11)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_eight_at_once_on_a_tiny_model(tiny_bundle: TinyBundle, tmp_path: Path, architecture: str, sampling: SamplingParams) -> None:
    bundle = tiny_bundle(architecture, weights=WeightMode.INT4, num_stages=2)
    assert_alone_equals_together(bundle, tmp_path, sampling)


@pytest.mark.real_model
def test_eight_at_once_on_the_real_model(demo_bundle: DemoBundle, tmp_path: Path) -> None:
    """Greedy: where the most likely tokens are close, the last bit decides."""
    assert_alone_equals_together(demo_bundle(weights=WeightMode.INT4, layers=(16, 2)), tmp_path, SamplingParams())
