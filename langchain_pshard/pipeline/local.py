"""A fleet on this machine: one worker process a stage, started and owned by this process.

The workers end however this process ends: by `close`, at interpreter exit, and, when it is killed outright, because their standard input
is a pipe of ours that ends with us. They are in a process group of their own, so that Ctrl-C in the user's terminal interrupts the chat
and not the workers under it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self

from langchain_pshard.core.bundle import load_manifest
from langchain_pshard.core.errors import (
    ClosedError,
    FleetError,
    InvalidOptionError,
    MissingExtraError,
    PShardError,
    WorkerUnreachableError,
    error_from_code,
)

CLOSE_TIMEOUT_S = 5.0
_TAIL_LINES = 20
_USAGE_ERROR = 2
"""Exit code of a command line that makes no sense; its last line says why."""


class LocalFleet:
    """Worker processes for all stages of a bundle, ready when constructed. A context manager.

    Attributes:
        addresses: of the workers, by stage.
    """

    def __init__(
        self,
        bundle: Path,
        *,
        num_threads: int | None = None,
        runner: str | None = None,
        numerics: str | None = None,
        kv_memory: str | None = None,
        kv_precision: str | None = None,
        prefix_cache: bool | None = None,
        drafts: bool = False,
        allow_logits: bool = False,
        start_timeout_s: float = 300.0,
    ) -> None:
        """Start the workers and wait until every stage is warm.

        Args:
            bundle: folder of the bundle.
            num_threads: inference threads of each worker; None shares the cores among the stages.
            runner: `paged` or `stateful`; None is the best that the bundle's graphs can run on.
            numerics: `fast` or `exact`; None is the worker's default, as for the next ones.
            kv_memory: KV memory of each stage, with a unit: `1GiB`.
            kv_precision: type of the KV: `f16`, `f32` or `u8`.
            prefix_cache: whether prompts that begin alike share the KV of their beginning.
            drafts: serve the bundle's draft model too, beside the last stage.
            allow_logits: whether clients may ask for whole logits (`PipelineClient.logits`), for comparison.
            start_timeout_s: longest wait for all workers together.

        Raises:
            BundleError: no usable bundle, or one of its files is damaged.
            InvalidOptionError: an option the workers do not know, or `drafts` for a bundle without a draft model.
            WorkerUnreachableError: a worker was not ready in time.
            MissingExtraError: what workers need is not installed.
            FleetError: a worker ended before it was ready; a class of its own when the worker said why.
        """
        if find_spec("openvino") is None:
            raise MissingExtraError("a fleet of local workers", "worker")
        manifest = load_manifest(bundle)
        num_stages = manifest.num_stages
        if drafts and manifest.draft is None:
            raise InvalidOptionError(
                f"draft='model' needs a draft model, and {bundle} holds none: export it again with pshard-export --draft MODEL; without:"
                " 'auto', 'ngram', None"
            )
        runner = runner or manifest.best_runner
        if drafts and manifest.draft is not None and runner not in manifest.draft.runners:
            raise InvalidOptionError(
                f"the bundle's draft model, {manifest.draft.model_name}, cannot run beside a stage on the {runner} runner; valid there:"
                f" {', '.join(manifest.draft.runners)}. Start a worker of its own for it (`pshard-worker {bundle} --draft --runner"
                f" {manifest.draft.runners[0]}`) and name all workers"
            )
        if num_threads is not None and num_threads < 1:
            raise InvalidOptionError(f"num_threads={num_threads} is out of range; valid: 1 or more, or None")
        self._bundle = bundle
        options = _options(
            {
                "threads": num_threads or max(1, _num_cores() // num_stages),
                "runner": runner,
                "numerics": numerics,
                "kv-memory": kv_memory,
                "kv-precision": kv_precision,
                "prefix-cache": prefix_cache,
                "allow-logits": allow_logits or None,
            }
        )
        self._options = [[*options, *(["--draft"] if drafts and idx == num_stages - 1 else [])] for idx in range(num_stages)]
        self._start_timeout_s = start_timeout_s
        self._lock = threading.RLock()
        self._processes: list[_WorkerProcess] = []
        self._close = weakref.finalize(self, _stop_all, self._processes)
        deadline = time.monotonic() + start_timeout_s
        try:
            for stage_idx in range(num_stages):  # all at once: they load in parallel
                self._processes.append(_WorkerProcess(bundle, stage_idx, self._options[stage_idx]))
            self.addresses = tuple(process.wait_ready(deadline, start_timeout_s) for process in self._processes)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by stage."""
        return tuple(process.pid for process in self._processes)

    @property
    def is_whole(self) -> bool:
        """Whether all workers run."""
        return all(process.is_running for process in self._processes)

    def revive(self) -> None:
        """Start the workers that have died once more, at their old addresses, and wait until they are warm. The others are left alone.

        Raises:
            ClosedError: the fleet was closed.
            BundleError, WorkerUnreachableError, FleetError: as when the fleet was made. The next `revive` tries again.
        """
        with self._lock:
            if not self._close.alive:
                raise ClosedError("the local fleet is closed: make a new one")
            started: list[_WorkerProcess] = []
            deadline = time.monotonic() + self._start_timeout_s
            try:
                for stage_idx, process in enumerate(self._processes):
                    if not process.is_running:
                        process.finish(0.0)
                        self._processes[stage_idx] = _WorkerProcess(
                            self._bundle, stage_idx, self._options[stage_idx], self.addresses[stage_idx]
                        )
                        started.append(self._processes[stage_idx])
                for process in started:
                    process.wait_ready(deadline, self._start_timeout_s)
            except BaseException:
                for process in started:
                    process.finish(0.0)
                raise

    def close(self) -> None:
        """Stop the workers and wait for them. Idempotent."""
        with self._lock:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WorkerProcess:
    """One worker, its pipes, and the threads that keep them from filling up."""

    def __init__(self, bundle: Path, stage_idx: int, options: Sequence[str], address: str = "tcp://127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "workers", str(bundle), "--stage", str(stage_idx), "--listen", address]
        self._stage_idx = stage_idx
        self._process = subprocess.Popen(  # noqa: S603 - our own program; the options are its own, never through a shell
            [*command, "--log-format", "json", "--exit-with-parent", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **_own_group(),
        )
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), name=f"pshard-worker-{stage_idx}-out", daemon=True),
            threading.Thread(target=self._read_tail, args=(self._process.stderr,), name=f"pshard-worker-{stage_idx}-err", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, deadline: float, timeout_s: float) -> str:
        """The worker's address, once it is warm."""
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                text = f"the worker of stage {self._stage_idx} was not ready within {timeout_s:g} s{self._said()}"
                raise WorkerUnreachableError(text) from None
            if event is None:
                raise self._early_end()
            if event.get("event") == "ready":
                return str(event["address"])
            if event.get("event") == "error":
                raise error_from_code(str(event["code"]), f"the worker of stage {self._stage_idx} cannot start: {event['message']}")

    def ask_to_stop(self) -> None:
        """The end of its input is the first request, a signal the second."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()

    def finish(self, timeout_s: float) -> None:
        """Wait, then kill; afterwards no process, pipe or thread is left."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _early_end(self) -> PShardError:
        exit_code = self._process.wait()
        self._readers[1].join()
        if exit_code == _USAGE_ERROR:
            return InvalidOptionError(
                f"the worker of stage {self._stage_idx} refuses its options: {self._tail[-1] if self._tail else 'no word'}"
            )
        return FleetError(f"the worker of stage {self._stage_idx} ended with exit code {exit_code} before it was ready{self._said()}")

    def _said(self) -> str:
        return "; its last words:\n" + "\n".join(self._tail) if self._tail else " and said nothing"

    def _read_events(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library that prints is no event
            if isinstance(event, dict):
                self._events.put(event)
        self._events.put(None)

    def _read_tail(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._tail.append(line.decode("utf-8", "replace").rstrip())


def _options(values: Mapping[str, str | int | bool | None]) -> list[str]:
    """The command line of these options, by name; None leaves one to the worker."""
    parts: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            parts.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            parts += [f"--{name}", str(value)]
    return parts


def _num_cores() -> int:
    # What this process may use, which a container or taskset may limit; not every system can tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own_group() -> dict[str, Any]:
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _stop_all(processes: Sequence[_WorkerProcess]) -> None:
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for process in processes:
        process.ask_to_stop()
    for process in processes:
        process.finish(max(0.0, deadline - time.monotonic()))
