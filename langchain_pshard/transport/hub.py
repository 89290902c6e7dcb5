"""The face of the transport: one `Hub` per thread owns that thread's sockets; links in, events out.

A hub may listen (workers do) and dial (clients and workers do). Both ways a peer is a `Link`. A hub promises little, because the network
does: a message sent may be lost, delivered late to the same process, or never be read. Ids, epochs and repetition live above it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.messages import Message


class Link(msgspec.Struct, frozen=True):
    """One peer as one hub knows it. Meaningless to any other hub."""

    socket_idx: int
    """0 is the listening socket, whose peers differ by `peer`; every dialled link has a number of its own."""
    peer: bytes = b""


class Arrived(msgspec.Struct, frozen=True):
    """A message came. `tensor` is a read-only view on the received frame."""

    link: Link
    message: Message
    tensor: Tensor | None


class Lost(msgspec.Struct, frozen=True):
    """The connection of a dialled link broke. It is being dialled again; what was sent meanwhile may be lost."""

    link: Link


Event = Arrived | Lost


class Hub(Protocol):
    """Owned and used by one thread, `wake` excepted. Idempotent to close, usable as a context manager."""

    @property
    def num_malformed(self) -> int:
        """Messages dropped so far because they could not be decoded."""

    def listen(self, address: str) -> str:
        """Accept peers at `address`; returns it with the port that was chosen.

        Raises:
            AddressInUseError: the address is taken or does not belong to this machine.
        """

    def dial(self, address: str) -> Link:
        """A link to the worker at `address`; returns at once, whether or not anybody is there."""

    def hang_up(self, link: Link) -> None:
        """Give up a dialled link. Unknown links are ignored."""

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        """Queue a message; False when the peer is gone or its queue is full, and the message was dropped. Never blocks."""

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Everything that has arrived, waiting up to `timeout_s` (None: for ever) when nothing has. `wake` ends the wait."""

    def wake(self) -> None:
        """End a `poll` that is waiting, or the next one. Callable from any thread."""

    def close(self) -> None:
        """Drop all links and sockets."""
