"""Addresses as users write them: `tcp://host:port`, IPv6 hosts in brackets."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from langchain_pshard.core.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address. `port` 0 asks the system for a free one when listening."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `tcp://host:port`; the scheme may be left out.

        Raises:
            InvalidOptionError: another scheme, no port, or a port that is no number from 0 to 65535.
        """
        rest = text.removeprefix("tcp://")
        host, colon, port = rest.rpartition(":")
        if "://" in rest or "/" in rest or not colon or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
            raise InvalidOptionError(f"address {text!r} is not of the form tcp://host:port (IPv6: tcp://[::1]:port)")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidOptionError(f"address {text!r} has no valid port; valid: 0 to 65535")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False
