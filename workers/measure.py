"""`pshard-worker measure`: what a plan needs to know of this machine, as its part of a fleet file."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import click
import psutil

from langchain_pshard.core.bundle import MachineSpeed, Manifest
from langchain_pshard.core.errors import InvalidOptionError, MissingExtraError, ProtocolError, PShardError, WorkerUnreachableError
from langchain_pshard.core.messages import PROTOCOL_VERSION, Fetch, Fetched, Hello, Message, Ping, Pong, Refused, RequestId, Welcome
from langchain_pshard.core.version import software_version
from langchain_pshard.core.yardstick import Yardstick, measure_speed
from langchain_pshard.transport.hub import Arrived, Hub
from langchain_pshard.transport.zeromq import ZmqHub

ANSWER_TIMEOUT_S = 10.0
_NUM_PINGS = 30
_NUM_PIECES = 32
_SMALLEST_PIECE_BYTES = 16 << 10  # below it a piece is all latency and tells nothing of the bandwidth

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What the way to another worker takes."""

    latency_ms: float
    """One way."""
    bandwidth_mbit: float | None
    """None: the peer has no file large enough to tell."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--name", help="Name of this node.  [default: the machine's]")
@click.option("--device", default="CPU", help="OpenVINO device.")
@click.option("--threads", type=click.IntRange(min=1), help="Inference threads, as the worker will have.  [default: the device's choice]")
@click.option("--to", metavar="ADDRESS", help="A running worker, such as tcp://10.0.0.5:7000: measures the network on the way there too.")
def measure(*, name: str | None, device: str, threads: int | None, to: str | None) -> None:
    """Print this machine's part of a fleet file for `pshard-export plan`; takes a few seconds.

    Measure while the machine does what it usually does beside serving: the memory that is free now is what the plan counts on.
    """
    try:
        ov = _openvino()
        _check_device(ov, device)
        link = None
        if to is not None:
            with ZmqHub() as hub:
                link = measure_link(hub, to)
        speed = measure_speed(Yardstick(ov, device=device, threads=threads))
    except PShardError as error:
        click.echo("error: " + " ".join(str(error).split()), err=True)
        sys.exit(1)
    memory_bytes = _memory_bytes(ov, device)
    click.echo(node_table(name or socket.gethostname(), device, threads or os.cpu_count() or 1, memory_bytes, speed, link))


def node_table(name: str, device: str, cores: int, memory_bytes: int, speed: MachineSpeed, link: LinkFigures | None) -> str:
    """One `[[nodes]]` table of a fleet file. Pure."""
    lines = [
        "[[nodes]]",
        f"name = {json.dumps(name)}",  # a TOML basic string has JSON's escapes
        f"memory_gib = {memory_bytes / 2**30:.2f}",
        f"decode_speed = {speed.decode:g}",
        f"prefill_speed = {speed.prefill:g}",
        f"device = {json.dumps(device)}",
        f"cores = {cores}",
    ]
    if link is None:
        return "\n".join([*lines, "# latency_ms and bandwidth_mbit: measure them with --to ADDRESS of a running worker"])
    lines.append(f"latency_ms = {link.latency_ms:.3f}")
    if link.bandwidth_mbit is None:
        return "\n".join([*lines, "# bandwidth_mbit: that worker's files are too small to tell"])
    return "\n".join([*lines, f"bandwidth_mbit = {link.bandwidth_mbit:.0f}"])


def measure_link(hub: Hub, address: str) -> LinkFigures:
    """Latency by pings that the peer's inference loop answers, bandwidth by fetching pieces of its largest tokenizer file.

    Raises:
        WorkerUnreachableError: nobody answers there.
        ProtocolError: the peer speaks another protocol, or answers something else.
    """
    peer = _Peer(hub, address)
    welcome = peer.ask(Hello(request=peer.next_request(), protocol=PROTOCOL_VERSION, software=software_version()), Welcome)
    round_trip_s = min(peer.timed(Ping(request=peer.next_request()), Pong)[0] for _ in range(_NUM_PINGS))
    manifest = Manifest.from_json(peer.whole(welcome.fingerprint), origin=f"the manifest of {address}")
    largest = max(manifest.tokenizer_files, key=lambda file: file.num_bytes, default=None)
    latency_ms = 1e3 * round_trip_s / 2
    if largest is None or largest.num_bytes < _SMALLEST_PIECE_BYTES:
        return LinkFigures(latency_ms=latency_ms, bandwidth_mbit=None)
    pieces = [peer.timed(Fetch(request=peer.next_request(), sha256=largest.sha256, offset=0), Fetched) for _ in range(_NUM_PIECES)]
    quickest_s, piece = min(pieces, key=lambda timed: timed[0])
    on_the_way_s = max(quickest_s - round_trip_s, 1e-6)
    return LinkFigures(latency_ms=latency_ms, bandwidth_mbit=8 * len(piece.data) / on_the_way_s / 1e6)


class _Peer:
    """A worker that is asked one thing after another."""

    def __init__(self, hub: Hub, address: str) -> None:
        self._hub = hub
        self._address = address
        self._link = hub.dial(address)
        self._requests = itertools.count(1)

    def next_request(self) -> RequestId:
        return RequestId(next(self._requests))

    def ask(self, question: Hello | Ping | Fetch, kind: type[M]) -> M:
        """The answer of type `kind` to `question`."""
        return self.timed(question, kind)[1]

    def timed(self, question: Hello | Ping | Fetch, kind: type[M]) -> tuple[float, M]:
        """Seconds to the answer, and the answer."""
        started_s = time.perf_counter()
        self._hub.send(self._link, question)
        deadline_s = started_s + ANSWER_TIMEOUT_S
        while (left_s := deadline_s - time.perf_counter()) > 0:
            for event in self._hub.poll(left_s):
                if not isinstance(event, Arrived):
                    continue
                answer: Any = event.message
                if isinstance(answer, Refused):
                    raise ProtocolError(f"the worker at {self._address} refused: {answer.message}")
                if isinstance(answer, kind) and getattr(answer, "request", None) == question.request:
                    return time.perf_counter() - started_s, answer
        raise WorkerUnreachableError(
            f"no worker answered at {self._address} within {ANSWER_TIMEOUT_S:.0f} s: start one there, or check address and firewall",
            addresses=(self._address,),
        )

    def whole(self, sha256: str) -> bytes:
        """All of a file of the peer's."""
        data = b""
        while True:
            piece = self.ask(Fetch(request=self.next_request(), sha256=sha256, offset=len(data)), Fetched)
            data += piece.data
            if len(data) >= piece.num_bytes:
                return data
            if not piece.data:
                raise ProtocolError(f"the worker at {self._address} sent {len(data)} of {piece.num_bytes} bytes and no more")


def _openvino() -> ModuleType:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtraError("pshard-worker measure", "worker") from error
    found: ModuleType = openvino
    return found


def _check_device(ov: ModuleType, device: str) -> None:
    available = ov.Core().available_devices
    if device not in available and device not in {name.split(".")[0] for name in available}:
        raise InvalidOptionError(f"device {device!r} does not exist on this machine; available: {', '.join(available)}")


def _memory_bytes(ov: ModuleType, device: str) -> int:
    """Memory for weights and KV: what a GPU has, else what is available to new programs."""
    core = ov.Core()
    if device.startswith("GPU"):
        return int(core.get_property(device, "GPU_DEVICE_TOTAL_MEM_SIZE"))
    return int(psutil.virtual_memory().available)
