"""The delay proxy: every chunk arrives its delay later, many at a time."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from benchmarks.proxy import DelayProxy, delayed
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.fake_fleet import FakeFleet, plain_tokens

DELAY_S = 0.06


def test_chunks_are_delayed_and_do_not_queue() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, DelayProxy(f"tcp://127.0.0.1:{server.getsockname()[1]}", 1e3 * DELAY_S) as proxy:
        port = int(proxy.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            there, _ = server.accept()
            with there:
                echo = threading.Thread(target=lambda: [there.sendall(there.recv(1)) for _ in range(10)])
                echo.start()
                began = time.monotonic()
                for _ in range(10):
                    client.sendall(b"x")
                    time.sleep(0.002)
                received = b""
                while len(received) < 10:
                    received += client.recv(16)
                took_s = time.monotonic() - began
                echo.join()
    assert received == b"x" * 10
    assert 2 * DELAY_S <= took_s < 20 * DELAY_S / 2  # one after another they would take 20 delays


@pytest.mark.parametrize(("max_steps_ahead", "num_hops"), [(0, 6 * 3), (7, 2 * 3 + 4 * 2), (2, 3 * 3 + 3 * 2)])
def test_every_hop_of_a_fleet_takes_the_delay(tmp_path: Path, max_steps_ahead: int, num_hops: int) -> None:
    """The client's own steps cross three links, those that two workers take by themselves cross two."""
    with FakeFleet(tmp_path) as fleet, delayed(fleet.addresses, 20.0) as addresses:
        options = ClientOptions(cache_dir=tmp_path / "cache", max_steps_ahead=max_steps_ahead)
        with PipelineClient.connect(addresses, options=options) as client:
            found = client.complete([5, 6, 7], GenerationParams(max_tokens=6, ignore_eos=True, draft=None))
    assert list(found.token_ids) == plain_tokens([5, 6, 7], 2, 6, ignore_eos=True)
    assert 20.0 <= found.stats.hop_ms < 40.0
    assert found.stats.num_hops == num_hops
    assert (num_hops - 3) * 20.0 <= found.stats.decode_ms < (num_hops - 3) * 40.0
