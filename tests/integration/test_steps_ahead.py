"""Chains of real workers that go on by themselves: the tokens are those of steps driven by the client, one by one, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet import running_worker
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import Generation, GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle

NUM_TOKENS = 72
PROMPTS = ("one and two and one and two and", "a list:\n1. salt\n2. oil\n3.", "Once", "def fibonacci(n):", "Why is the sky blue?")
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.1, seed=11))


def company(client: PipelineClient, params: Sequence[GenerationParams]) -> list[Generation]:
    """Everybody at once."""
    with ThreadPoolExecutor(len(params)) as users:
        return list(users.map(client.complete, PROMPTS, params))


@pytest.mark.parametrize(
    ("architecture", "num_stages", "workers", "options"),
    [
        ("llama", 1, [[0]], ()),
        ("llama", 2, [[0], [1]], ()),
        ("llama", 2, [[0, 1]], ()),
        ("llama", 2, [[0], [1]], ("--runner", "stateful", "--numerics", "exact")),
        ("gemma3_text", 2, [[0], [1]], ()),
    ],
    ids=["one worker", "two workers", "one worker, two stages", "stateful", "windows"],
)
def test_steps_ahead_never_change_a_token(
    tiny_bundle: TinyBundle, tmp_path: Path, architecture: str, num_stages: int, workers: list[list[int]], options: tuple[str, ...]
) -> None:
    bundle = tiny_bundle(architecture, weights=WeightMode.INT4, num_stages=num_stages)
    with ExitStack() as stack:
        addresses = [stack.enter_context(running_worker(bundle, *stages, options=options)).address for stages in workers]
        plain, ahead, far = (
            stack.enter_context(
                PipelineClient.connect(addresses, options=ClientOptions(cache_dir=tmp_path, max_steps_ahead=max_steps_ahead))
            )
            for max_steps_ahead in (0, 7, 64)
        )
        for sampling in SAMPLINGS:
            params = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling, draft=None)
            found = [plain.complete(prompt, params) for prompt in PROMPTS]
            expected = [one.token_ids for one in found]
            assert all(len(tokens) == NUM_TOKENS for tokens in expected)
            assert len(set(expected)) == len(PROMPTS)
            assert found[0].stats.num_hops == NUM_TOKENS * (len(workers) + 1)
            for client, num_own in ((ahead, 1 + 9), (far, 1 + 2)):
                found = [client.complete(prompt, params) for prompt in PROMPTS]
                assert [one.token_ids for one in found] == expected
                assert found[0].stats.num_steps == NUM_TOKENS
                num_links_ahead = len(workers) if len(workers) > 1 else 0
                assert found[0].stats.num_hops == num_own * (len(workers) + 1) + (NUM_TOKENS - num_own) * num_links_ahead
                # Of different lengths, so that they end in the middle of the others' runs; and with drafts where they pay.
                lengths = [NUM_TOKENS - 7 * idx for idx in range(len(PROMPTS))]
                for draft in (None, "auto"):
                    together = company(client, [replace(params, max_tokens=length, draft=draft) for length in lengths])
                    assert [one.token_ids for one in together] == [
                        tokens[:length] for tokens, length in zip(expected, lengths, strict=True)
                    ]
            # Two clients at once, one that goes ahead and one that does not.
            with ThreadPoolExecutor(2) as pool:
                for together in pool.map(company, (plain, ahead), ([params] * len(PROMPTS),) * 2):
                    assert [one.token_ids for one in together] == expected
        assert [stage.num_streams for worker in plain.status().workers if worker.status for stage in worker.status.stages] == [
            0
        ] * num_stages


def test_a_text_ends_with_its_end_token_wherever_in_a_run_it_comes(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    """At a high temperature, a tiny model says every token now and then."""
    bundle = tiny_bundle("llama", weights=WeightMode.INT4, num_stages=2)
    with ExitStack() as stack:
        addresses = [stack.enter_context(running_worker(bundle, idx)).address for idx in range(2)]
        plain, ahead = (
            stack.enter_context(
                PipelineClient.connect(addresses, options=ClientOptions(cache_dir=tmp_path, max_steps_ahead=max_steps_ahead))
            )
            for max_steps_ahead in (0, 7)
        )
        lengths = set()
        for seed in range(40):
            params = GenerationParams(max_tokens=NUM_TOKENS, sampling=SamplingParams(temperature=3.0, seed=seed), draft=None)
            expected = plain.complete(PROMPTS[seed % len(PROMPTS)], params)
            found = ahead.complete(PROMPTS[seed % len(PROMPTS)], params)
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
            lengths.add(len(found.token_ids))
        assert len(lengths) > 3  # some did end early
