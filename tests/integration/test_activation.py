"""int8 hidden states on real workers: tokens depend on the cut, and still on nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet import running_worker
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import FleetMismatchError
from langchain_pshard.core.numerics import DType
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle

INT8 = ("--activation", "int8")
PROMPTS = ("one and two and one and two and", "a list:\n1. salt\n2. oil\n3.", "the sea is wide, and")
PLAIN = GenerationParams(max_tokens=48, ignore_eos=True, draft=None, prefix_cache=False)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle("llama", weights=WeightMode.INT4, num_stages=2)


def test_tokens_depend_on_neither_company_nor_chunks_nor_drafts(bundle: Path, tmp_path: Path) -> None:
    options = ClientOptions(cache_dir=tmp_path)
    with running_worker(bundle, 0, options=INT8) as first, running_worker(bundle, 1, options=INT8) as second:
        addresses = [first.address, second.address]
        with PipelineClient.connect(addresses, options=options) as client:
            assert {stage.numerics.boundary for stage in client.chain.stages} == {DType.I8}
            assert all(stage.is_resumable for stage in client.chain.stages)
            for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=4)):
                plain = replace(PLAIN, sampling=sampling)
                alone = [client.complete(prompt, plain).token_ids for prompt in PROMPTS]
                drafted = replace(plain, draft="ngram", draft_tokens=4, prefix_cache=True)
                with ThreadPoolExecutor(len(PROMPTS)) as pool:
                    together = list(pool.map(lambda prompt: client.complete(prompt, drafted).token_ids, PROMPTS))  # noqa: B023
                assert together == alone
            alone = [client.complete(prompt, PLAIN).token_ids for prompt in PROMPTS]
        with PipelineClient.connect(addresses, options=replace(options, max_chunk_tokens=5)) as client:
            assert [client.complete(prompt, PLAIN).token_ids for prompt in PROMPTS] == alone
    with running_worker(bundle, 0, 1, options=INT8) as both, PipelineClient.connect([both.address], options=options) as client:
        assert [client.complete(prompt, PLAIN).token_ids for prompt in PROMPTS] == alone  # a boundary within a worker is one too


def test_a_chain_of_two_kinds_of_hidden_states_is_refused(bundle: Path, tmp_path: Path) -> None:
    options = ClientOptions(cache_dir=tmp_path)
    with running_worker(bundle, 0, options=INT8) as first, running_worker(bundle, 1) as second:
        message = r"boundary is (i8|f32) at .* and (i8|f32) at .*; start all workers with the same --activation"
        with pytest.raises(FleetMismatchError, match=message):
            PipelineClient.connect([first.address, second.address], options=options)


def test_the_stateful_runner_takes_int8_too(bundle: Path, tmp_path: Path) -> None:
    stateful = (*INT8, "--runner", "stateful", "--numerics", "exact")
    options = ClientOptions(cache_dir=tmp_path)
    with (
        running_worker(bundle, 0, options=stateful) as first,
        running_worker(bundle, 1, options=stateful) as second,
        PipelineClient.connect([first.address, second.address], options=options) as client,
    ):
        found = client.complete(PROMPTS[0], PLAIN)
        assert len(found.token_ids) == 48
        assert len(set(found.token_ids)) > 3
        assert client.complete(PROMPTS[0], PLAIN).token_ids == found.token_ids
