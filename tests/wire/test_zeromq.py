"""The ZeroMQ hub: what the seam promises, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from langchain_pshard.core.codec import tensor_spec
from langchain_pshard.core.errors import AddressInUseError, ClosedError
from langchain_pshard.core.messages import MicroBatch, Ping, Pong, RequestId
from langchain_pshard.transport.hub import Arrived, Event, Link, Lost
from langchain_pshard.transport.zeromq import ZmqHub

PATIENCE_S = 10.0


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    with ZmqHub() as made:
        yield made


@pytest.fixture
def peer() -> Iterator[ZmqHub]:
    with ZmqHub() as made:
        yield made


def next_event(of: ZmqHub) -> Event:
    [event] = of.poll(PATIENCE_S)
    return event


def test_message_and_reply(hub: ZmqHub, peer: ZmqHub) -> None:
    link = peer.dial(hub.listen("tcp://127.0.0.1:0"))
    assert peer.send(link, Ping(request=RequestId(7)))
    asked = next_event(hub)
    assert isinstance(asked, Arrived)
    assert asked.message == Ping(request=RequestId(7))
    assert hub.send(asked.link, Pong(request=RequestId(7)))
    assert next_event(peer) == Arrived(link, Pong(request=RequestId(7)), None)


@pytest.mark.parametrize("num_tokens", [1, 5_000])
def test_tensors_small_and_large(hub: ZmqHub, peer: ZmqHub, num_tokens: int) -> None:
    hidden = np.random.default_rng(0).integers(0, 65_535, (num_tokens, 64), dtype=np.uint16)
    link = peer.dial(hub.listen("tcp://127.0.0.1:0"))
    assert peer.send(link, MicroBatch(stage_idx=1, steps=(), hidden=tensor_spec(hidden)), hidden)
    event = next_event(hub)
    assert isinstance(event, Arrived)
    assert event.tensor is not None
    np.testing.assert_array_equal(event.tensor, hidden)


def test_names_stand_for_ipv4(hub: ZmqHub, peer: ZmqHub) -> None:
    port = hub.listen("tcp://127.0.0.1:0").rpartition(":")[2]
    assert peer.send(peer.dial(f"tcp://localhost:{port}"), Ping(request=RequestId(1)))
    assert isinstance(next_event(hub), Arrived)
    with pytest.raises(AddressInUseError, match=r"127\.0\.0\.1:.* choose another port"), ZmqHub() as other:
        other.listen(f"tcp://127.0.0.1:{port}")
    with pytest.raises(AddressInUseError, match="no such address; choose one of its own"), ZmqHub() as other:
        other.listen("tcp://192.0.2.1:0")  # of the documentation, nobody's


def test_ipv6_loopback(hub: ZmqHub, peer: ZmqHub) -> None:
    address = hub.listen("tcp://[::1]:0")
    assert address.startswith("tcp://[::1]:")
    peer.send(peer.dial(address), Ping(request=RequestId(1)))
    assert isinstance(next_event(hub), Arrived)


def test_taken_address_is_a_typed_error(hub: ZmqHub, peer: ZmqHub) -> None:
    address = hub.listen("tcp://127.0.0.1:0")
    with pytest.raises(AddressInUseError, match=address):
        peer.listen(address)


def test_lost_peer_is_noticed_and_sends_to_it_fail(hub: ZmqHub) -> None:
    peer = ZmqHub()
    address = peer.listen("tcp://127.0.0.1:0")
    link = hub.dial(address)
    hub.send(link, Ping(request=RequestId(1)))
    asked = next_event(peer)
    peer.close()
    assert next_event(hub) == Lost(link)
    assert not hub.send(Link(0, asked.link.peer), Pong(request=RequestId(1)))
    hub.hang_up(link)
    hub.hang_up(link)
    assert not hub.send(link, Ping(request=RequestId(2)))


def test_router_says_when_a_peer_is_unknown(hub: ZmqHub) -> None:
    hub.listen("tcp://127.0.0.1:0")
    assert not hub.send(Link(0, b"nobody"), Pong(request=RequestId(1)))


def test_malformed_messages_are_counted_and_dropped(hub: ZmqHub, peer: ZmqHub) -> None:
    address = hub.listen("tcp://127.0.0.1:0")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        for frames in ([b""], [b"\xff" * 50], [b"a", b"b", b"c"], [b"x"] * 1_000):
            stranger.send_multipart(frames)
        peer.send(peer.dial(address), Ping(request=RequestId(1)))
        arrived: list[Event] = []
        while not arrived or hub.num_malformed < 4:
            arrived += hub.poll(PATIENCE_S)
        assert [event.message for event in arrived if isinstance(event, Arrived)] == [Ping(request=RequestId(1))]
        stranger.close(linger=0)


def test_wake_ends_the_wait_of_another_thread(hub: ZmqHub) -> None:
    waker = threading.Timer(0.05, hub.wake)
    waker.start()
    assert hub.poll(PATIENCE_S) == []
    waker.join()


def test_closed_hub_says_so() -> None:
    hub = ZmqHub()
    hub.close()
    hub.close()
    hub.wake()
    with pytest.raises(ClosedError):
        hub.poll(0)
