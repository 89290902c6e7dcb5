"""What `generate` and `agenerate` hand to their callers: two thin loops over one assembler.

Both stop the work on the fleet when they are closed, abandoned (garbage collected) or cancelled. The reactor holds only the inbox, never
the iterator, so that an abandoned one can be collected.
"""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from langchain_pshard.core.errors import PShardError
from langchain_pshard.pipeline.assembler import Assembler
from langchain_pshard.pipeline.generation import GenerationChunk
from langchain_pshard.pipeline.reactor import Reactor
from langchain_pshard.pipeline.stream import Delivery, Sink, StreamRequest

MakeRequest = Callable[[Sink], StreamRequest]
_Item = Delivery | PShardError


class GenerationIterator(Iterator[GenerationChunk]):
    """The chunks of one generation, which runs from construction on. A context manager; `close` stops the work.

    Raises (while iterating):
        WorkerLostError, StateLostError, CapacityError, DeadlineError, InferenceError, ClosedError: as `PipelineClient.generate` says.
    """

    def __init__(self, reactor: Reactor, assembler: Assembler, make_request: MakeRequest, owner: object) -> None:
        inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()

        def sink(item: _Item) -> bool:
            inbox.put(item)
            return True

        self._inbox = inbox
        self._assembler = assembler
        self._reactor = reactor
        self._owner = owner  # the client must live as long as somebody reads from it
        self._is_done = False
        self._stop = weakref.finalize(self, reactor.cancel, reactor.submit(make_request(sink)))
        self._stop.atexit = False

    def __next__(self) -> GenerationChunk:
        if self._is_done:
            raise StopIteration
        try:
            item = self._reactor.take(self._inbox)
            if item is None:
                raise StopIteration
            if isinstance(item, PShardError):
                raise item
            chunk = self._assembler.chunk(item)
        except BaseException:
            self.close()
            raise
        if chunk.end is not None:
            self.close()
        return chunk

    def close(self) -> None:
        """Stop the work on the fleet; iteration ends. Idempotent, from any thread."""
        self._is_done = True
        self._stop()
        self._inbox.put(None)  # wakes a `next` that waits in another thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGenerationIterator(AsyncIterator[GenerationChunk]):
    """The chunks of one generation, which runs from the first `anext` on, in the event loop of that call. `aclose` stops the work, and
    so does the cancellation of a task that waits for a chunk.

    Raises (while iterating): as `GenerationIterator`.
    """

    def __init__(self, reactor: Reactor, assembler: Assembler, make_request: MakeRequest, owner: object) -> None:
        self._assembler = assembler
        self._reactor = reactor
        self._make_request = make_request
        self._owner = owner
        self._inbox: asyncio.Queue[_Item | None] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._is_done = False

    async def __anext__(self) -> GenerationChunk:
        if self._is_done:
            raise StopAsyncIteration
        if self._inbox is None:
            self._inbox = self._start()
        try:
            item = await self._inbox.get()
            if item is None:
                raise StopAsyncIteration
            if isinstance(item, PShardError):
                raise item
            chunk = self._assembler.chunk(item)
        except BaseException:
            await self.aclose()
            raise
        if chunk.end is not None:
            await self.aclose()
        return chunk

    async def aclose(self) -> None:
        """Stop the work on the fleet; iteration ends. Idempotent, never waits."""
        self._is_done = True
        self._stop()
        if self._inbox is not None:
            self._inbox.put_nowait(None)

    def _start(self) -> asyncio.Queue[_Item | None]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[_Item | None] = asyncio.Queue()

        def sink(item: _Item) -> bool:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, item)
            except RuntimeError:  # the loop was closed: nobody will ever read this
                return False
            return True

        finalizer = weakref.finalize(self, self._reactor.cancel, self._reactor.submit(self._make_request(sink)))
        finalizer.atexit = False
        self._stop = finalizer
        return inbox
