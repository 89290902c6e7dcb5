"""How a worker process is told to end: signals, and the end of its parent.

Signals are read from a descriptor by a thread of their own: Python runs handlers in the main thread between two instructions, which may be
a long way off while OpenVINO compiles a model or an inference hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, Self

PARENT_GONE_GRACE_S = 5.0
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))


class Stoppable(Protocol):
    """What can be ended; `Server` is the real one. Both are called from other threads."""

    def drain(self) -> None: ...

    def stop(self) -> None: ...


def _note(number: int, frame: FrameType | None) -> None:
    """Python writes a signal to the wakeup descriptor only when it has a handler."""


class StopSwitch:
    """From first signal to exit. Made and closed in the main thread; a context manager.

    The first signal drains what is attached, or ends the process at once while nothing is (the worker is still loading); the second ends
    it at once in any case.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: Stoppable | None = None
        self._num_signals = 0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handlers = {number: signal.signal(number, _note) for number in _SIGNALS}
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch_signals, name="signals", daemon=True)
        self._thread.start()

    def attach(self, served: Stoppable) -> None:
        """From now on the first signal drains `served`."""
        with self._lock:
            self._attached = served

    def watch_parent(self) -> None:
        """Stop when standard input ends, which it does however the parent dies."""
        threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    def close(self) -> None:
        """Give the signals back."""
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):  # closed already
            self._writer.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _watch_signals(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number in _SIGNALS:
                    self._signalled()

    def _signalled(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            _exit_now(1)
        with self._lock:
            attached = self._attached
        if attached is None:
            _exit_now(0)
        attached.drain()

    def _watch_parent(self) -> None:
        # Not sys.stdin: a thread inside its buffer when the interpreter shuts down is a fatal error.
        with contextlib.suppress(OSError):  # no standard input at all is an end of it, too
            while os.read(0, 4096):
                pass
        with self._lock:
            attached = self._attached
        if attached is None:
            _exit_now(0)
        attached.stop()
        threading.Event().wait(PARENT_GONE_GRACE_S)
        _exit_now(0)  # the loop hangs in an inference, and nobody is left to kill us


def _exit_now(code: int) -> NoReturn:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress bar may have hidden the cursor
        sys.stderr.flush()
    os._exit(code)
