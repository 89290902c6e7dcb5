"""The in-memory hub keeps the promises of `Hub`, and breaks messages on request."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from langchain_pshard.core.codec import tensor_spec
from langchain_pshard.core.errors import AddressInUseError, ClosedError
from langchain_pshard.core.messages import Message, MicroBatch, Ping, Pong, RequestId
from langchain_pshard.transport.hub import Arrived, Link, Lost
from langchain_pshard.transport.memory import Fate, MemoryHub, MemoryNetwork

ADDRESS = "tcp://127.0.0.1:7000"


def ping(number: int) -> Ping:
    return Ping(request=RequestId(number))


def pair() -> tuple[MemoryNetwork, MemoryHub, MemoryHub, Link]:
    network = MemoryNetwork()
    worker, client = network.hub(), network.hub()
    assert worker.listen(ADDRESS) == ADDRESS
    return network, worker, client, client.dial(ADDRESS)


def messages(hub: MemoryHub) -> list[Message]:
    return [event.message for event in hub.poll(0) if isinstance(event, Arrived)]


def test_there_and_back_with_a_tensor() -> None:
    _, worker, client, link = pair()
    hidden = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert client.send(link, MicroBatch(stage_idx=1, steps=(), hidden=tensor_spec(hidden)), hidden)
    (event,) = worker.poll(0)
    assert isinstance(event, Arrived)
    assert event.tensor is not None
    assert np.array_equal(event.tensor, hidden)
    assert worker.send(event.link, Pong(request=RequestId(1)))
    assert client.poll(0) == [Arrived(link, Pong(request=RequestId(1)), None)]


def test_a_link_waits_for_its_peer_and_outlives_it() -> None:
    network = MemoryNetwork()
    client = network.hub()
    link = client.dial(ADDRESS)
    client.send(link, ping(1))
    with network.hub() as worker:
        worker.listen(ADDRESS)
        assert messages(worker) == [ping(1)]
    assert client.poll(0) == [Lost(link)]
    client.send(link, ping(2))
    again = network.hub()
    again.listen(ADDRESS)
    assert messages(again) == [ping(2)]
    client.hang_up(link)
    assert not client.send(link, ping(3))


def test_fates() -> None:
    network, worker, client, link = pair()
    fates = {1: Fate.DROP, 2: Fate.DOUBLE, 3: Fate.HOLD, 4: Fate.DELIVER}
    network.rule = lambda _, message: fates[message.request] if isinstance(message, Ping) else Fate.DELIVER
    for number in fates:
        client.send(link, ping(number))
    assert messages(worker) == [ping(2), ping(2), ping(4)]
    network.release()
    assert messages(worker) == [ping(3)]


def test_what_cannot_be_decoded_is_counted() -> None:
    _, worker, _, _ = pair()
    worker.arrive(Link(0, b"peer"), [b"junk"])
    assert worker.poll(0) == []
    assert worker.num_malformed == 1


def test_wake_ends_a_poll_and_a_taken_address_is_refused() -> None:
    network, worker, _, _ = pair()
    timer = threading.Timer(0.05, worker.wake)
    timer.start()
    assert worker.poll(None) == []
    timer.join()
    with pytest.raises(AddressInUseError):
        network.hub().listen(ADDRESS)
    worker.close()
    worker.close()
    with pytest.raises(ClosedError):
        worker.poll(0)
