"""Addresses as users write them."""

from __future__ import annotations

import pytest

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.transport.address import Address


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555, True),
        ("127.0.0.1:0", "127.0.0.1", 0, True),
        ("tcp://[::1]:80", "::1", 80, True),
        ("tcp://localhost:1", "localhost", 1, True),
        ("tcp://0.0.0.0:5555", "0.0.0.0", 5555, False),
        ("tcp://[::]:5555", "::", 5555, False),
        ("tcp://[fe80::1%eth0]:5555", "fe80::1%eth0", 5555, False),
        ("tcp://node-3.local:65535", "node-3.local", 65535, False),
    ],
)
def test_parses_and_prints(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "tcp://", "host", "tcp://host:", "tcp://host:x", "tcp://host:65536", "::1:80", "http://h:1", "tcp://h:1/x", ":1", "h:²"),
        # ZeroMQ's own words, and what it chokes on.
        *("tcp://*:1", "tcp://a b:1", "tcp://..:1", "tcp://127.0.0.1;h:1", "tcp://bücher:1", "tcp://\ud800:1", "tcp://\0:1", "@:1"),
        *("tcp://[zz::1]:1", "tcp://[127.0.0.1]:1", "tcp://[fe80::1%]:1", "tcp://[fe80::1%a b]:1", "tcp://" + "a" * 254 + ":1"),
    ],
)
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="address"):
        Address.parse(text)


def test_nobody_is_dialled_at_port_0() -> None:
    assert Address.parse_peer("tcp://node:7000") == Address("node", 7000)
    with pytest.raises(InvalidOptionError, match="port 0"):
        Address.parse_peer("tcp://node:0")
