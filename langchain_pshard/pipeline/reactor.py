"""The one thread that owns a client's sockets. It decides nothing: commands and events go into the `Session`, instructions come out and are
carried out here. Callers reach it through a thread-safe queue; what they wait for arrives at their sinks.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from langchain_pshard.core.errors import ClosedError, PShardError
from langchain_pshard.core.messages import StreamId
from langchain_pshard.pipeline.chain import Chain
from langchain_pshard.pipeline.instructions import Deliver, Dial, Instruction, Send, Warn
from langchain_pshard.pipeline.session import Session
from langchain_pshard.pipeline.stream import StreamRequest
from langchain_pshard.transport.hub import Event, Hub, Link, Lost

Command = Callable[[Session, float], Sequence[Instruction]]
"""What a caller asks of the session, run in the reactor thread with the time."""

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
_ALIVE_CHECK_S = 1.0
"""A wait without end cannot be interrupted by Ctrl-C on Windows, and would outlast a reactor that died."""
_log = logging.getLogger(__name__)


class Reactor:
    """Runs one session until closed. `post`, `cancel` and `close` may be called from any thread."""

    def __init__(self, hub: Hub, make_session: Callable[[float], Session]) -> None:
        self._hub = hub
        self._session = make_session(time.monotonic())
        self._stream_ids = itertools.count(1)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._links: dict[str, Link] = {}
        self._addresses: dict[Link, str] = {}
        self._tick_at = 0.0
        self._is_stopping = False
        self._is_closed = False
        self._lock = threading.RLock()  # a finalizer may run in the middle of `post`, in the same thread
        self._thread = threading.Thread(target=self._run, name="pshard-reactor", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether anything that is posted will be done."""
        return not (self._is_stopping or self._is_closed)

    @property
    def chain(self) -> Chain | None:
        """The chain joined last."""
        return self._session.chain

    def submit(self, request: StreamRequest) -> StreamId:
        """Begin a generation; what comes of it goes to the request's sink.

        Raises:
            ClosedError: the reactor was closed.
        """
        with self._lock:  # ids in the order in which the session sees them
            stream_id = StreamId(next(self._stream_ids))
            self.post(lambda session, now: session.submit(stream_id, request, now))
        return stream_id

    def post(self, command: Command) -> None:
        """Have the session do this soon.

        Raises:
            ClosedError: the reactor was closed.
        """
        with self._lock:
            if self._is_closed or self._is_stopping:
                raise ClosedError("the client is closed")
            self._commands.put(command)
        self._hub.wake()

    def cancel(self, stream: StreamId) -> None:
        """End a stream nobody waits for. Takes no lock and never raises: finalizers call it at any point of any thread."""
        self._commands.put(lambda session, now: session.cancel(stream, now))
        self._hub.wake()

    def close(self) -> None:
        """End all streams with `ClosedError` and let the thread finish. Idempotent."""
        with self._lock:
            self._is_stopping = True
        self._hub.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def take(self, inbox: queue.SimpleQueue[T]) -> T:
        """The next item that a sink puts into `inbox`; waits in the caller's thread.

        Raises:
            ClosedError: the reactor has ended and nothing more will come.
        """
        while True:
            try:
                return inbox.get(timeout=_ALIVE_CHECK_S)
            except queue.Empty:
                if not self._thread.is_alive() and inbox.empty():
                    raise ClosedError("the client is closed") from None

    def _run(self) -> None:
        failure: PShardError | None = None
        try:
            while not self._is_stopping:
                events = self._hub.poll(max(0.0, self._tick_at - time.monotonic()))
                self._take_commands()
                for event in events:
                    self._perform(self._decide(event))
                self._tick()
        except Exception as error:  # noqa: BLE001 - our own bug; whoever waits must hear of it
            _log.exception("the client's reactor failed")
            failure = ClosedError(f"the client failed inside and is closed: {error!r}")
        finally:
            self._finish(failure)

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._perform(command(self._session, time.monotonic()))

    def _decide(self, event: Event) -> Sequence[Instruction]:
        address = self._addresses.get(event.link)
        if address is None:
            return ()  # of a link that was given up
        now = time.monotonic()
        if isinstance(event, Lost):
            return self._session.on_lost(address, now)
        return self._session.on_message(address, event.message, now, event.tensor)

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._tick_at:
            self._perform(self._session.tick(now))
            self._tick_at = now + self._session.tick_interval_s
        else:
            self._tick_at = min(self._tick_at, now + self._session.tick_interval_s)  # work came: look again sooner

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(address=address, message=message):
                    if (link := self._links.get(address)) is not None:
                        self._hub.send(link, message)  # what is dropped here is repeated or times out in the session
                case Deliver(sink=sink, item=item, stream=stream):
                    if not sink(item) and stream is not None:
                        self._perform(self._session.cancel(stream, time.monotonic()))
                case Dial(address=address):
                    self._dial(address)
                case Warn(text=text):
                    _log.warning("%s", text)

    def _dial(self, address: str) -> None:
        old = self._links.pop(address, None)
        if old is not None:
            del self._addresses[old]
            self._hub.hang_up(old)
        link = self._hub.dial(address)
        self._links[address] = link
        self._addresses[link] = address

    def _finish(self, failure: PShardError | None) -> None:
        with self._lock:
            self._is_closed = True  # from here on `post` adds nothing
        try:
            self._take_commands()
            self._perform(self._session.close(failure))
        finally:
            self._hub.close()
