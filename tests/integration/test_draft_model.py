"""The draft model on real workers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet import running_worker
from export_tools.export import export_bundle
from langchain_pshard import ChatPShard
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle
from tests.support.models import build_tiny


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, and the same model once more as its own draft: it guesses right wherever the model is greedy."""
    folder = tmp_path_factory.mktemp("drafted")
    model = build_tiny("llama", folder / "model")
    options = {"num_stages": 2, "weights": WeightMode.INT4, "draft": str(model), "verify_shards": False}
    export_bundle(str(model), folder / "bundle", **options)  # type: ignore[arg-type]
    return folder / "bundle"


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workers", *map(str, arguments), "--log-format", "json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_bundle_without_a_draft_cannot_serve_one(tiny_bundle: TinyBundle) -> None:
    refused = start(tiny_bundle("llama", num_stages=2), "--draft")
    event = json.loads(refused.stdout)
    assert (refused.returncode, event["code"]) == (1, "invalid-option")
    assert "holds no draft of llama-model; export it again with pshard-export --draft MODEL" in event["message"]


def test_a_worker_serves_something(bundle: Path) -> None:
    refused = start(bundle)
    assert refused.returncode == 2
    assert "nothing to serve: give --stage I, once or more, --draft, or both" in refused.stderr


def test_a_damaged_draft_is_found_at_the_start(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    weights = copy / "draft" / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    event = json.loads(start(copy, "--draft").stdout)
    assert event["code"] == "bundle"
    assert str(Path("draft") / "openvino_model.bin") in event["message"]


PROMPTS = ("one and two and one and two and", "a list:\n1. salt\n2. oil\n3.")
PLAIN = GenerationParams(max_tokens=96, ignore_eos=True, draft=None)
SAMPLED = replace(PLAIN, sampling=SamplingParams(temperature=0.7, top_k=5, seed=7))


def test_the_model_as_its_own_draft_is_always_right(bundle: Path, tmp_path: Path) -> None:
    with (
        LocalFleet(bundle, num_threads=1, drafts=True) as fleet,
        PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path)) as client,
    ):
        assert client.chain.draft is not None
        assert client.chain.draft.address == fleet.addresses[1]
        for prompt in PROMPTS:
            for plain in (PLAIN, SAMPLED):
                expected = client.complete(prompt, plain)
                for draft_tokens in (3, "auto"):
                    found = client.complete(prompt, replace(plain, draft="model", draft_tokens=draft_tokens))
                    assert found.token_ids == expected.token_ids
                    stats = found.stats
                    assert stats.num_steps + stats.num_accepted_tokens == 96
                    if draft_tokens == 3:  # "auto" asks for as many as pay, and a draft as large as the model itself hardly does
                        assert stats.num_drafted_tokens > 0
                    if plain is PLAIN:
                        assert stats.num_accepted_tokens == stats.num_drafted_tokens
        status = client.status().workers[1].status
        assert status is not None
        assert status.draft is not None
        assert status.draft.num_tokens > 0
        assert (status.draft.num_streams, status.draft.kv_used_tokens) == (0, 0)


def test_streams_together_share_the_draft(bundle: Path, tmp_path: Path) -> None:
    with running_worker(bundle, 0, 1) as stages, running_worker(bundle, options=["--draft"]) as drafting:
        options = ClientOptions(cache_dir=tmp_path)
        with PipelineClient.connect([drafting.address, stages.address], options=options) as client:
            assert client.chain.draft is not None
            assert client.chain.draft.address == drafting.address
            assert [stage.address for stage in client.chain.stages] == [stages.address] * 2
            prompts = [f"{number} {prompt}" for number in range(3) for prompt in PROMPTS]
            expected = [client.complete(prompt, PLAIN).token_ids for prompt in prompts]
            with ThreadPoolExecutor(len(prompts)) as pool:
                found = list(pool.map(lambda prompt: client.complete(prompt, replace(PLAIN, draft="model", draft_tokens=4)), prompts))
            assert [each.token_ids for each in found] == expected
            assert all(each.stats.num_accepted_tokens == each.stats.num_drafted_tokens for each in found)
            assert sum(each.stats.num_drafted_tokens for each in found) > 0


