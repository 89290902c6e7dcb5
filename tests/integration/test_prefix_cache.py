"""The prefix cache on real engines and workers: with it and without it every stream says the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import Generation, GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle
from tests.support.runners import PREFILL, ROWS, RunnerChain, piece, running_chain
from workers.runners import stateful
from workers.runners.engine import StageModel
from workers.runners.runner import Logits
from workers.shard import NumericsName, Settings

ARCHITECTURES = ["llama", "gemma3_text"]
"""The second has windows of 16 positions, which every prompt here crosses."""
KV_BYTES = 2 << 20


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, num_tokens)]


def prefill(chain: RunnerChain, stream: int, tokens: Sequence[int], *edges: int) -> Logits:
    """Prefill from the first edge on, in chunks that end at the others; the logits of the last two positions."""
    for start, end in itertools.pairwise(edges):
        chain.run(piece(stream, start, tokens[start:end], PREFILL, 0))
    return chain.run(piece(stream, edges[-1], tokens[edges[-1] :], PREFILL, 2))


@contextmanager
def running(tiny_bundle: TinyBundle, architecture: str) -> Iterator[RunnerChain]:
    bundle = tiny_bundle(architecture, weights=WeightMode.INT4, num_stages=2)
    with running_chain(bundle, Settings(numerics="fast", threads=1, kv_memory_bytes=KV_BYTES)) as chain:
        yield chain


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_shared_beginning_gives_the_bits_of_a_cold_prefill(tiny_bundle: TinyBundle, architecture: str) -> None:
    """Whatever chunks filled it, wherever the stream begins in it, whoever is gone or still there; and rows after it too."""
    with running(tiny_bundle, architecture) as chain:
        first = text(150)
        chain.open(0, 160)
        cold = prefill(chain, 0, first, 0)
        cold_row = chain.run(piece(0, 150, [7], ROWS))
        assert chain.open(1, 160, first) == 0
        assert np.array_equal(prefill(chain, 1, first, 0, 50, 83), cold)
        for stream, edges in ((2, (128,)), (3, (64,)), (4, (37, 70, 148)), (5, (0, 40))):
            assert chain.open(stream, 160, first) == 128
            assert np.array_equal(prefill(chain, stream, first, *edges), cold)
            assert np.array_equal(chain.run(piece(stream, 150, [7], ROWS)), cold_row)
        for stream in range(1, 6):
            chain.close_stream(stream)
        assert chain.open(6, 160, first) == 128
        assert np.array_equal(prefill(chain, 6, first, 128), cold)
        assert np.array_equal(chain.run(piece(6, 150, [7], ROWS)), cold_row)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_that_part_share_what_is_common_and_generated_text_nothing(tiny_bundle: TinyBundle, architecture: str) -> None:
    with running(tiny_bundle, architecture) as chain:
        one, other = text(150), [*text(150)[:70], *text(80, seed=1)]
        chain.open(0, 160)
        cold = prefill(chain, 0, other, 0)
        chain.open(1, 200, one)
        expected = prefill(chain, 1, one, 0)
        chain.run(piece(1, 150, text(40, seed=2), ROWS))
        assert chain.open(2, 160, other) == 64
        assert np.array_equal(prefill(chain, 2, other, 64, 100), cold)
        grown = [*one, *text(40, seed=2), 5, 6]
        assert chain.open(3, 200, grown) == 128  # the block that ends in generated text is not found
        assert chain.open(4, 160, one) == 128
        assert np.array_equal(prefill(chain, 4, one, 128), expected)


@pytest.mark.parametrize("architecture", ["llama"])
def test_what_was_given_up_is_computed_again(tiny_bundle: TinyBundle, architecture: str) -> None:
    with running(tiny_bundle, architecture) as chain:
        capacity = min(runner.kv_capacity_tokens for runner in chain.runners)
        texts = [text(capacity // 3, seed) for seed in range(5)]
        cold: list[Logits] = []
        for stream, tokens in enumerate(texts):
            chain.open(stream, len(tokens))
            cold.append(prefill(chain, stream, tokens, 0))
            chain.close_stream(stream)
        cached = []
        for turn in range(3):
            for stream in (0, 1, 2, 3, 4, 4, 3):
                held = chain.open(stream, len(texts[stream]), texts[stream])
                cached.append(held)
                assert np.array_equal(prefill(chain, stream, texts[stream], held), cold[stream])
                chain.close_stream(stream)
            assert all(runner.kv_used_tokens == 0 for runner in chain.runners), turn
        assert cached[:5] == [0] * 5
        assert min(cached[5:7]) > 0
        assert 0 in cached[7:]


@pytest.mark.parametrize("architecture", ["llama"])
def test_a_rewind_into_what_others_share_leaves_them_alone(tiny_bundle: TinyBundle, architecture: str) -> None:
    with running(tiny_bundle, architecture) as chain:
        first, changed = text(100), [*text(40), *text(60, seed=3)]
        chain.open(0, 120)
        cold = prefill(chain, 0, changed, 0)
        chain.open(1, 120, first)
        prefill(chain, 1, first, 0)
        expected = chain.run(piece(1, 100, [7], ROWS))
        chain.open(2, 120, first)
        prefill(chain, 2, first, 96)
        assert np.array_equal(prefill(chain, 1, changed, 40), cold)  # from the middle of a block on
        assert np.array_equal(chain.run(piece(2, 100, [7], ROWS)), expected)


def test_a_stream_that_shares_nothing_and_a_worker_that_must_not(tiny_bundle: TinyBundle) -> None:
    bundle = tiny_bundle("llama", weights=WeightMode.INT4, num_stages=2)
    first = text(100)
    for settings in (
        Settings(threads=1, kv_memory_bytes=KV_BYTES, prefix_cache=False),
        Settings(threads=1, kv_memory_bytes=KV_BYTES, kv_precision="u8"),
        Settings(threads=1, kv_memory_bytes=KV_BYTES, runner="stateful"),
    ):
        with running_chain(bundle, settings) as chain:
            chain.open(0, 120, first)
            prefill(chain, 0, first, 0)
            assert chain.open(1, 120, first) == 0
    with running_chain(bundle, Settings(threads=1, kv_memory_bytes=KV_BYTES, kv_precision="u8", prefix_cache=True)) as chain:
        chain.open(0, 120, first)
        prefill(chain, 0, first, 0)
        assert chain.open(1, 120, first) == 96
        assert not chain.runners[0].is_rewind_exact


# --- the stateful runner ---------------------------------------------------------------------------------------------------


@contextmanager
def running_stateful(bundle: Path, numerics: NumericsName = "exact", *, kv_memory_bytes: int = KV_BYTES) -> Iterator[RunnerChain]:
    settings = Settings(runner="stateful", numerics=numerics, threads=1, kv_memory_bytes=kv_memory_bytes, prefix_cache=True)
    with running_chain(bundle, settings) as chain:
        yield chain


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_captured_prompt_says_what_one_says_that_was_cut_there(
    tiny_bundle: TinyBundle, architecture: str, numerics: NumericsName
) -> None:
    """However much is shared, wherever the chain begins in it, and whoever is gone."""
    bundle = tiny_bundle(architecture, weights=WeightMode.INT4, num_stages=2)
    first = text(150)
    with running_stateful(bundle, numerics) as chain:
        assert chain.open(0, 200, first) == 0
        prefill(chain, 0, first, 0)
        chain.run(piece(0, 150, [7, 8, 9], ROWS))
        chain.close_stream(0)
        for prompt, num_cached in ((first, 148), ([*first[:70], *text(80, seed=1)], 70), ([*first, *text(30, seed=2)], 150)):
            for begin in (num_cached, 40):
                assert chain.open(1, 200, prompt) >= num_cached
                warm = [prefill(chain, 1, prompt, begin), chain.run(piece(1, len(prompt), [7], ROWS))]
                chain.open(2, 200)
                cold = [prefill(chain, 2, prompt, 0, begin), chain.run(piece(2, len(prompt), [7], ROWS))]
                # Under `exact` a product rounds by the number of rows, in its last bits; under `fast` not even that.
                assert np.abs(np.concatenate(warm) - np.concatenate(cold)).max() <= (2e-5 if numerics == "exact" else 0.0)
                for stream in (1, 2):
                    chain.close_stream(stream)
        assert all(runner.kv_used_tokens == 0 for runner in chain.runners)


def test_a_prompt_is_captured_after_rewinds_and_begun_again_from_any_stage(tiny_bundle: TinyBundle) -> None:
    """Masked slots are left out of it, and a stage that found more than the others begins earlier, or anew."""
    first = text(150)
    with running_stateful(tiny_bundle("gemma3_text", weights=WeightMode.INT4, num_stages=2)) as chain:
        chain.open(0, 200)
        cold = prefill(chain, 0, first, 0)
        chain.open(1, 200, first)
        prefill(chain, 1, first[:90], 0)
        chain.run(piece(1, 90, text(10, seed=1), ROWS))
        prefill(chain, 1, first, 70, 100)
        for stream, begin in enumerate((148, 64, 0), start=2):
            assert chain.open(stream, 200, first) == 148
            assert np.abs(prefill(chain, stream, first, begin) - cold).max() < 2e-5


def test_captures_live_in_what_no_stream_has_set_aside(tiny_bundle: TinyBundle) -> None:
    bundle = tiny_bundle("llama", weights=WeightMode.INT4, num_stages=1)
    first = text(200)
    with running_stateful(bundle, kv_memory_bytes=1 << 20) as chain:  # 682 positions, of 1.5 KiB with their slack
        assert chain.runners[0].kv_capacity_tokens == 682
        chain.open(0, 200, first)
        prefill(chain, 0, first, 0)
        chain.close_stream(0)
        assert chain.open(1, 500, first) == 198
        chain.close_stream(1)
        chain.open(2, 600, text(200, seed=1))  # leaves room for 123 positions
        chain.close_stream(2)
        assert chain.open(3, 200, first) == 0
        chain.open(4, 400)
        prefill(chain, 3, first, 0)  # 123 again: too small for a capture
        chain.close_stream(4)
        chain.close_stream(3)
        assert chain.open(5, 200, first) == 0


def test_each_stream_has_a_model_of_its_own_where_requests_share_state(tiny_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tiny_bundle("llama", weights=WeightMode.INT4, num_stages=1)
    texts = [text(50, seed) for seed in range(3)]
    seen: list[list[Logits]] = []
    compiled: list[int] = []
    compile_once = StageModel.compile_layers

    def counted(stage: StageModel) -> object:
        compiled.append(1)
        return compile_once(stage)

    monkeypatch.setattr(StageModel, "compile_layers", counted)
    for devices, num_compiled in ((frozenset(), 1), (frozenset({"CPU"}), 3)):
        monkeypatch.setattr(stateful, "SHARED_STATE_DEVICES", devices)
        compiled.clear()
        with running_stateful(bundle) as chain:
            for _ in range(2):
                for stream, tokens in enumerate(texts):
                    chain.open(stream, 60)
                    prefill(chain, stream, tokens, 0)
                seen.append([chain.run(piece(stream, 50, [7], ROWS)) for stream in range(3)])
                for stream in range(3):
                    chain.close_stream(stream)
        assert len(compiled) == num_compiled
    for logits in seen[1:]:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(logits, seen[0], strict=True))


# --- over the wire ---------------------------------------------------------------------------------------------------

PARAMS = GenerationParams(max_tokens=20, ignore_eos=True)
SAMPLED = GenerationParams(
    max_tokens=20, ignore_eos=True, sampling=SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.2)
)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle("gemma3_text", weights=WeightMode.INT4, num_stages=2)


def test_two_clients_of_one_fleet_share_prompts_and_say_what_they_say_alone(bundle: Path, tmp_path: Path) -> None:
    """Greedy and sampled, with penalties over a history that was not sent; one after another and all at once."""
    system = text(100)
    prompts = [[*system, *text(length, seed=length)] for length in (2, 29, 30, 60, 200)] + [system[:64], system[:65], system[:66], [9]]
    options = ClientOptions(cache_dir=tmp_path)
    with (
        LocalFleet(bundle, num_threads=1, kv_memory="4MiB") as fleet,
        PipelineClient.connect(fleet.addresses, options=options) as ann,
        PipelineClient.connect(fleet.addresses, options=options) as bob,
    ):
        for params in (PARAMS, SAMPLED):
            cold = [ann.complete(prompt, replaced(params, prefix_cache=False)) for prompt in prompts]
            assert {generation.stats.num_cached_tokens for generation in cold} == {0}
            warm = [bob.complete(prompt, params) for prompt in prompts]
            again = [ann.complete(prompt, params) for prompt in prompts]
            with ThreadPoolExecutor(2 * len(prompts)) as pool:
                at_once = list(
                    pool.map(lambda job, params=params: job[0].complete(job[1], params), [(c, p) for c in (ann, bob) for p in prompts])
                )
            assert tokens(warm) == tokens(again) == tokens(cold)
            assert tokens(at_once) == tokens(cold) * 2
            assert cached(again) == [96, 96, 128, 128, 288, 32, 32, 64, 0]
        assert all(stage.kv_used_tokens == 0 for worker in ann.status().workers for stage in worker.status.stages)  # type: ignore[union-attr]


def test_all_finds_the_answers_of_a_chat_too_and_leaves_exact_streams_alone(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three turns, each with all that was said before; drafts are rejected on the way. Then the same turns exactly."""
    params = GenerationParams(max_tokens=70, ignore_eos=True, draft="ngram")
    everything = dataclasses.replace(params, prefix_cache="all")
    with (
        LocalFleet(bundle, num_threads=1, kv_memory="4MiB") as fleet,
        PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path)) as client,
    ):
        said, prompts, num_cached = text(45), [], []
        for turn in range(3):
            prompts.append(tuple(said))
            answer = client.complete(said, everything)
            num_cached.append(answer.stats.num_cached_tokens)
            said = [*said, *answer.token_ids, *text(9, seed=turn)]
        assert num_cached == [0, 96, 192]  # 45 + 70 and 2 * (45 + 70) + 9, less the last tokens, which no step had behind it
        exact = [client.complete(prompt, params) for prompt in prompts]
        cold = [client.complete(prompt, replaced(params, prefix_cache=False)) for prompt in prompts]
        assert tokens(exact) == tokens(cold)
        assert cached(exact) == [32, 32, 96]
    warnings = [record.getMessage() for record in caplog.records if "prefix_cache='all'" in record.getMessage()]
    assert len(warnings) == 1
    assert "texts may differ" in warnings[0]


def replaced(params: GenerationParams, *, prefix_cache: bool) -> GenerationParams:
    return dataclasses.replace(params, prefix_cache=prefix_cache)


def tokens(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def cached(generations: Sequence[Generation]) -> list[int]:
    return [generation.stats.num_cached_tokens for generation in generations]
