"""Workers as a user starts them, one process per stage, for benchmarks and tests that need real ones.

Each worker may be pinned to cores: with one inference thread, a process on one core is a faithful stand-in for a machine.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0


class WorkerStartError(RuntimeError):
    """A worker did not report ready; the message ends with what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that has reported ready."""

    address: str
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...] | None
    """The cores it is pinned to; None where it was not asked for or the system cannot."""


def can_pin() -> bool:
    """Whether this system lets a process be bound to cores."""
    return hasattr(psutil.Process, "cpu_affinity")


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _ready_address(line: bytes) -> str | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_ready = isinstance(event, dict) and event.get("event") == "ready"
    return str(event["address"]) if is_ready else None


def _wait_ready(lines: queue.Queue[bytes | None], errors: Path) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left_s)
        except queue.Empty:
            break
        if line is None:
            raise WorkerStartError(f"the worker ended before it was ready:\n{errors.read_text('utf-8', 'replace')[-4000:]}")
        if address := _ready_address(line):
            return address
    raise WorkerStartError(f"the worker was not ready within {READY_TIMEOUT_S:.0f} s:\n{errors.read_text('utf-8', 'replace')[-4000:]}")


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(psutil.Process().cpu_affinity()) if can_pin() else tuple(range(psutil.cpu_count() or 1))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_worker(bundle: Path, *stages: int, cores: Sequence[int] | None = None, options: Sequence[str] = ()) -> Iterator[RunningWorker]:
    """Start one worker on a free loopback port with `stages` of `bundle`, and stop it at the end.

    Args:
        bundle: folder of the bundle.
        stages: the stages it serves.
        cores: cores to pin it to, where the system can.
        options: more options of `pshard-worker`.

    Raises:
        WorkerStartError: it ended early or was not ready in time.
    """
    stage_options = [part for stage in stages for part in ("--stage", str(stage))]
    command = [sys.executable, "-m", "workers", str(bundle), *stage_options, "--threads", "1", "--log-format", "json"]
    command += ["--exit-with-parent", *options]
    with tempfile.TemporaryDirectory(prefix="pshard-worker-") as folder:
        errors = Path(folder) / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        pinned = tuple(cores) if cores is not None and can_pin() else None
        assert process.stdin is not None
        assert process.stdout is not None
        # The pipe is read to its end, so that a worker that logs much never blocks on it.
        lines: queue.Queue[bytes | None] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), name="worker-output")
        reader.start()
        try:
            if pinned is not None:  # at once: threads that it starts later inherit the binding
                psutil.Process(process.pid).cpu_affinity(list(pinned))
            yield RunningWorker(address=_wait_ready(lines, errors), process=process, cores=pinned)
        finally:
            process.stdin.close()  # --exit-with-parent: its end is the worker's, so that one never outlives a killed benchmark either
            _stop(process)
            reader.join()
            process.stdout.close()