def test_texts_outlive_a_worker_that_only_drafts(bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = replace(PLAIN, max_tokens=600, draft="model", draft_tokens=2)
    with running_worker(bundle, 0, 1) as stages, running_worker(bundle, options=["--draft"]) as drafting:
        options = ClientOptions(cache_dir=tmp_path)
        with PipelineClient.connect([stages.address, drafting.address], options=options) as client:
            expected = client.complete(PROMPTS[0], replace(params, draft=None)).token_ids
            tokens: list[int] = []
            drafted: list[int] = []
            for chunk in client.generate(PROMPTS[0], params):
                tokens += chunk.token_ids
                if len(tokens) > 60 and drafting.process.poll() is None:
                    drafting.process.kill()
                    drafting.process.wait()
                if chunk.end is not None:
                    drafted.append(chunk.end.stats.num_drafted_tokens)
            assert tuple(tokens) == expected
            assert 0 < drafted[0] < 300
            assert f"the worker at {drafting.address}, which drafts, is lost" in caplog.text
            # The next call goes on without, and drafts are there again when the worker is.
            assert client.complete(PROMPTS[0], replace(params, max_tokens=20)).token_ids == expected[:20]
            with running_worker(bundle, options=["--draft", "--listen", drafting.address]):
                for _ in range(200):
                    again = client.complete(PROMPTS[0], replace(params, max_tokens=20))
                    assert again.token_ids == expected[:20]
                    if again.stats.num_drafted_tokens:
                        break
                else:
                    pytest.fail("the worker that drafts was not taken back")


def test_a_draft_of_short_windows_takes_back_what_was_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its KV is given back behind the windows, but not so soon that wrong guesses could not be taken back."""
    model = build_tiny("mistral", tmp_path / "model")
    export_bundle(str(model), tmp_path / "bundle", weights=WeightMode.INT4, draft=str(model), verify_shards=False)
    options = ClientOptions(cache_dir=tmp_path / "cache")
    plain = replace(SAMPLED, max_tokens=240)
    fleet = LocalFleet(tmp_path / "bundle", num_threads=1, drafts=True)
    with fleet, PipelineClient.connect(fleet.addresses, options=options) as client:
        expected = client.complete(PROMPTS[0], plain)
        found = client.complete(PROMPTS[0], replace(plain, draft="model", draft_tokens=12))
    assert found.token_ids == expected.token_ids
    assert 0 < found.stats.acceptance < 0.9
    assert "goes on without drafts" not in caplog.text


def test_a_text_that_finds_no_room_goes_on_without_drafts(bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_worker(bundle, 0, 1) as stages, running_worker(bundle, options=["--draft", "--kv-memory", "64KiB"]) as drafting:
        options = ClientOptions(cache_dir=tmp_path)
        with PipelineClient.connect([stages.address, drafting.address], options=options) as client:
            params = replace(PLAIN, draft="model", draft_tokens=3)
            short = client.complete(PROMPTS[0], params)
            assert short.stats.num_drafted_tokens > 0
            for _ in range(2):
                long = client.complete(PROMPTS[0], replace(params, max_tokens=200))
                assert long.token_ids[:96] == short.token_ids
                assert long.stats.num_drafted_tokens == 0
    told = [record.getMessage() for record in caplog.records if "goes on without drafts" in record.getMessage()]
    assert len(told) == 1
    assert "(capacity): the draft: a stream of" in told[0]


def test_a_fleet_without_a_draft_refuses_before_work(tiny_fleet: list[str], tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    refusal = "draft='model' needs a worker that serves the draft model, and none of this fleet does"
    connected = PipelineClient.connect(tiny_fleet, options=ClientOptions(cache_dir=tmp_path))
    with connected as client, pytest.raises(InvalidOptionError, match=refusal):
        client.generate("a", replace(PLAIN, draft="model"))
    with pytest.raises(InvalidOptionError, match="holds none: export it again with pshard-export --draft MODEL"):
        LocalFleet(tiny_bundle("llama", num_stages=2), drafts=True)


def test_the_chat_model_starts_the_draft(bundle: Path) -> None:
    with ChatPShard(bundle=bundle, draft="model", max_tokens=24) as model, ChatPShard(bundle=bundle, draft=None, max_tokens=24) as plain:
        assert model.invoke("Hello").content == plain.invoke("Hello").content
        with pytest.raises(InvalidOptionError, match="none of this fleet does"):
            plain.invoke("Hello", draft="model")
