"""A long way between machines, on one machine: a TCP proxy that hands chunks on when they are due, any number on the way.

Delay, not bandwidth, is what it makes: a chunk that came at t leaves at t + delay, in order, however many came before. So throughput is
that of the loopback, and a protocol that waits for answers shows exactly how often it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from langchain_pshard.transport.address import Address

_CHUNK_BYTES = 256 << 10
_START_TIMEOUT_S = 10.0


class DelayProxy:
    """Listens on a free loopback port; whoever connects reaches `target`, each way `one_way_ms` later. A context manager with a thread."""

    def __init__(self, target: str, one_way_ms: float) -> None:
        self.one_way_ms = one_way_ms
        self._target = Address.parse(target)
        self._port = 0
        self._is_ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="delay-proxy", daemon=True)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def __enter__(self) -> DelayProxy:
        self._thread.start()
        if not self._is_ready.wait(_START_TIMEOUT_S):
            raise TimeoutError("the delay proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            task.add_done_callback(connections.discard)
            with contextlib.suppress(asyncio.CancelledError):  # the proxy ends; asyncio would report it as nobody's error
                await self._connect(reader, writer)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._stop.wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                there_reader, there_writer = await asyncio.open_connection(self._target.host, self._target.port)
            except OSError:
                return  # nobody there: the caller's connection closes, as it would without us
            with contextlib.closing(there_writer):
                ways = (self._carry(reader, there_writer), self._carry(there_reader, writer))
                tasks = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: read at once, write when due."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def release() -> None:
            while True:
                at, chunk = await due.get()
                if (left_s := at - self._loop.time()) > 0:
                    await asyncio.sleep(left_s)
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()

        async def take() -> None:
            while True:
                chunk = await reader.read(_CHUNK_BYTES)
                due.put_nowait((self._loop.time() + self.one_way_ms / 1e3, chunk))
                if not chunk:
                    return

        with contextlib.suppress(ConnectionError):  # either end is gone, and with it the connection
            await asyncio.gather(take(), release())


@contextlib.contextmanager
def delayed(addresses: Sequence[str], one_way_ms: float) -> Iterator[list[str]]:
    """Addresses that lead to the same workers with so long a way to each. Client to first stage, stage to stage, and last stage to client
    all take it, because every link of a chain is dialled by the address that the client knows."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(DelayProxy(address, one_way_ms)).address for address in addresses]
