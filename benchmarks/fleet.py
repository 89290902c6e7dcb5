"""Workers as a user starts them, one process per stage, for benchmarks and tests that need real ones.

Each worker may be pinned to cores: with one inference thread, a process on one core is a faithful stand-in for a machine.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.processes import READY_TIMEOUT_S, can_pin, started


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that has reported ready."""

    address: str
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...] | None
    """The cores it is pinned to; None where it was not asked for or the system cannot."""


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(psutil.Process().cpu_affinity()) if can_pin() else tuple(range(psutil.cpu_count() or 1))


@contextlib.contextmanager
def running_worker(bundle: Path, *stages: int, cores: Sequence[int] | None = None, options: Sequence[str] = ()) -> Iterator[RunningWorker]:
    """Start one worker on a free loopback port with `stages` of `bundle`, and stop it at the end.

    Args:
        bundle: folder of the bundle.
        stages: the stages it serves.
        cores: cores to pin it to, where the system can.
        options: more options of `pshard-worker`.

    Raises:
        ProcessError: it ended early or was not ready in time.
    """
    stage_options = [part for stage in stages for part in ("--stage", str(stage))]
    command = [sys.executable, "-m", "workers", str(bundle), *stage_options, "--threads", "1", "--log-format", "json"]
    command += ["--exit-with-parent", *options]
    with started(command, name="worker", cores=cores) as worker:
        ready = worker.wait_for("ready", READY_TIMEOUT_S)
        yield RunningWorker(address=str(ready["address"]), process=worker.process, cores=worker.cores)
