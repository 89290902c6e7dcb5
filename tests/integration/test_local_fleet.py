"""The client with real worker processes on a tiny model: it generates, survives their death, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from langchain_pshard import ChatPShard
from langchain_pshard.core.errors import BundleError, ClosedError, InvalidOptionError, WorkerLostError, WorkerUnreachableError
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.local import LocalFleet
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle

PARAMS = GenerationParams(max_tokens=24, ignore_eos=True)
LONG = GenerationParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def bundles(tiny_bundle: TinyBundle) -> dict[int, Path]:
    """Tiny Llama bundles by number of stages, exported before any test of this module looks for leaks."""
    return {num_stages: tiny_bundle("llama", num_stages=num_stages) for num_stages in (1, 2, 3)}


def connect(fleet: LocalFleet, folder: Path) -> PipelineClient:
    return PipelineClient.connect(fleet.addresses, connect_timeout_s=5, options=ClientOptions(cache_dir=folder))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_any_number_of_stages_gives_the_same_text(bundles: dict[int, Path], tmp_path: Path, num_stages: int) -> None:
    texts = []
    for count in {1, num_stages}:
        bundle = bundles[count]
        with LocalFleet(bundle, num_threads=1, numerics="exact") as fleet, connect(fleet, tmp_path) as client:
            assert client.chain.num_stages == count
            texts.append(client.complete("hello there", PARAMS).token_ids)
    assert len(set(texts)) == 1


def test_together_with_others_and_with_drafts_a_stream_says_what_it_says_alone(bundles: dict[int, Path], tmp_path: Path) -> None:
    prompts = [f"{word} and then" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
    with LocalFleet(bundles[2], num_threads=1, numerics="exact") as fleet, connect(fleet, tmp_path) as client:
        for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=11)):
            params = GenerationParams(max_tokens=128, ignore_eos=True, sampling=sampling)
            alone = [client.complete(prompt, params).token_ids for prompt in prompts]
            with ThreadPoolExecutor(len(prompts)) as pool:
                assert list(pool.map(lambda prompt, params=params: client.complete(prompt, params).token_ids, prompts)) == alone
            drafter = HalfRight(alone[0])
            drafted = client.complete(prompts[0], dataclasses.replace(params, draft_tokens=4), drafter=drafter)
            assert drafted.token_ids == alone[0]
            assert drafted.stats.num_steps < 100


class HalfRight:
    """Drafts of four tokens, of which every other proposal has a wrong second one."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self._num_done = 0
        self._turn = 0

    def begin(self, prompt: Sequence[int]) -> HalfRight:
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        self._num_done += len(tokens)

    def propose(self, max_tokens: int) -> Sequence[int]:
        self._turn += 1
        drafts = list(self._answer[self._num_done : self._num_done + 4])
        if self._turn % 2 and len(drafts) > 1:
            drafts[1] = (drafts[1] + 1) % 200
        return drafts[:max_tokens]


def test_killed_worker_ends_the_stream_in_one_typed_error(bundles: dict[int, Path], tmp_path: Path) -> None:
    bundle = bundles[2]
    with LocalFleet(bundle, num_threads=1) as fleet, connect(fleet, tmp_path) as client:
        chunks = client.generate("hello there", LONG)
        next(chunks)
        psutil.Process(fleet.pids[1]).kill()
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"stage 1"):
            list(chunks)
        assert time.monotonic() - began < 2
        with pytest.raises(WorkerUnreachableError) as caught:
            client.complete("hello there", PARAMS)
        assert caught.value.addresses == (fleet.addresses[1],)


def test_dead_worker_is_revived_at_its_address_and_the_client_goes_on(bundles: dict[int, Path], tmp_path: Path) -> None:
    with LocalFleet(bundles[2], num_threads=1) as fleet, connect(fleet, tmp_path) as client:
        expected = client.complete("hello there", PARAMS).token_ids
        addresses, (first, second) = fleet.addresses, fleet.pids
        kill(second)
        assert not fleet.is_whole
        fleet.revive()
        assert fleet.is_whole
        assert fleet.addresses == addresses
        assert (fleet.pids[0], fleet.pids[1] == second) == (first, False)
        assert client.complete("hello there", PARAMS).token_ids == expected
        fleet.revive()  # nothing to do
        assert fleet.pids[0] == first
    with pytest.raises(ClosedError, match="make a new one"):
        fleet.revive()


