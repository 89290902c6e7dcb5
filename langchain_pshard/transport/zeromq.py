"""The hub over ZeroMQ: one ROUTER for those who dial us, one DEALER for each peer we dial.

Routing ids stay automatic (a second peer with the same id would be accepted and never read), ROUTER_MANDATORY makes a send to a peer that
is gone fail instead of vanish, and every queue has a mark. Heartbeats run in ZeroMQ's I/O thread and notice a machine that is gone; a hung
inference loop never misses one, which is what the application's own ping is for.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from langchain_pshard.core.codec import MAX_TENSOR_BYTES, Buffer, Tensor, decode, encode
from langchain_pshard.core.errors import AddressInUseError, ClosedError, ProtocolError
from langchain_pshard.core.messages import Message
from langchain_pshard.transport.address import Address
from langchain_pshard.transport.hub import Arrived, Event, Link, Lost

HEARTBEAT_INTERVAL_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000  # cancelled by whole frames only: more than three times what a large frame takes on a slow link
HANDSHAKE_TIMEOUT_MS = 5_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000
QUEUE_MARK = 1_000  # messages, for each peer and direction
LINGER_MS = 200  # lets a parting message leave
_COPY_BELOW_BYTES = 64 << 10  # zero-copy frames cost more than they save below this
# Plain numbers: arithmetic on the flags makes an enum object each time.
_READABLE = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_MAX_BURST = 256  # messages taken from one socket per poll, so that one noisy peer cannot starve the others
LISTENER = Link(0)


class ZmqHub:
    """`Hub` over ZeroMQ sockets."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by Link.socket_idx; 0 is the listener
        self._links: dict[zmq.Socket[bytes], Link] = {}
        self._monitors: dict[zmq.Socket[bytes], Link] = {}
        self._next_idx = 1
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._num_malformed = 0
        self._is_closed = False

    @property
    def num_malformed(self) -> int:
        return self._num_malformed

    def listen(self, address: str) -> str:
        wanted = Address.parse(address)
        listener = self._socket(zmq.ROUTER, wanted)
        listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            listener.bind(str(wanted) if wanted.port else f"{str(wanted).removesuffix('0')}*")
        except zmq.ZMQError as error:
            listener.close(linger=0)
            raise AddressInUseError(f"cannot listen on {wanted}: {zmq.strerror(error.errno or 0)}; {_remedy(error.errno)}") from error
        self._add(LISTENER, listener)
        port = Address.parse(listener.getsockopt_string(zmq.LAST_ENDPOINT)).port
        return str(Address(wanted.host, port))

    def dial(self, address: str) -> Link:
        target = Address.parse(address)
        dealer = self._socket(zmq.DEALER, target)
        link = Link(self._next_idx)
        self._next_idx += 1
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(monitor, zmq.POLLIN)
        self._monitors[monitor] = link
        dealer.connect(str(target))
        self._add(link, dealer)
        return link

    def hang_up(self, link: Link) -> None:
        dealer = self._sockets.pop(link.socket_idx, None)
        if dealer is None:
            return
        monitor = next(monitor for monitor, watched in self._monitors.items() if watched == link)
        del self._monitors[monitor], self._links[dealer]
        self._poller.unregister(monitor)
        self._poller.unregister(dealer)
        dealer.disable_monitor()
        monitor.close()
        dealer.close(linger=LINGER_MS)

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        via = self._sockets.get(link.socket_idx)
        if via is None:
            return False
        frames = encode(message, tensor)
        if link.peer:
            frames.insert(0, link.peer)
        try:
            is_copied = len(frames[-1]) < _COPY_BELOW_BYTES
            for frame in frames[:-1]:
                via.send(frame, _MORE, copy=is_copied)
            via.send(frames[-1], _LAST, copy=is_copied)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def poll(self, timeout_s: float | None) -> list[Event]:
        if self._is_closed:
            raise ClosedError("this hub is closed")
        ready = self._poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1_000)))
        events: list[Event] = []
        for source, _ in ready:
            if source == self._wake_in.fileno():  # the poller knows it by its descriptor
                self._drain_wakes()
            elif source in self._monitors:
                events += self._disconnects(source)
            else:
                events += self._receive(source, self._links[source])
        return events

    def wake(self) -> None:
        # A full pipe already holds a wake; a closed one has nobody left to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for link in list(self._monitors.values()):
            self.hang_up(link)
        self._context.destroy(linger=LINGER_MS)
        self._wake_in.close()
        self._wake_out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _socket(self, kind: zmq.SocketType, address: Address) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        for option, value in (
            # A name that has addresses of both kinds would lead to its IPv6 one alone, and `localhost` past a worker at 127.0.0.1.
            (zmq.IPV6, int(address.is_ipv6)),
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, QUEUE_MARK),
            (zmq.RCVHWM, QUEUE_MARK),
            (zmq.MAXMSGSIZE, MAX_TENSOR_BYTES),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        ):
            made.setsockopt(option, value)
        return made

    def _add(self, link: Link, made: zmq.Socket[bytes]) -> None:
        self._sockets[link.socket_idx] = made
        self._links[made] = link
        self._poller.register(made, zmq.POLLIN)

    def _receive(self, source: zmq.Socket[bytes], link: Link) -> list[Event]:
        events: list[Event] = []
        for _ in range(_MAX_BURST):
            # Asking first costs less than the exception of an empty socket, and a copy less than a frame object, but for the largest.
            if not int(source.getsockopt(zmq.EVENTS)) & _READABLE:
                break
            frames: list[Buffer] = [*source.recv_multipart(zmq.NOBLOCK)]
            try:
                if link.socket_idx == LISTENER.socket_idx:
                    message, tensor = decode(frames[1:])
                    events.append(Arrived(Link(0, bytes(frames[0])), message, tensor))
                else:
                    message, tensor = decode(frames)
                    events.append(Arrived(link, message, tensor))
            except ProtocolError:
                self._num_malformed += 1
        return events

    def _disconnects(self, monitor: zmq.Socket[bytes]) -> list[Event]:
        link = self._monitors[monitor]
        lost = False
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(monitor, zmq.NOBLOCK)
                lost = True
        return [Lost(link)] if lost else []

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass


def _remedy(code: int | None) -> str:
    match code:
        case zmq.EADDRINUSE:
            return "choose another port, or port 0 for a free one"
        case errno.EACCES | errno.EPERM:
            return "this port takes rights that this user does not have; choose one from 1024"
        case _:
            return "this machine has no such address; choose one of its own, or 127.0.0.1"
