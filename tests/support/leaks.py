"""What a test may not leave behind: Python threads, child processes, open files and sockets.

Pure comparison of two snapshots apart from taking them. What libraries start once per process and keep on purpose is either started before
the first snapshot (`start_lasting_parts`) or left out by identity; never by a pattern that one of our own leaks could match.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import zmq

SETTLE_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What this process holds at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[tuple[int, float]]
    """(process id, creation time) of every process below this one, zombies included."""
    descriptors: Counter[str]
    """What each open descriptor refers to, with how often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What a later snapshot holds beyond an earlier one, described for a person."""

    items: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.items)

    def __str__(self) -> str:
        return "\n".join(self.items)


def start_lasting_parts() -> None:
    """Start what pyzmq keeps for good from its first zero-copy send on: a thread with a context and sockets of its own."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one_end, context.socket(zmq.PAIR) as other_end:
        one_end.bind("inproc://zero-copy")
        other_end.connect("inproc://zero-copy")
        one_end.send(bytes(2 * zmq.COPY_THRESHOLD), copy=False)
        other_end.recv()


def _is_library_thread(thread: threading.Thread) -> bool:
    # tqdm keeps one daemon thread for all its bars; transformers and NNCF draw with tqdm.
    monitor = sys.modules.get("tqdm._monitor")
    return monitor is not None and isinstance(thread, monitor.TMonitor)


def _resource_tracker_pid() -> int | None:
    # multiprocessing starts it with the first spawned process or shared-memory block and keeps it for the life of the interpreter.
    return getattr(resource_tracker._resource_tracker, "_pid", None)


def _resource_tracker_fd() -> int | None:
    return getattr(resource_tracker._resource_tracker, "_fd", None)


def _linux_descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        if int(link.name) == _resource_tracker_fd():
            continue
        try:
            found[str(link.readlink())] += 1
        except FileNotFoundError:  # the descriptor that lists this very folder
            continue
    return found


def _portable_descriptors(process: psutil.Process) -> Counter[str]:
    files = (file.path for file in process.open_files())
    sockets = (f"socket {connection.laddr} -> {connection.raddr}" for connection in process.net_connections(kind="inet"))
    return Counter([*files, *sockets])


def take_snapshot() -> Snapshot:
    """Look at this process now."""
    process = psutil.Process()
    children = set()
    for child in process.children(recursive=True):
        try:
            if child.pid != _resource_tracker_pid():
                children.add((child.pid, child.create_time()))
        except psutil.NoSuchProcess:
            continue
    return Snapshot(
        threads=frozenset(thread for thread in threading.enumerate() if not _is_library_thread(thread)),
        children=frozenset(children),
        descriptors=_linux_descriptors() if sys.platform == "linux" else _portable_descriptors(process),
    )


def _describe_child(pid: int) -> str:
    try:
        child = psutil.Process(pid)
        return f"process {pid} ({child.status()}): {' '.join(child.cmdline())[:200]}"
    except psutil.Error:
        return f"process {pid}"


def compare(before: Snapshot, after: Snapshot) -> Leaks:
    """What `after` holds beyond `before`."""
    threads = [f"thread {thread.name} (daemon={thread.daemon})" for thread in after.threads - before.threads]
    children = [_describe_child(pid) for pid, _ in after.children - before.children]
    descriptors = [f"open {target} ({count} more)" for target, count in (after.descriptors - before.descriptors).items()]
    return Leaks(items=tuple(sorted([*threads, *children, *descriptors])))


def wait_for_none(before: Snapshot, *, settle_s: float = SETTLE_S) -> Leaks:
    """The leaks since `before` that are still there after `settle_s` seconds; returns at once when there are none."""
    deadline = time.monotonic() + settle_s
    while True:
        leaks = compare(before, take_snapshot())
        if not leaks or time.monotonic() >= deadline:
            return leaks
        time.sleep(_POLL_S)
