"""A TCP relay in front of a worker that counts the bytes it sends back: what is on the wire, framing and heartbeats included."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from langchain_pshard.transport.address import Address

_PIECE_BYTES = 1 << 16


class CountingRelay:
    """Accepts connections on a free loopback port and passes them on. `num_bytes` counts what came back from the worker, over all."""

    def __init__(self, address: str) -> None:
        self._target = Address.parse(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Break all connections and end. Idempotent."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):  # not connected any more
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="relay")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            far = socket.create_connection((self._target.host, self._target.port))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [near, far]
            self._start(self._pump, near, far, False)
            self._start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):  # either end closed
            while data := source.recv(_PIECE_BYTES):
                if is_counted:
                    with self._lock:
                        self.num_bytes += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
