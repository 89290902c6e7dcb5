"""The small forms of benchmarks: the same code on a tiny model, where it is quick."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.cases import PLAIN, Clients, Outcome, Task
from benchmarks.exactness import Tally, compare, report
from benchmarks.fleet import running_worker
from benchmarks.genai import running_peer
from benchmarks.processes import ProcessError, started
from benchmarks.report import as_json
from benchmarks.users import tokens_per_second
from export_tools.export import export_bundle
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle
from tests.support.models import build_tiny

QUIET = Console(quiet=True)


def prompts(count: int, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
    draws = random.Random(5)
    shared = [draws.randrange(8, 264) for _ in range(num_shared)]
    return [shared + [draws.randrange(8, 264) for _ in range(num_tokens - num_shared)] for _ in range(count)]


@pytest.mark.timeout(600)
def test_exactness(tiny_bundle: TinyBundle) -> None:
    bundles = {num_stages: tiny_bundle("gemma3_text", weights=WeightMode.INT4, num_stages=num_stages) for num_stages in (1, 2, 3)}
    task = Task(prompts=prompts(2, 90, num_shared=70), num_tokens=48)
    with Progress(console=QUIET) as progress:
        tallies = compare(bundles, task, progress)
    found = as_json(report(tallies))
    assert found["differing_tokens"] == 0
    assert found["ok"]
    assert found["cases"] >= 3 * 15 * 2 * 1.3  # stages x settings x prompts, about half of them from two clients
    for tally in tallies:
        assert tally.tokens == 48 * tally.cases
        assert tally.cached_prompt_tokens > 0
        assert 0 < tally.accepted_tokens < tally.drafted_tokens


def test_a_differing_token_is_counted_and_its_setting_told() -> None:
    tally = Tally(num_stages=2)
    tally.add(PLAIN, Outcome(tokens=[[1, 2, 3], [4, 5]], num_cached=0, num_drafted=0, num_accepted=0), [[1, 7, 3], [4, 5, 6]])
    assert (tally.cases, tally.tokens, tally.differing_tokens) == (2, 6, 2)
    assert tally.differing_settings == [str(PLAIN)]
    found = as_json(report([tally]))
    assert not found["ok"]
    assert found["settings"]["differing at 2 stages"] == [str(PLAIN)]


def test_genai_peer_and_several_users(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export_bundle(str(build_tiny("llama", tmp_path / "model")), bundle, weights=WeightMode.INT8, for_genai=True, verify_shards=False)
    asked = prompts(4, 20)
    with running_peer(bundle, "SDPA", cores=(0,)) as single, running_peer(bundle, "CB", cores=(0, 1)) as batching:
        seconds, tokens = single.generate(asked[:1], 16)
        assert seconds > 0
        assert [len(answer) for answer in tokens] == [16]
        assert "KV" in single.precisions
        _, many = batching.generate(asked, 16)
        assert [len(answer) for answer in many] == [16] * 4
    options = ClientOptions(cache_dir=tmp_path / "cache")
    with running_worker(bundle, 0) as worker, PipelineClient.connect([worker.address], options=options) as client:
        assert tokens_per_second(client, asked, 16) > 0


def test_a_process_that_ends_early_is_told_with_its_words() -> None:
    words = r"(?s)the helper ended before it said 'ready'.*no such thing"
    with (
        started([sys.executable, "-c", "import sys; sys.exit('no such thing')"], name="helper") as process,
        pytest.raises(ProcessError, match=words),
    ):
        process.wait_for("ready", 30)


def test_clients_are_one_for_each_of_their_settings(tiny_fleet: list[str]) -> None:
    with Clients(tiny_fleet) as clients:
        assert clients.client(PLAIN) is clients.client(replace(PLAIN, drafts="ngram"))
        assert clients.client(PLAIN) is not clients.client(replace(PLAIN, chunk_tokens=48))
        assert clients.client(PLAIN) is not clients.client(replace(PLAIN, steps_ahead=7))
        answer = clients.generate(Task(prompts=prompts(1, 40), num_tokens=8), PLAIN, ())
    assert np.shape(answer.tokens) == (1, 8)
