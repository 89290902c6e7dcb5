"""Addresses as users write them: `tcp://host:port`, IPv6 hosts in brackets. A host name stands for its IPv4 address."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from langchain_pshard.core.errors import InvalidOptionError

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_SCOPE = re.compile(r"[A-Za-z0-9._-]+")
"""The interface of a link-local IPv6 address, behind its `%`."""


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address. `port` 0 asks the system for a free one when listening."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `tcp://host:port`; the scheme may be left out.

        Stricter than ZeroMQ, which takes wildcards and source addresses in a host, and fails on others when it is too late to say so.

        Raises:
            InvalidOptionError: another scheme, no host that could exist, no port, or a port that is no number from 0 to 65535.
        """
        rest = text.removeprefix("tcp://")
        host, colon, port = rest.rpartition(":")
        if "://" in rest or "/" in rest or not colon or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
            raise InvalidOptionError(f"address {text!r} is not of the form tcp://host:port (IPv6: tcp://[::1]:port)")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidOptionError(f"address {text!r} has no valid port; valid: 0 to 65535")
        is_bracketed = host.startswith("[")
        host = host.removeprefix("[").removesuffix("]")
        if not (_is_ipv6(host) if is_bracketed else _HOST_NAME.fullmatch(host)):
            raise InvalidOptionError(
                f"address {text!a} has no valid host; valid: a host name in ASCII, an IPv4 address, or an IPv6 address in brackets"
                " (to listen on every interface: 0.0.0.0 or [::])"
            )
        return cls(host, int(port))

    @classmethod
    def parse_peer(cls, text: str) -> Address:
        """Parse the address of somebody to dial.

        Raises:
            InvalidOptionError: as `parse`, and port 0, at which nobody can listen.
        """
        address = cls.parse(text)
        if not address.port:
            raise InvalidOptionError(f"address {text!r} has port 0, which nobody can be reached at; use the one in the worker's ready line")
        return address

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address. Names are not: they stand for their IPv4 address."""
        return ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False


def _is_ipv6(host: str) -> bool:
    literal, percent, scope = host.partition("%")
    try:
        ipaddress.IPv6Address(literal)
    except ValueError:
        return False
    return not percent or _SCOPE.fullmatch(scope) is not None
