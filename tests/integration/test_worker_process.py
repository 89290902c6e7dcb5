"""`pshard-worker` as a process: start, refusals, signals, and the end of its parent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from langchain_pshard.core.bundle import load_manifest
from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.messages import (
    ClientId,
    Epoch,
    GetStatus,
    Hop,
    Join,
    Joined,
    Message,
    MicroBatch,
    Open,
    Opened,
    RequestId,
    Slice,
    SliceKind,
    Status,
    Step,
    StepId,
    StepResult,
    StreamId,
    WorkerId,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived, Link
from langchain_pshard.transport.zeromq import ZmqHub
from tests.support.bundles import TinyBundle

TIMEOUT_S = 60.0
M = TypeVar("M")
COMMAND = (sys.executable, "-m", "workers")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can catch")


@pytest.fixture(scope="session")
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle("llama", num_stages=2)


@contextmanager
def started(bundle: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A worker and its first line."""
    command = [*COMMAND, str(bundle), "--threads", "1", "--log-format", "json", *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def refused(bundle: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The error of a worker that must not start: its event, and what standard error says."""
    command = [*COMMAND, str(bundle), "--log-format", "json", *options]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    event = json.loads(lines[0])
    assert event["event"] == "error"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return event, errors[0]


class Talk:
    """A client of the workers that serve the stages, in order."""

    def __init__(self, *workers: dict[str, Any]) -> None:
        self.hub = ZmqHub()
        self.links: list[Link] = [self.hub.dial(ready["address"]) for ready in workers]
        self.chain = tuple(Hop(WorkerId(ready["worker"]), ready["address"]) for ready in workers for _ in ready["stages"])

    def send(self, message: Message, link_idx: int = 0) -> None:
        assert self.hub.send(self.links[link_idx], message)

    def receive(self, kind: type[M], num_messages: int = 1) -> M:
        deadline = time.monotonic() + TIMEOUT_S
        got: list[M] = []
        while time.monotonic() < deadline:
            for event in self.hub.poll(0.1):
                if isinstance(event, Arrived):
                    assert isinstance(event.message, kind), event.message
                    got.append(event.message)
            if len(got) == num_messages:
                return got[-1]
        raise AssertionError(f"{len(got)} of {num_messages} {kind.__name__}")

    def ask(self, message: Message, kind: type[M]) -> M:
        """Ask every worker; the last answer."""
        for link_idx in range(len(self.links)):
            self.send(message, link_idx)
        return self.receive(kind, len(self.links))

    def open(self, stream: int = 1) -> None:
        client, epoch = ClientId("test"), Epoch(1)
        self.ask(Join(request=RequestId(1), client=client, epoch=epoch, chain=self.chain), Joined)
        sampling = SamplingParams()
        ask = Open(request=RequestId(2), client=client, epoch=epoch, stream=StreamId(stream), num_tokens=32, sampling=sampling)
        self.ask(ask, Opened)

    def step(self, step_id: int, start: int, tokens: list[int], kind: SliceKind) -> int:
        piece = Slice(stream=StreamId(1), start=start, tokens=pack_tokens(tokens), kind=kind, num_sampled=1)
        one = Step(client=ClientId("test"), epoch=Epoch(1), step_id=StepId(step_id), slices=(piece,))
        self.send(MicroBatch(stage_idx=0, steps=(one,)))
        return unpack_tokens(self.receive(StepResult).results[0].tokens)[0]

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = [*prompt, self.step(1, 0, prompt, SliceKind.PREFILL)]
        for step_id in range(2, num_tokens + 1):
            tokens.append(self.step(step_id, len(tokens) - 1, tokens[-1:], SliceKind.ROWS))
        return tokens[len(prompt) :]


def wait(process: subprocess.Popen[str]) -> int:
    return process.wait(TIMEOUT_S)


def test_the_ready_line_and_a_few_tokens(bundle: Path) -> None:
    with started(bundle, "--stage", "0", "--stage", "1") as (process, ready):
        assert ready["event"] == "ready"
        assert ready["stages"] == [0, 1]
        assert ready["fingerprint"] == load_manifest(bundle).fingerprint
        assert ready["pid"] == process.pid
        talk = Talk(ready)
        with talk.hub:
            talk.open()
            tokens = talk.generate([3, 5, 7], 5)
            assert talk.step(6, 3, tokens[:1], SliceKind.ROWS) == tokens[1]  # rewound: the same again
            status = talk.ask(GetStatus(request=RequestId(9)), Status)
            assert [(stage.stage_idx, stage.num_streams, stage.num_steps) for stage in status.stages] == [(0, 1, 6), (1, 1, 6)]
            assert all(0 < stage.kv_used_tokens <= stage.kv_capacity_tokens for stage in status.stages)
            assert status.rss_bytes > 1 << 20


@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_two_workers_say_what_one_says(bundle: Path, runner: str) -> None:
    said = []
    for split in ([("0", "1")], [("0",), ("1",)]):
        with ExitStack() as stack:
            options = [[part for stage in stages for part in ("--stage", stage)] for stages in split]
            workers = [stack.enter_context(started(bundle, *option, "--runner", runner)) for option in options]
            talk = Talk(*(ready for _, ready in workers))
            with talk.hub:
                talk.open()
                said.append(talk.generate([3, 5, 7, 11], 24))
    assert said[0] == said[1]
    assert len(set(said[0])) > 1


def test_text_output_has_one_ready_line_and_the_line_to_paste(bundle: Path) -> None:
    command = [*COMMAND, str(bundle), "--stage", "1", "--exit-with-parent"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        process.stdin.close()  # as if the parent had ended
        assert wait(process) == 0
        assert process.stdout.read() == ""
    address = second.split('"')[1]
    assert first.startswith("ready: ")
    assert first.rstrip().endswith(f"at {address}")
    assert second.rstrip() == f'ChatPShard(workers=["{address}"])  # and the address of stage 0'


@posix_only
def test_the_first_signal_ends_an_idle_worker_and_drains_a_busy_one(bundle: Path) -> None:
    with started(bundle, "--stage", "0", "--stage", "1") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert wait(process) == 0
    with started(bundle, "--stage", "0", "--stage", "1") as (process, ready):
        talk = Talk(ready)
        with talk.hub:
            talk.open()
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            token = talk.step(1, 0, [3, 5, 7], SliceKind.PREFILL)  # what is open goes on
            assert talk.step(2, 3, [token], SliceKind.ROWS) >= 0
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert wait(process) == 1


@posix_only
def test_a_signal_while_loading_ends_it_at_once(bundle: Path) -> None:
    with subprocess.Popen([*COMMAND, str(bundle), "--stage", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) in (0, -signal.SIGTERM)  # before our handler is in place it is the system's


def test_a_taken_port_is_refused_before_anything_is_loaded(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        event, error = refused(bundle, "--stage", "0", "--listen", f"tcp://127.0.0.1:{port}")
    assert event["code"] == "address-in-use"
    assert f"127.0.0.1:{port}" in error
    if sys.platform == "linux":
        assert f"process {os.getpid()}" in error


def test_a_damaged_shard_is_named_with_both_hashes(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    path = copy / "stage-1" / "openvino_model.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    event, error = refused(copy, "--stage", "1")
    expected = next(file for file in load_manifest(bundle).stages[1].files if file.path.endswith(".bin"))
    assert event["code"] == "bundle"
    assert expected.sha256 in error
    assert len([word for word in error.replace(",", " ").replace(":", " ").split() if len(word) == 64]) == 2
    path.unlink()
    assert "is missing from the bundle" in refused(copy, "--stage", "1")[1]
    with started(copy, "--stage", "0", "--exit-with-parent") as (_, ready):  # the other stage is whole
        assert ready["event"] == "ready"


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        (["--stage", "2"], "invalid-option", "--stage 2 is not in this bundle"),
        (["--stage", "-1"], "invalid-option", "valid: 0 to 1"),
        (["--stage", "0", "--stage", "0"], "invalid-option", "--stage 0 is given twice"),
        (["--stage", "0", "--listen", "tcp://0.0.0.0:0"], "invalid-option", "add --insecure"),
        (["--stage", "0", "--listen", "nowhere"], "invalid-option", "tcp://host:port"),
    ],
)
def test_options_that_cannot_be_are_refused(bundle: Path, options: list[str], code: str, part: str) -> None:
    event, error = refused(bundle, *options)
    assert event["code"] == code
    assert part in error


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--prefix-cache", "--kv-precision", "u8"], "u8 keys of a block share scales"),
        (["--prefix-cache", "--runner", "stateful"], "depends on chunks under fast"),
        (["--prefix-cache"], None),
        (["--kv-precision", "u8"], None),
    ],
)
def test_sharing_that_is_not_exact_is_said_before_anything_else(bundle: Path, options: list[str], why: str | None) -> None:
    command = [*COMMAND, str(bundle), "--log-format", "json", "--stage", "9", *options]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    logs = [json.loads(line)["message"] for line in done.stderr.splitlines() if line.startswith("{")]
    warnings = [message for message in logs if message.startswith("--prefix-cache is not exact here")]
    assert len(warnings) == (why is not None)
    assert all(why in warning for warning in warnings if why)


def test_no_bundle_is_refused(tmp_path: Path) -> None:
    event, error = refused(tmp_path / "nowhere", "--stage", "0")
    assert event["code"] == "bundle"
    assert "no such folder" in error


def test_a_wrong_command_line_is_a_usage_error(bundle: Path) -> None:
    for options in (["--stage", "0", "--frobnicate"], [], ["--stage", "0", "--kv-memory", "lots"]):
        done = subprocess.run([*COMMAND, str(bundle), *options], capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
        assert done.returncode == 2


_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "workers", *sys.argv[1:]], stdin=subprocess.PIPE)
time.sleep(600)
"""


def test_a_worker_ends_when_its_parent_is_killed(bundle: Path) -> None:
    options = [str(bundle), "--stage", "0", "--log-format", "json", "--exit-with-parent"]
    with subprocess.Popen([sys.executable, "-c", _PARENT, *options], stdout=subprocess.PIPE, text=True, encoding="utf-8") as parent:
        assert parent.stdout is not None
        worker = psutil.Process(json.loads(parent.stdout.readline())["pid"])
        parent.kill()
        assert psutil.wait_procs([worker], timeout=10)[1] == []


def test_an_idle_worker_costs_nothing(bundle: Path) -> None:
    with started(bundle, "--stage", "0", "--stage", "1") as (process, ready):
        talk = Talk(ready)
        with talk.hub:
            talk.open()
            talk.generate([5, 6, 7], 8)  # after which it has waited awake for long enough
            worker = psutil.Process(process.pid)
            before, began = worker.cpu_times(), time.monotonic()
            time.sleep(3)
            after, elapsed = worker.cpu_times(), time.monotonic() - began
            used = after.user + after.system - before.user - before.system
            assert used / elapsed < 0.02
