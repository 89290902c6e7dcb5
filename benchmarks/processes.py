"""Processes that a benchmark starts beside itself: pinned to cores, heard by their JSON lines, gone when the benchmark is.

Every one of them ends when its standard input does, so that none outlives a benchmark that was killed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_TAIL_CHARS = 4000


class ProcessError(RuntimeError):
    """A process ended early or did not speak in time; the message ends with what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonProcess:
    """A process that reports in JSON objects, one a line, of which `event` says what each is."""

    name: str
    """For messages: `worker`."""
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...] | None
    """The cores it is pinned to; None where it was not asked for or the system cannot."""
    lines: queue.Queue[bytes | None]
    errors: Path

    def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """The next object whose `event` is this; everything before it is passed over.

        Raises:
            ProcessError: it ended, or was silent for too long.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left_s)
            except queue.Empty:
                break
            if line is None:
                raise ProcessError(f"the {self.name} ended before it said {event!r}:\n{self._tail()}")
            found = _as_event(line)
            if found.get("event") == event:
                return found
        raise ProcessError(f"the {self.name} did not say {event!r} within {timeout_s:.0f} s:\n{self._tail()}")

    def tell(self, request: dict[str, Any]) -> None:
        """Write a line to its standard input.

        Raises:
            ProcessError: it has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ProcessError(f"the {self.name} has ended:\n{self._tail()}") from error

    def answer(self) -> dict[str, Any]:
        """What it says to the last request told.

        Raises:
            ProcessError: it ended, or took longer than `ANSWER_TIMEOUT_S`.
        """
        return self.wait_for("answer", ANSWER_TIMEOUT_S)

    def _tail(self) -> str:
        return self.errors.read_text("utf-8", "replace")[-_TAIL_CHARS:]


def can_pin() -> bool:
    """Whether this system lets a process be bound to cores."""
    return hasattr(psutil.Process, "cpu_affinity")


@contextlib.contextmanager
def started(command: Sequence[str], *, name: str, cores: Sequence[int] | None = None) -> Iterator[JsonProcess]:
    """Start a process, and stop it at the end.

    Args:
        command: program and arguments.
        name: what it is, for messages.
        cores: cores to pin it to, where the system can.
    """
    with tempfile.TemporaryDirectory(prefix="pshard-bench-") as folder:
        errors = Path(folder) / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        pinned = tuple(cores) if cores is not None and can_pin() else None
        assert process.stdin is not None
        assert process.stdout is not None
        # The pipe is read to its end, so that a process that says much never blocks on it.
        lines: queue.Queue[bytes | None] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), name=f"{name}-output")
        reader.start()
        try:
            if pinned is not None:  # at once: threads that it starts later inherit the binding
                psutil.Process(process.pid).cpu_affinity(list(pinned))
            yield JsonProcess(name=name, process=process, cores=pinned, lines=lines, errors=errors)
        finally:
            with contextlib.suppress(BrokenPipeError):  # what it was told last and never read
                process.stdin.close()
            _stop(process)
            reader.join()
            process.stdout.close()


def serve_requests(reply: Callable[[dict[str, Any]], dict[str, Any]], **ready: Any) -> None:
    """The other end, in the process itself: say that it is ready, then answer each line of standard input until it ends."""
    _say({"event": "ready", **ready})
    for line in sys.stdin:
        _say({"event": "answer", **reply(json.loads(line))})


def _say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def _as_event(line: bytes) -> dict[str, Any]:
    """The object on a line; empty for what a library printed."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