def test_what_cannot_be_revived_says_why_and_is_tried_again(bundles: dict[int, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles[1], bundle)
    weights = bundle / "stage-0" / "openvino_model.bin"
    data = weights.read_bytes()
    with LocalFleet(bundle, num_threads=1) as fleet:
        kill(fleet.pids[0])
        weights.unlink()
        with pytest.raises(BundleError, match="missing"):
            fleet.revive()
        weights.write_bytes(data)
        fleet.revive()
        assert fleet.is_whole


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    process.wait(10)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
def test_stopped_worker_is_lost_within_ten_seconds_and_serves_again_when_it_wakes(bundles: dict[int, Path], tmp_path: Path) -> None:
    bundle = bundles[2]
    with LocalFleet(bundle, num_threads=1) as fleet, connect(fleet, tmp_path) as client:
        expected = client.complete("hello there", PARAMS).token_ids
        chunks = client.generate("hello there", LONG)
        next(chunks)
        os.kill(fleet.pids[0], signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(WorkerLostError, match=r"stage 0"):
                list(chunks)
            assert time.monotonic() - began < 10
        finally:
            os.kill(fleet.pids[0], signal.SIGCONT)
        assert client.complete("hello there", PARAMS).token_ids == expected


def test_workers_end_when_their_owner_is_killed(bundles: dict[int, Path]) -> None:
    bundle = bundles[2]
    script = (
        "import sys, time; from pathlib import Path; from langchain_pshard.pipeline.local import LocalFleet\n"
        "fleet = LocalFleet(Path(sys.argv[1]), num_threads=1); print(*fleet.pids, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(bundle)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(workers) == 2
        owner.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_interpreter_exit_stops_workers(bundles: dict[int, Path]) -> None:
    bundle = bundles[1]
    script = (
        "import sys; from pathlib import Path; from langchain_pshard.pipeline.local import LocalFleet\n"
        "from langchain_pshard.pipeline.client import PipelineClient\n"
        "fleet = LocalFleet(Path(sys.argv[1]), num_threads=1); client = PipelineClient.connect(fleet.addresses)\n"
        "stream = client.generate('hello'); next(stream); print(*fleet.pids)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(bundle)], capture_output=True, text=True, timeout=60, check=True)
    assert not psutil.pid_exists(int(done.stdout))
    assert done.stderr == ""


def test_kv_options_reach_the_workers(bundles: dict[int, Path], tmp_path: Path) -> None:
    bundle = bundles[1]
    chains, cached = [], []
    for options in (
        {},
        {"kv_precision": "u8", "prefix_cache": True},
        {"kv_precision": "f32", "prefix_cache": False},
        {"runner": "stateful", "numerics": "exact"},
        {"runner": "stateful"},
    ):
        with LocalFleet(bundle, num_threads=1, kv_memory="1MiB", **options) as fleet, connect(fleet, tmp_path) as client:
            generations = [client.complete("x" * 100, PARAMS) for _ in range(2)]
            chains.append(client.chain.first)
            cached.append(generations[1].stats.num_cached_tokens)
    kinds = [(stage.numerics.kv_precision, stage.is_resumable) for stage in chains]
    assert kinds == [("f16", True), ("u8", False), ("f32", True), ("f32", True), ("f16", False)]
    assert cached == [96, 96, 0, 99, 0]  # of 101: full blocks where KV is paged, all but two tokens where it is not
    assert chains[0].kv_capacity_tokens == 2 * chains[2].kv_capacity_tokens
    with ChatPShard(bundle=bundle, kv_precision="f32", kv_memory="1MiB", threads=1) as model:
        assert model._connect().client.chain.first.numerics.kv_precision == "f32"


def test_start_failures_are_typed_and_say_why(bundles: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a bundle"):
        LocalFleet(tmp_path)
    bundle = bundles[2]
    with pytest.raises(InvalidOptionError, match="num_threads"):
        LocalFleet(bundle, num_threads=0)
    with pytest.raises(InvalidOptionError, match=r"worker of stage . refuses its options: .*'lots' is not a size"):
        LocalFleet(bundle, kv_memory="lots")
    with pytest.raises(InvalidOptionError, match=r"worker of stage . refuses its options: .*'u4'.*f16.*f32.*u8"):
        LocalFleet(bundle, kv_precision="u4")
    with pytest.raises(WorkerUnreachableError, match=r"not ready within 0\.1 s"):
        LocalFleet(bundle, start_timeout_s=0.1)


def test_damaged_shard_names_the_file(bundles: dict[int, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles[2], bundle)
    weights = bundle / "stage-1" / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match=r"worker of stage 1 cannot start: .*openvino_model\.bin is damaged"):
        LocalFleet(bundle)
