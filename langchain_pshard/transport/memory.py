"""The hub without sockets, for tests of client and worker: links between hubs of one `MemoryNetwork`, through the real codec.

It behaves like the ZeroMQ one where that matters: a dialled link queues for a peer that is not there yet, survives the peer (with a
`Lost`), and delivers to whoever listens at the address next. A test may drop, double or hold back messages by a rule of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

from langchain_pshard.core.codec import Buffer, Tensor, decode, encode
from langchain_pshard.core.errors import AddressInUseError, ClosedError, ProtocolError
from langchain_pshard.core.messages import Message
from langchain_pshard.transport.address import Address
from langchain_pshard.transport.hub import Arrived, Event, Link, Lost


class Fate(Enum):
    """What becomes of a message."""

    DELIVER = "deliver"
    DROP = "drop"
    DOUBLE = "double"
    HOLD = "hold"
    """Kept until `MemoryNetwork.release`, in order among those held."""


Rule = Callable[[str, Message], Fate]
"""(address of the listening end of the connection, message) -> its fate."""


@dataclass(slots=True)
class _Connection:
    """A dialled link: the dialler's end, and the queue of what waits for a listener."""

    dialler: MemoryHub
    link: Link
    address: str
    listener: MemoryHub | None = None
    pending: deque[list[bytes]] = field(default_factory=deque)


@dataclass(slots=True)
class _Held:
    target: MemoryHub
    link: Link
    frames: list[bytes]


class MemoryNetwork:
    """Hubs that can reach one another. `rule` decides the fate of every message; the default delivers all."""

    def __init__(self) -> None:
        self.rule: Rule = lambda _address, _message: Fate.DELIVER
        self.lock = threading.RLock()
        self._listeners: dict[str, MemoryHub] = {}
        self._connections: dict[bytes, _Connection] = {}
        self._held: list[_Held] = []
        self._names = itertools.count(1)
        self._ports = itertools.count(50_000)

    def hub(self) -> MemoryHub:
        """A new hub on this network."""
        return MemoryHub(self)

    def release(self) -> None:
        """Deliver what was held back."""
        with self.lock:
            held, self._held = self._held, []
            for one in held:
                one.target.arrive(one.link, one.frames)

    def bind(self, hub: MemoryHub, address: str) -> str:
        """Register a listener; connections that wait for the address get through."""
        wanted = Address.parse(address)
        with self.lock:
            bound = str(Address(wanted.host, wanted.port or next(self._ports)))
            if bound in self._listeners:
                raise AddressInUseError(f"cannot listen on {bound}: it is taken")
            self._listeners[bound] = hub
            for name, connection in self._connections.items():
                if connection.address == bound:
                    self._attach(name, connection)
            return bound

    def connect(self, hub: MemoryHub, link: Link, address: str) -> bytes:
        """Register a dialled link; returns its name, under which the listener knows it."""
        with self.lock:
            name = next(self._names).to_bytes(4, "big")
            connection = _Connection(hub, link, str(Address.parse(address)))
            self._connections[name] = connection
            if connection.address in self._listeners:
                self._attach(name, connection)
            return name

    def disconnect(self, name: bytes) -> None:
        """Forget a dialled link and what waits on it."""
        with self.lock:
            self._connections.pop(name, None)

    def unbind(self, hub: MemoryHub) -> None:
        """The listener is gone: its peers lose their connections and wait for the next one."""
        with self.lock:
            self._listeners = {address: other for address, other in self._listeners.items() if other is not hub}
            for connection in self._connections.values():
                if connection.listener is hub:
                    connection.listener = None
                    connection.dialler.lose(connection.link)

    def to_listener(self, name: bytes, message: Message, frames: list[bytes]) -> bool:
        """A message from the dialling end."""
        with self.lock:
            connection = self._connections.get(name)
            if connection is None:
                return False
            for _ in range(self._num_copies(connection, connection.listener, Link(0, name), message, frames)):
                if connection.listener is None:
                    connection.pending.append(frames)
                else:
                    connection.listener.arrive(Link(0, name), frames)
            return True

    def to_dialler(self, name: bytes, message: Message, frames: list[bytes]) -> bool:
        """A message from the listening end."""
        with self.lock:
            connection = self._connections.get(name)
            if connection is None:
                return False
            for _ in range(self._num_copies(connection, connection.dialler, connection.link, message, frames)):
                connection.dialler.arrive(connection.link, frames)
            return True

    def _num_copies(self, connection: _Connection, target: MemoryHub | None, link: Link, message: Message, frames: list[bytes]) -> int:
        match self.rule(connection.address, message):
            case Fate.DELIVER:
                return 1
            case Fate.DOUBLE:
                return 2
            case Fate.HOLD if target is not None:
                self._held.append(_Held(target, link, frames))
        return 0

    def _attach(self, name: bytes, connection: _Connection) -> None:
        connection.listener = self._listeners[connection.address]
        while connection.pending:
            connection.listener.arrive(Link(0, name), connection.pending.popleft())


class MemoryHub:
    """`Hub` over a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._condition = threading.Condition()
        self._inbox: deque[Lost | tuple[Link, list[bytes]]] = deque()
        self._names: dict[Link, bytes] = {}
        self._link_ids = itertools.count(1)
        self._is_woken = False
        self._is_closed = False
        self._num_malformed = 0

    @property
    def num_malformed(self) -> int:
        return self._num_malformed

    def listen(self, address: str) -> str:
        return self._network.bind(self, address)

    def dial(self, address: str) -> Link:
        link = Link(next(self._link_ids))
        self._names[link] = self._network.connect(self, link, address)
        return link

    def hang_up(self, link: Link) -> None:
        name = self._names.pop(link, None)
        if name is not None:
            self._network.disconnect(name)

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        frames = [bytes(frame) for frame in encode(message, tensor)]
        if link.socket_idx == 0:
            return self._network.to_dialler(link.peer, message, frames)
        name = self._names.get(link)
        return name is not None and self._network.to_listener(name, message, frames)

    def poll(self, timeout_s: float | None) -> list[Event]:
        with self._condition:
            if self._is_closed:
                raise ClosedError("this hub is closed")
            self._condition.wait_for(lambda: self._inbox or self._is_woken, timeout_s)
            self._is_woken = False
            taken = list(self._inbox)
            self._inbox.clear()
        return [event for one in taken if (event := self._event(one)) is not None]

    def wake(self) -> None:
        with self._condition:
            self._is_woken = True
            self._condition.notify_all()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for link in list(self._names):
            self.hang_up(link)
        self._network.unbind(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def arrive(self, link: Link, frames: list[bytes]) -> None:
        """Frames for this hub; also lets a test send bytes that no message has."""
        self._put((link, frames))

    def lose(self, link: Link) -> None:
        """The connection of a dialled link broke."""
        self._put(Lost(link))

    def _put(self, one: Lost | tuple[Link, list[bytes]]) -> None:
        with self._condition:
            self._inbox.append(one)
            self._condition.notify_all()

    def _event(self, one: Lost | tuple[Link, list[bytes]]) -> Event | None:
        if isinstance(one, Lost):
            return one
        link, data = one
        frames: list[Buffer] = list(data)
        try:
            message, tensor = decode(frames)
        except ProtocolError:
            self._num_malformed += 1
            return None
        return Arrived(link, message, tensor)
