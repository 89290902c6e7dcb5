"""Both engines on real graphs: the same tokens, whatever the split, the company, the chunks and the rejections."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from langchain_pshard.core.bundle import TOKENIZER_DIR, WeightMode, load_manifest
from langchain_pshard.core.errors import BundleError, CapacityError, InferenceError, InvalidOptionError, MissingExtraError
from langchain_pshard.core.sampling import SamplingParams
from tests.support.bundles import DemoBundle, TinyBundle
from tests.support.runners import MAX_DRAFTS, PREFILL, ROWS, ArrivingText, RunnerChain, key, piece, running_chain
from workers.runners.runner import Logits
from workers.shard import NumericsName, RunnerName, Settings, make_runner

ARCHITECTURES = ["llama", "gemma3_text"]  # the latter crosses its window of 16
KV_BYTES = 8 << 20


def settings(runner: RunnerName = "paged", numerics: NumericsName = "exact", *, kv_memory_bytes: int = KV_BYTES) -> Settings:
    return Settings(runner=runner, numerics=numerics, threads=1, kv_memory_bytes=kv_memory_bytes)


def same_rows(numerics: NumericsName, logits: Logits, expected: Logits) -> bool:
    """Bit for bit where activations are quantized in float32; plain float32 products round by the number of rows, in their last bits."""
    if numerics == "fast":
        return np.array_equal(logits, expected)
    tokens_agree = np.array_equal(logits.argmax(axis=-1), expected.argmax(axis=-1))
    return tokens_agree and bool(np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max())


def batch_settings(numerics: NumericsName, threads: int = 2) -> Settings:
    return Settings(numerics=numerics, threads=threads, kv_memory_bytes=KV_BYTES)


def batch_bundle(tiny_bundle: TinyBundle, architecture: str, numerics: NumericsName) -> Path:
    """Two stages; int4 under `fast`, the weights it is for."""
    return tiny_bundle(architecture, num_stages=2, weights=WeightMode.INT4 if numerics == "fast" else WeightMode.FP32)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 264, num_tokens).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_paged_stateful_and_transformers_agree(tiny_bundle: TinyBundle, architecture: str) -> None:
    from tests.support.chain import reference_logits

    bundle = tiny_bundle(architecture)
    text = prompt(40)
    with running_chain(bundle, settings("paged")) as paged, running_chain(bundle, settings("stateful")) as stateful:
        tokens, logits = paged.generate(1, text, 80)
        assert stateful.generate(1, text, 80)[0] == tokens
    model = bundle.parent / f"{architecture}-model"
    expected = reference_logits(model, text + tokens[:-1])[len(text) - 1 :]
    assert expected.argmax(axis=1).tolist() == tokens
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("runner", ["paged", "stateful"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_do_not_change_a_bit(tiny_bundle: TinyBundle, architecture: str, runner: RunnerName, numerics: NumericsName) -> None:
    text = prompt(40)
    with running_chain(tiny_bundle(architecture), settings(runner, numerics)) as whole:
        tokens, logits = whole.generate(1, text, 40)
    for num_stages in (2, 3):
        with running_chain(tiny_bundle(architecture, num_stages=num_stages), settings(runner, numerics)) as chain:
            cut_tokens, cut_logits = chain.generate(1, text, 40)
        assert cut_tokens == tokens
        assert np.array_equal(cut_logits, logits)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_company_does_not_change_a_stream(tiny_bundle: TinyBundle, architecture: str, numerics: NumericsName) -> None:
    """Eight streams of different lengths in shared steps, while a ninth prefills beside them."""
    texts = [prompt(5 + 7 * idx, seed=idx) for idx in range(8)]
    num_tokens = 24
    with running_chain(batch_bundle(tiny_bundle, architecture, numerics), batch_settings(numerics)) as chain:
        alone = [chain.generate(idx, text, num_tokens) for idx, text in enumerate(texts)]
        for idx, text in enumerate(texts):
            chain.open(idx, len(text) + num_tokens)
        rows = [[row] for row in chain.run(*(piece(idx, 0, text, PREFILL) for idx, text in enumerate(texts)))]
        chain.open(99, 10 * num_tokens)
        for step in range(num_tokens - 1):
            last = [[int(mine[-1].argmax())] for mine in rows]
            slices = [piece(idx, len(text) + step, last[idx], ROWS) for idx, text in enumerate(texts)]
            beside = piece(99, 10 * step, prompt(10, seed=step), PREFILL, num_sampled=0)
            for mine, row in zip(rows, chain.run(*slices[:4], beside, *slices[4:]), strict=True):
                mine.append(row)
        for mine, (_, expected) in zip(rows, alone, strict=True):
            assert same_rows(numerics, np.stack(mine), expected)


@pytest.mark.parametrize("weights", [WeightMode.INT4, WeightMode.INT8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_neither_threads_nor_company_change_a_bit_under_fast(tiny_bundle: TinyBundle, architecture: str, weights: WeightMode) -> None:
    """Contexts of several blocks, which the plugin would share out among threads if it could."""
    bundle = tiny_bundle(architecture, num_stages=2, weights=weights)
    texts = [prompt(70 + 9 * idx, seed=idx) for idx in range(4)]
    seen: list[Logits] = []
    for threads in (1, 2):
        with running_chain(bundle, batch_settings("fast", threads)) as chain:
            for idx, text in enumerate(texts):
                chain.open(idx, len(text) + 1)
                chain.run(piece(idx, 0, text, PREFILL))
            rows = [piece(idx, len(text), [40 + idx], ROWS) for idx, text in enumerate(texts)]
            seen.append(np.concatenate([chain.run(row) for row in rows]))
            seen.append(chain.run(*rows))
    for logits in seen[1:]:
        assert np.array_equal(logits, seen[0])


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rejected_drafts_do_not_change_a_stream_of_paged(tiny_bundle: TinyBundle, architecture: str, numerics: NumericsName) -> None:
    text = prompt(30)
    with running_chain(batch_bundle(tiny_bundle, architecture, numerics), batch_settings(numerics)) as chain:
        tokens, logits = chain.generate(1, text, 100)
        drafted_tokens, drafted_logits = chain.generate_with_drafts(2, text, 100, tokens, np.random.default_rng(3))
        assert all(runner.is_rewind_exact for runner in chain.runners)
    assert drafted_tokens == tokens
    assert same_rows(numerics, drafted_logits, logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rejected_drafts_do_not_change_a_token_of_stateful(tiny_bundle: TinyBundle, architecture: str) -> None:
    """Enough rejections that the cache is moved together several times."""
    text = prompt(10)
    with running_chain(tiny_bundle(architecture, num_stages=2), settings("stateful")) as chain:
        tokens, logits = chain.generate(1, text, 160)
        drafted_tokens, drafted_logits = chain.generate_with_drafts(2, text, 160, tokens, np.random.default_rng(3))
        assert all(runner.is_rewind_exact for runner in chain.runners)
    assert drafted_tokens == tokens
    assert np.abs(drafted_logits - logits).max() < 1e-5 * np.abs(logits).max()


def test_stateful_says_when_rewinds_are_not_exact(tiny_bundle: TinyBundle) -> None:
    with running_chain(tiny_bundle("llama"), settings("stateful", "fast")) as chain:
        assert not chain.runners[0].is_rewind_exact


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_split_of_a_prefill_equals_one(tiny_bundle: TinyBundle, architecture: str, numerics: NumericsName) -> None:
    text = prompt(150)
    with running_chain(batch_bundle(tiny_bundle, architecture, numerics), batch_settings(numerics)) as chain:
        chain.open(0, len(text))
        expected = chain.run(piece(0, 0, text, PREFILL, num_sampled=len(text)))
        for cuts in ([2], [31, 33], [64], [16, 32, 48, 80], [148]):
            chain.open(1, len(text))
            edges = [0, *cuts, len(text)]
            rows = [
                chain.run(piece(1, start, text[start:end], PREFILL, num_sampled=end - start)) for start, end in itertools.pairwise(edges)
            ]
            chain.close_stream(1)
            assert same_rows(numerics, np.concatenate(rows), expected)


@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_sampling_fewer_rows_does_not_change_them(tiny_bundle: TinyBundle, runner: RunnerName) -> None:
    text = prompt(50)
    with running_chain(tiny_bundle("gemma3_text"), settings(runner)) as chain:
        chain.open(1, 60)
        every = chain.run(piece(1, 0, text, PREFILL, num_sampled=50))
        assert same_rows("exact", chain.run(piece(1, 0, text, PREFILL, num_sampled=3)), every[-3:])
        after = chain.run(piece(1, 50, [9], ROWS))
        nothing = chain.run(piece(1, 0, text, PREFILL, num_sampled=0))
        assert nothing.shape == (0, every.shape[1])
        assert np.array_equal(chain.run(piece(1, 50, [9], ROWS)), after)  # the KV was written all the same


def test_rows_that_sample_nothing_write_their_kv(tiny_bundle: TinyBundle) -> None:
    """As a replay does, one row after another; the request keeps reading the inputs of the first of them."""
    text = prompt(20)
    with running_chain(tiny_bundle("llama"), settings()) as chain:
        for stream, num_sampled in ((1, 1), (2, 0)):
            chain.open(stream, 40)
            chain.run(piece(stream, 0, text, PREFILL, num_sampled))
            for step in range(8):
                assert len(chain.run(piece(stream, 20 + step, [30 + step], ROWS, num_sampled))) == num_sampled
        expected, replayed = (chain.run(piece(stream, 28, [50], ROWS)) for stream in (1, 2))
        assert np.array_equal(replayed, expected)


def test_hidden_states_are_not_overwritten_by_later_steps(tiny_bundle: TinyBundle) -> None:
    with running_chain(tiny_bundle("llama", num_stages=2), settings()) as chain:
        chain.open(1, 50)
        first, last = chain.runners
        text = piece(1, 0, prompt(20), PREFILL)
        hidden = first.run([text], None)
        kept = hidden.copy()
        last.run([text], hidden)
        for step in range(3):
            row = piece(1, 20 + step, [30 + step], ROWS)
            last.run([row], first.run([row], None))
        assert np.array_equal(hidden, kept)


def test_hidden_states_are_read_wherever_a_frame_puts_them(tiny_bundle: TinyBundle) -> None:
    with running_chain(tiny_bundle("llama", num_stages=2), settings(numerics="fast")) as chain:
        chain.open(1, 50)
        first, last = chain.runners
        text = piece(1, 0, prompt(20), PREFILL)
        hidden = first.run([text], None)
        assert hidden.dtype == np.float32
        expected = last.run([text], hidden).copy()
        frame = b"x" + hidden.tobytes()  # odd address, read-only
        received = np.frombuffer(frame, dtype=np.uint8)[1:].view(hidden.dtype).reshape(hidden.shape)
        assert np.array_equal(last.run([text], received), expected)


@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_a_failed_inference_can_be_repeated(tiny_bundle: TinyBundle, runner: RunnerName) -> None:
    with running_chain(tiny_bundle("llama", num_stages=2), settings(runner)) as chain:
        chain.open(1, 50)
        first, last = chain.runners
        text, row = piece(1, 0, prompt(20), PREFILL), piece(1, 20, [50], ROWS)
        last.run([text], first.run([text], None))
        hidden = first.run([row], None)
        for broken in (row, piece(1, 20, [50], ROWS, num_sampled=0)):  # also where no logits could tell
            with pytest.raises(InferenceError, match="stage 1 failed to infer"):
                last.run([broken], hidden[:, :32])
        repeated = last.run([row], hidden).copy()
        assert np.allclose(last.run([row], hidden), repeated, rtol=0, atol=1e-5)
        chain.open(2, 50)
        others = [piece(2, 0, text.tokens.tolist(), PREFILL), piece(2, 20, [50], ROWS)]
        assert np.allclose([chain.run(step)[0] for step in others][1], repeated[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_what_does_not_fit_is_refused_with_figures(tiny_bundle: TinyBundle, runner: RunnerName) -> None:
    with running_chain(tiny_bundle("llama"), settings(runner, kv_memory_bytes=1 << 20)) as chain:
        [engine] = chain.runners
        total = engine.kv_capacity_tokens
        assert total == {"paged": 1024, "stateful": 682}[runner]  # 1 KiB a position in float32, half as much again when stateful
        engine.open(key(1), 512)
        with pytest.raises(
            CapacityError, match=rf"needs 544 positions .* {total - 512} (positions )?.* free of {total} positions \(1\.0 MiB\)"
        ):
            engine.open(key(2), 544)
        assert engine.kv_used_tokens == 512
        engine.close_stream(key(1))
        engine.close_stream(key(1))
        assert engine.kv_used_tokens == 0
        engine.open(key(2), 544)


@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_a_budget_out_of_proportion_is_refused(tiny_bundle: TinyBundle, runner: RunnerName) -> None:
    bundle = tiny_bundle("llama")
    with pytest.raises(CapacityError, match=r"needs \d+ MiB, \d+ MiB of memory are available"):
        RunnerChain(bundle, settings(runner, kv_memory_bytes=1 << 50))
    with pytest.raises(InvalidOptionError, match=r"holds no (block|position).*valid: \d+ bytes or more"):
        RunnerChain(bundle, settings(runner, kv_memory_bytes=100))


def test_a_wrong_stage_or_device_is_named(tiny_bundle: TinyBundle) -> None:
    bundle = tiny_bundle("llama")
    manifest = load_manifest(bundle)
    with pytest.raises(InvalidOptionError, match="stage 1 is not in this bundle; valid: 0 to 0"):
        make_runner(bundle, manifest, 1, settings())
    with pytest.raises(InvalidOptionError, match=r"device 'TPU' does not exist on this machine; available: .*CPU"):
        make_runner(bundle, manifest, 0, Settings(device="TPU"))


def test_a_missing_model_file_is_named(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"stage-0.openvino_model\.xml"):
        make_runner(tmp_path, load_manifest(tiny_bundle("llama")), 0, settings())


def test_a_missing_openvino_names_the_extra(tiny_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tiny_bundle("llama")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtraError, match=r"langchain-pshard\[worker\]"):
        make_runner(bundle, load_manifest(bundle), 0, settings())


@pytest.mark.real_model
@pytest.mark.timeout(400)  # the first run on a machine exports the model
def test_paged_and_stateful_agree_over_600_tokens_of_the_real_model(demo_bundle: DemoBundle) -> None:
    """Beyond its window of 512 positions; the stateful run verifies drafts, of which many are rejected. Both run at once, on a core each.

    Sampled, not greedy: the base model soon repeats itself, and a text of five different tokens would show little.
    """
    bundle = demo_bundle(weights=WeightMode.INT4, layers=(16, 2))
    tokenizer = Tokenizer.from_file(str(bundle / TOKENIZER_DIR / "tokenizer.json"))
    text = tokenizer.encode("The history of the lighthouse begins long before the first electric lamp. In the early days,").ids
    sampling = SamplingParams(temperature=1.0, top_k=200, seed=1)
    num_tokens = 600
    drafts = ArrivingText(num_tokens)
    options: dict[str, Any] = {"numerics": "exact", "threads": 1, "kv_memory_bytes": 64 << 20}

    def plain(chain: RunnerChain) -> list[int]:
        tokens = []
        for choice in itertools.islice(chain.decode(1, text), num_tokens):
            drafts.put(choice.token)
            tokens.append(choice.token)
        return tokens

    def drafted(chain: RunnerChain) -> list[int]:
        choices = chain.decode_with_drafts(1, text, drafts, np.random.default_rng(2))
        return [choice.token for choice in itertools.islice(choices, num_tokens)]

    with (
        running_chain(bundle, Settings(runner="paged", **options), sampling) as paged,
        running_chain(bundle, Settings(runner="stateful", **options), sampling) as stateful,
        ThreadPoolExecutor(2) as threads,
    ):
        for chain in (paged, stateful):
            chain.open(1, len(text) + num_tokens + MAX_DRAFTS)
        from_paged, from_stateful = threads.submit(plain, paged), threads.submit(drafted, stateful)
        tokens = from_paged.result()
        assert len(set(tokens)) > 100
        assert from_stateful.result() == tokens
