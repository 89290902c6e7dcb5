"""Workers that die, drain, come again or never answer, and what a client makes of it: real worker loops around a fake engine."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import pytest

from langchain_pshard.core.errors import PShardError, WorkerLostError, WorkerUnreachableError
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.fake_fleet import PROMPT, FakeFleet, connect, params, plain_tokens


@pytest.mark.parametrize(
    ("num_stages", "max_steps_ahead", "num_tokens", "idx"), [(2, 7, 1, 0), (2, 7, 1, 1), (3, 64, 10, 0), (3, 64, 10, 1), (3, 64, 10, 2)]
)
def test_a_worker_that_dies_in_the_middle_is_named_and_a_restarted_one_serves_again(
    tmp_path: Path, num_stages: int, max_steps_ahead: int, num_tokens: int, idx: int
) -> None:
    with FakeFleet(tmp_path, num_stages, delay_s=0.003) as fleet, connect(fleet, tmp_path, max_steps_ahead=max_steps_ahead) as client:
        found: list[int] = []
        chunks = (found.extend(chunk.token_ids) for chunk in client.generate(PROMPT, params(400)))
        while len(found) < num_tokens:
            next(chunks)
        fleet.workers[idx].stop()
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match=f"{fleet.addresses[idx]} \\(stage {idx}\\)"):
            list(chunks)
        assert time.monotonic() - began < 1.5
        assert found == plain_tokens(PROMPT, num_stages, len(found), ignore_eos=True)
        assert [worker.is_alive for worker in client.status().workers] == [other != idx for other in range(num_stages)]
        fleet.restart(idx)
        assert list(client.complete(PROMPT, params(30)).token_ids) == plain_tokens(PROMPT, num_stages, 30, ignore_eos=True)
        assert client.status().is_healthy
        fleet.wait_until_free()


@pytest.mark.parametrize("idx", [0, 1])
def test_waiting_streams_go_on_waiting_while_a_worker_is_restarted(tmp_path: Path, idx: int) -> None:
    with FakeFleet(tmp_path, capacity=64, delay_s=0.01) as fleet, connect(fleet, tmp_path) as client:
        running = client.generate(PROMPT, params(60))
        next(running)
        waiting = client.generate(PROMPT, params(12))
        fleet.workers[idx].stop()
        fleet.restart(idx)
        with pytest.raises(WorkerLostError):
            list(running)
        tokens = [token for chunk in waiting for token in chunk.token_ids]
        assert tokens == plain_tokens(PROMPT, 2, 12, ignore_eos=True)


def test_call_made_before_the_restart_is_noticed_does_not_fail(fleet: FakeFleet, client: PipelineClient) -> None:
    for _ in range(5):
        fleet.workers[1].stop()
        fleet.restart(1)
        assert list(client.complete(PROMPT, params(4)).token_ids) == plain_tokens(PROMPT, 2, 4, ignore_eos=True)


@pytest.mark.parametrize("idx", [0, 1])
def test_waiting_streams_outlast_a_worker_that_shuts_down_politely(tmp_path: Path, idx: int) -> None:
    with FakeFleet(tmp_path, capacity=64, delay_s=0.01) as fleet, connect(fleet, tmp_path) as client:
        running = client.generate(PROMPT, params(60))
        next(running)
        waiting = client.generate(PROMPT, params(12))
        fleet.workers[idx].drain()
        assert sum(len(chunk.token_ids) for chunk in running) == 59
        fleet.workers[idx].stop()
        fleet.restart(idx)
        tokens = [token for chunk in waiting for token in chunk.token_ids]
        assert tokens == plain_tokens(PROMPT, 2, 12, ignore_eos=True)


def test_whoever_asks_hears_that_the_chain_is_lost(fleet: FakeFleet, tmp_path: Path) -> None:
    heard: queue.SimpleQueue[PShardError] = queue.SimpleQueue()
    with PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path / "cache"), on_lost=heard.put) as client:
        assert client.is_open
        fleet.workers[1].stop()
        assert isinstance(heard.get(timeout=10), WorkerLostError)
    assert not client.is_open


def test_worker_that_stays_away_is_named_within_the_bound(fleet: FakeFleet, tmp_path: Path) -> None:
    with connect(fleet, tmp_path, connect_timeout_s=1.0) as client:
        fleet.workers[1].stop()
        time.sleep(0.8)
        began = time.monotonic()
        with pytest.raises(WorkerUnreachableError) as caught:
            client.complete(PROMPT, params(4))
        assert time.monotonic() - began < 2
        assert caught.value.addresses == (fleet.addresses[1],)


def test_connect_names_the_silent_worker(fleet: FakeFleet, tmp_path: Path) -> None:
    silent = "tcp://127.0.0.1:9"
    with pytest.raises(WorkerUnreachableError, match=r"1 of 3 workers .* tcp://127.0.0.1:9: no connection"):
        PipelineClient.connect([*fleet.addresses, silent], connect_timeout_s=0.5)
