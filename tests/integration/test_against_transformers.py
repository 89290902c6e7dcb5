"""Greedy text of float32 shards against `generate` of the unsplit transformers model: the same tokens to the last one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from export_tools.export import export_bundle
from export_tools.progress import SilentProgress
from export_tools.source import identify
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle
from tests.support.models import WINDOW
from tests.support.runners import running_chain
from workers.shard import RunnerName, Settings

NUM_TOKENS = 128
NUM_STAGES = (1, 2, 3)
PROMPT = np.random.default_rng(5).integers(8, 264, 24).tolist()
assert len(PROMPT) > WINDOW, "the prompt itself must cross the window"
REAL_PROMPT = (2, 818, 4083, 529, 506, 110832, 12490, 1440, 1680, 506, 1171, 8248, 16210, 236761)
"""Ids, so that nothing but the model is compared; 2 is the begin token."""


def generate_with_transformers(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    inputs = torch.tensor([list(prompt)])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
    )
    return output[0, len(prompt) :].tolist()


def generate_with_shards(bundle: Path, prompt: Sequence[int], num_tokens: int, runner: RunnerName = "paged", threads: int = 1) -> list[int]:
    with running_chain(bundle, Settings(runner=runner, numerics="exact", threads=threads, kv_memory_bytes=16 << 20)) as chain:
        return chain.generate(1, prompt, num_tokens)[0]


@pytest.fixture(scope="module")
def references(tiny_bundle: TinyBundle) -> dict[str, list[int]]:
    """What transformers generates, by architecture."""
    folders = {name: tiny_bundle(name).parent / f"{name}-model" for name in ("llama", "qwen3", "gemma3_text")}
    return {name: generate_with_transformers(folder, PROMPT, NUM_TOKENS) for name, folder in folders.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("num_stages", NUM_STAGES)
@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_shards_generate_what_transformers_does(
    tiny_bundle: TinyBundle, references: dict[str, list[int]], architecture: str, num_stages: int, runner: RunnerName
) -> None:
    expected = references[architecture]
    assert len(expected) == NUM_TOKENS
    assert len(set(expected)) > 20  # a text that repeats itself would show little
    assert generate_with_shards(tiny_bundle(architecture, num_stages=num_stages), PROMPT, NUM_TOKENS, runner) == expected


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_three_workers_generate_what_transformers_does(
    tiny_bundle: TinyBundle, references: dict[str, list[int]], tmp_path: Path, architecture: str
) -> None:
    params = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with (
        LocalFleet(tiny_bundle(architecture, num_stages=3), num_threads=1, numerics="exact", kv_memory="16MiB") as fleet,
        PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path)) as client,
    ):
        assert list(client.complete(PROMPT, params).token_ids) == references[architecture]


@pytest.mark.real_model
@pytest.mark.parametrize("layers", [(18,), (16, 2), (9, 7, 2)], ids=["1 stage", "2 stages", "3 stages"])
def test_shards_of_the_real_model_generate_what_transformers_does(
    real_reference: list[int], tmp_path: Path, layers: tuple[int, ...]
) -> None:
    bundle = tmp_path / "bundle"  # a gigabyte, so not kept
    # Unverified: what the exporter would check on a few tokens is what this test holds over all of them.
    export_bundle("demo", bundle, layers=layers, weights=WeightMode.FP32, verify_shards=False)
    assert len(set(real_reference)) > 20
    assert generate_with_shards(bundle, REAL_PROMPT, len(real_reference), threads=2) == real_reference


@pytest.fixture(scope="module")
def real_reference() -> list[int]:
    """64 tokens of Gemma 3 270M by transformers, from the float32 weights that the exporter reads."""
    return generate_with_transformers(Path(identify("demo", SilentProgress()).location), REAL_PROMPT, 64)
