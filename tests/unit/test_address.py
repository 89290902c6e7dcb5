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
    "text", ["", "tcp://", "host", "tcp://host:", "tcp://host:x", "tcp://host:65536", "::1:80", "http://h:1", "tcp://h:1/x", ":1", "h:²"]
)
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="address"):
        Address.parse(text)
