"""The stage folder of a 1-stage bundle in openvino_genai, a client we did not write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
import pytest

from export_tools.export import export_bundle
from langchain_pshard.core.bundle import WeightMode, stage_dir
from langchain_pshard.core.errors import InvalidOptionError
from tests.support.chain import StatefulChain
from tests.support.models import build_tiny

PROMPT = np.random.default_rng(0).integers(8, 264, 40).tolist()
NUM_TOKENS = 64
PRECISIONS = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("genai")
    export_bundle(
        str(build_tiny("llama", folder / "model")), folder / "bundle", weights=WeightMode.FP32, for_genai=True, verify_shards=False
    )
    return folder / "bundle"


@pytest.fixture(scope="module")
def our_tokens(bundle: Path) -> list[int]:
    chain = StatefulChain(bundle)
    tokens = [int(chain.step(PROMPT)[-1].argmax())]
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(chain.step(tokens[-1:])[-1].argmax()))
    assert len(set(tokens)) > 5
    return tokens


def greedy() -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, do_sample=False)


@pytest.mark.parametrize("backend", ["SDPA", "PA"])
def test_llm_pipeline_gives_our_tokens(bundle: Path, our_tokens: list[int], backend: str) -> None:
    pipeline = openvino_genai.LLMPipeline(str(bundle / stage_dir(0)), "CPU", ATTENTION_BACKEND=backend, **PRECISIONS)
    assert list(pipeline.generate(ov.Tensor(np.array([PROMPT])), greedy()).tokens[0]) == our_tokens
    text = pipeline.generate("hello", openvino_genai.GenerationConfig(max_new_tokens=4))
    assert isinstance(text, str)


def test_continuous_batching_gives_our_tokens(bundle: Path, our_tokens: list[int]) -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(bundle / stage_dir(0)), scheduler, "CPU", PRECISIONS)
    (result,) = pipeline.generate([ov.Tensor(np.array([PROMPT]))], [greedy()])
    assert list(result.m_generation_ids[0]) == our_tokens


def test_several_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"--genai needs a bundle of 1 stage, 2 are asked for"):
        export_bundle(str(build_tiny("llama", tmp_path / "model")), tmp_path / "bundle", num_stages=2, for_genai=True)
    assert not (tmp_path / "bundle").exists()
