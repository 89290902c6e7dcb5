"""Stages whose layers all have windows hold no more of a stream than the windows see, and nobody can tell by the bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import CapacityError, StateLostError
from langchain_pshard.core.kv import BLOCK_TOKENS, MAX_SLICE_TOKENS, kept_tokens
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle
from tests.support.models import CONTEXT_LENGTH, WINDOW
from tests.support.runners import MAX_DRAFTS, PREFILL, ROWS, RunnerChain, key, piece, running_chain
from workers.runners.engine import StageModel
from workers.runners.runner import Logits
from workers.shard import NumericsName, Settings

STREAM_TOKENS = (-(-(WINDOW - 1 + MAX_SLICE_TOKENS) // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
NUM_PROMPT, NUM_GENERATED = 900, 120
NUM_POSITIONS = NUM_PROMPT + NUM_GENERATED + MAX_DRAFTS
TOKEN_BYTES = {"fast": 256, "exact": 512}
"""KV of a position on a stage of two tiny layers."""


def text(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(8, 264, NUM_POSITIONS)]


@contextmanager
def running(bundle: Path, numerics: NumericsName, num_positions: int) -> Iterator[RunnerChain]:
    settings = Settings(numerics=numerics, threads=2, kv_memory_bytes=num_positions * TOKEN_BYTES[numerics])
    with running_chain(bundle, settings) as chain:
        yield chain


def run_two_streams(chain: RunnerChain) -> Logits:
    """Two streams in turns, each through what the other gave back: chunks, rows, rejected drafts, a repeated step, a step of both."""
    out: list[Logits] = []
    texts = [text(seed) for seed in (1, 2)]
    wrong = [7] * MAX_DRAFTS
    for stream in (0, 1):
        chain.open(stream, NUM_POSITIONS)
    for start, end in itertools.pairwise([*range(0, NUM_PROMPT, 250), NUM_PROMPT]):
        out += [chain.run(piece(stream, start, texts[stream][start:end], PREFILL, 3)) for stream in (0, 1)]
    for start in range(NUM_PROMPT, NUM_PROMPT + NUM_GENERATED, 3):
        out += [chain.run(piece(stream, start, [texts[stream][start], *wrong], ROWS, 1 + MAX_DRAFTS)) for stream in (0, 1)]
        out.append(chain.run(*(piece(stream, start, texts[stream][start : start + 3], ROWS, 3) for stream in (0, 1))))
    return np.concatenate(out)


@pytest.mark.parametrize(("numerics", "weights"), [("fast", WeightMode.INT4), ("exact", WeightMode.FP32)])
def test_giving_passed_blocks_back_changes_no_bit(
    tiny_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, numerics: NumericsName, weights: WeightMode
) -> None:
    bundle = tiny_bundle("mistral", weights=weights, num_stages=2)
    with running(bundle, numerics, 2 * STREAM_TOKENS) as chain:
        assert [runner.kv_stream_tokens for runner in chain.runners] == [STREAM_TOKENS] * 2
        assert kept_tokens([WINDOW] * 2, 100_000, 3) == 3 * STREAM_TOKENS  # what a plan counts
        logits = run_two_streams(chain)
        assert [runner.kv_used_tokens for runner in chain.runners] == [2 * STREAM_TOKENS] * 2
    monkeypatch.setattr(StageModel, "kv_window", None)
    with running(bundle, numerics, 2 * STREAM_TOKENS) as chain, pytest.raises(CapacityError, match="needs 1024 positions"):
        run_two_streams(chain)
    with running(bundle, numerics, 4 * NUM_POSITIONS) as chain:
        assert [runner.kv_stream_tokens for runner in chain.runners] == [None] * 2
        assert np.array_equal(run_two_streams(chain), logits)


def test_a_prompt_longer_than_the_window_is_shared(tiny_bundle: TinyBundle) -> None:
    """From wherever the chain begins in it, with the bits of a cold prefill."""
    prompt = text(3)[:NUM_PROMPT]
    with running(tiny_bundle("mistral", weights=WeightMode.INT4, num_stages=2), "fast", 4 * NUM_POSITIONS) as chain:
        assert chain.open(0, NUM_POSITIONS, prompt) == 0
        for start in range(0, NUM_PROMPT - 100, 200):
            chain.run(piece(0, start, prompt[start : start + 200], PREFILL, 0))
        cold = chain.run(piece(0, 800, prompt[800:], PREFILL, 2))
        cold_row = chain.run(piece(0, NUM_PROMPT, [9], ROWS))
        chain.close_stream(0)
        for stream, begin in enumerate((896, 800, 650, 32, 0), start=1):
            assert chain.open(stream, NUM_POSITIONS, prompt) == NUM_PROMPT // BLOCK_TOKENS * BLOCK_TOKENS
            for start in range(begin, NUM_PROMPT, 500):
                logits = chain.run(piece(stream, start, prompt[start : start + 500], PREFILL, 2))
            assert np.array_equal(logits, cold)
            assert np.array_equal(chain.run(piece(stream, NUM_PROMPT, [9], ROWS)), cold_row)
            chain.close_stream(stream)
        assert [runner.kv_used_tokens for runner in chain.runners] == [0, 0]


def test_a_rewind_behind_the_window_has_lost_state_and_can_begin_anew(tiny_bundle: TinyBundle) -> None:
    prompt = text(4)
    with running(tiny_bundle("mistral", weights=WeightMode.INT4, num_stages=2), "fast", 4 * NUM_POSITIONS) as chain:
        chain.open(0, NUM_POSITIONS)
        first = chain.run(piece(0, 0, prompt[:400], PREFILL))
        chain.run(piece(0, 400, prompt[400:800], PREFILL))
        runner = chain.runners[0]
        with pytest.raises(StateLostError, match="the stream goes back to position 100; its KV before position 224 was given up"):
            runner.run([piece(0, 100, [1], ROWS)], None)
        assert np.array_equal(chain.run(piece(0, 0, prompt[:400], PREFILL)), first)
        runner.close_stream(key(0))


def test_a_stage_with_a_layer_that_sees_everything_keeps_everything(tiny_bundle: TinyBundle) -> None:
    with running(tiny_bundle("gemma3_text", weights=WeightMode.INT4, num_stages=1), "fast", 2 * NUM_POSITIONS) as chain:
        assert chain.runners[0].kv_stream_tokens is None


def test_streams_longer_than_the_room_of_a_windowed_fleet_are_served(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    """And admitted by what they take, not by how long they are: through processes and the wire, with drafts and the prefix cache."""
    bundle = tiny_bundle("mistral", weights=WeightMode.INT4, num_stages=2)
    params = GenerationParams(max_tokens=300, ignore_eos=True)
    prompts = [text(seed)[: CONTEXT_LENGTH // 2 - 100] for seed in (5, 6)]
    options = ClientOptions(cache_dir=tmp_path)
    generations = []
    for kv_memory in (f"{2 * STREAM_TOKENS * TOKEN_BYTES['fast']}B", "16MiB"):
        with (
            LocalFleet(bundle, num_threads=1, kv_memory=kv_memory) as fleet,
            PipelineClient.connect(fleet.addresses, options=options) as client,
        ):
            running = [client.generate(prompt, params) for prompt in prompts]
            generations.append([tuple(token for chunk in chunks for token in chunk.token_ids) for chunks in running])
            assert [stage.kv_stream_tokens for stage in client.chain.stages] == [STREAM_TOKENS] * 2
    assert generations[0] == generations[1]
    assert [len(tokens) for tokens in generations[0]] == [300, 300]
