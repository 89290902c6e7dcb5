"""How chat models use connections: batches, event loops, sharing, copies."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading

import pytest

from langchain_pshard.chat_models import ChatPShard
from tests.support.fake_client import WORKERS, Serve, connections

# --- batches, loops, threads -----------------------------------------------------------------------------------------------


def test_batch_runs_all_at_once(serve: Serve) -> None:
    client = serve(["x"])
    client.barrier = threading.Barrier(16)  # breaks unless sixteen calls are in it together
    with ChatPShard(workers=WORKERS) as model:
        assert [message.content for message in model.batch([f"p{index}" for index in range(16)])] == ["x!"] * 16
        assert sorted(index for index, _ in model.batch_as_completed([f"p{index}" for index in range(16)])) == list(range(16))
        client.barrier = threading.Barrier(2)
        assert len(model.batch(["a", "b", "c", "d"], {"max_concurrency": 2})) == 4
    assert len(connections(client)) == 1


def test_many_event_loops(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS) as model:
        assert {asyncio.run(model.ainvoke("Hi")).content for _ in range(3)} == {"Hello world!"}
    assert len(connections(client)) == 1


# --- connection sharing, copies --------------------------------------------------------------------------------------------


def test_nothing_is_connected_before_the_first_call_and_equal_settings_share(serve: Serve) -> None:
    client = serve()
    model, other = ChatPShard(workers=WORKERS), ChatPShard(workers=WORKERS[::-1], temperature=1.0)
    assert connections(client) == []
    model.invoke("Hi")
    other.invoke("Hi")
    model.close()
    model.close()
    assert not client.is_closed
    other.close()
    assert client.is_closed
    assert len(connections(client)) == 1
    model.invoke("Hi")  # opens again
    assert len(connections(client)) == 2
    client.is_closed = False
    del model
    gc.collect()
    assert client.is_closed


def test_how_far_workers_go_by_themselves_is_the_callers_to_say(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS) as model, ChatPShard(workers=WORKERS, max_steps_ahead=0) as stepwise:
        model.invoke("Hi")
        stepwise.invoke("Hi")
        assert [options["options"].max_steps_ahead for _, options in connections(client)] == [7, 0]  # and so they share no connection
    for value in (-1, 65):
        with pytest.raises(ValueError, match=f"max_steps_ahead={value} is out of range; valid: 0 to 64"):
            ChatPShard(workers=WORKERS, max_steps_ahead=value)


def test_a_client_that_failed_inside_is_replaced_by_the_next_call(serve: Serve) -> None:
    broken = serve()
    with ChatPShard(workers=WORKERS) as model:
        model.invoke("Hi")
        broken.is_open = False
        client = serve(["again"])
        assert model.invoke("Hi").content == "again!"
        assert broken.is_closed
        assert (len(connections(broken)), len(connections(client))) == (1, 1)


def test_copies_and_pickles(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS, temperature=0.5, seed=3) as model:
        model.invoke("Hi")
        copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.model_copy(update={"temperature": 0.9})]
        for one in copies:
            assert one.workers == WORKERS
            assert one.invoke("Hi").content == "Hello world!"
            one.close()
        assert not client.is_closed
        assert [params.sampling.temperature for params in client.params[1:]] == [0.5, 0.5, 0.5, 0.9]
    assert client.is_closed
    assert len(connections(client)) == 1
