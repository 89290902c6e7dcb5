"""Whole logits through the pipeline are those of transformers, to rounding, and only for those who were allowed to have them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import ContextOverflowError, InvalidOptionError
from langchain_pshard.pipeline import stream
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle
from tests.support.models import CONTEXT_LENGTH, VOCAB_SIZE

PARAMS = GenerationParams(max_tokens=20, ignore_eos=True)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(8, 264, num_tokens)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_logits_of_a_prompt_are_those_of_transformers(tiny_bundle: TinyBundle, tmp_path: Path, architecture: str) -> None:
    """Of one token, of several chunks, of the same again; what else runs meanwhile says what it says alone."""
    from tests.support.chain import reference_logits

    bundle = tiny_bundle(architecture, num_stages=2)
    with (
        LocalFleet(bundle, num_threads=1, numerics="exact", kv_memory="8MiB", allow_logits=True) as fleet,
        PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path)) as client,
    ):
        alone = client.complete(prompt(40), PARAMS).token_ids
        for num_tokens in (600, 600, 1):
            tokens = prompt(num_tokens, seed=1)
            expected = reference_logits(bundle.parent / f"{architecture}-model", tokens)
            with ThreadPoolExecutor(2) as pool:
                beside = pool.submit(client.complete, prompt(40), PARAMS)
                logits = client.logits(tokens)
                assert beside.result().token_ids == alone
            assert logits.dtype == np.float32
            assert logits.shape == expected.shape == (num_tokens, VOCAB_SIZE)
            assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
        with pytest.raises(ContextOverflowError):
            client.logits(prompt(CONTEXT_LENGTH))
        assert all(stage.kv_used_tokens == 0 for worker in client.status().workers for stage in worker.status.stages)  # type: ignore[union-attr]


def test_large_vocabularies_come_in_small_chunks(tiny_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tiny_bundle("llama", weights=WeightMode.INT4, num_stages=2)
    with (
        LocalFleet(bundle, num_threads=1, kv_memory="8MiB", allow_logits=True) as fleet,
        PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path)) as client,
    ):
        whole = client.logits(prompt(100))
        monkeypatch.setattr(stream, "MAX_LOGITS_BYTES", 7 * 4 * VOCAB_SIZE)  # as if the vocabulary were 80 times as large
        assert np.array_equal(client.logits(prompt(100)), whole)
        generated = client.complete(prompt(100), GenerationParams(max_tokens=1, ignore_eos=True, prefix_cache=False))
        assert generated.token_ids == (int(whole[-1].argmax()),)


def test_a_worker_that_serves_gives_no_logits(tiny_bundle: TinyBundle, tiny_fleet: list[str], tmp_path: Path) -> None:
    with (
        PipelineClient.connect(tiny_fleet, options=ClientOptions(cache_dir=tmp_path)) as client,
        pytest.raises(InvalidOptionError, match=r"the last stage at tcp://.* returns no logits: start it with --allow-logits"),
    ):
        client.logits([5, 6, 7])
