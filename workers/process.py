"""One worker process, from options to exit: bind, verify, load, serve.

Binding comes first: a port that is taken is found in a second, not after the weights were loaded.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from langchain_pshard.core.bundle import Manifest, load_manifest, verify_files
from langchain_pshard.core.errors import AddressInUseError, InvalidOptionError
from langchain_pshard.core.messages import StageOffer, WorkerId
from langchain_pshard.core.version import software_version
from langchain_pshard.transport.address import Address
from langchain_pshard.transport.hub import Hub
from langchain_pshard.transport.zeromq import ZmqHub
from workers.grammar import GrammarCompiler
from workers.head import Head
from workers.report import Report
from workers.runners.runner import Runner
from workers.server import Server
from workers.shard import Settings, make_runner
from workers.stopping import StopSwitch
from workers.worker import Identity, Worker

logger = logging.getLogger("pshard.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a worker is started with."""

    bundle: Path
    stages: tuple[int, ...]
    listen: str
    settings: Settings
    is_insecure: bool = False
    exits_with_parent: bool = False


def serve(options: Options, report: Report) -> None:
    """Serve until told to stop. Runs in the main thread, whose signals it takes over.

    Raises:
        PShardError: the options contradict the bundle or the machine, or the address is taken.
    """
    with StopSwitch() as switch, ZmqHub() as hub, contextlib.ExitStack() as stack:
        if options.exits_with_parent:
            switch.watch_parent()
        _check_exposure(options, report)
        manifest = load_manifest(options.bundle)
        stages = check_stages(options.stages, manifest)
        address = listen(hub, options.listen)
        _verify(options.bundle, manifest, stages, report)
        # Read beside the weights: it takes seconds of its own.
        grammars = GrammarCompiler.of_bundle(options.bundle, manifest) if manifest.num_stages - 1 in stages else None
        runners: dict[int, Runner] = {}
        for stage_idx in stages:
            with report.busy(f"loading stage {stage_idx}"):
                runners[stage_idx] = make_runner(options.bundle, manifest, stage_idx, options.settings)
            stack.callback(runners[stage_idx].close)
        if grammars is not None:
            grammars.wait()
        identity = identify(manifest, runners)
        server = Server(hub=hub, worker=Worker(identity), runners=runners, sampler=Head(grammars), bundle=options.bundle)
        switch.attach(server)
        report.ready(identity, address)
        server.serve()


def check_stages(stages: tuple[int, ...], manifest: Manifest) -> tuple[int, ...]:
    """The stages to serve, in order.

    Raises:
        InvalidOptionError: one does not exist, or is named twice.
    """
    outside = sorted({stage_idx for stage_idx in stages if not 0 <= stage_idx < manifest.num_stages})
    if outside:
        raise InvalidOptionError(
            f"--stage {outside[0]} is not in this bundle of {manifest.model_name}; valid: 0 to {manifest.num_stages - 1}"
        )
    doubled = [stage_idx for stage_idx, times in Counter(stages).items() if times > 1]
    if doubled:
        raise InvalidOptionError(f"--stage {doubled[0]} is given twice; name each stage once")
    return tuple(sorted(stages))


def _check_exposure(options: Options, report: Report) -> None:
    address = Address.parse(options.listen)
    if address.is_loopback:
        return
    meaning = (
        f"at {address} everyone who can reach this machine can use the model, read what others ask it and what it answers, and keep it"
        " busy: nothing is encrypted and nobody is asked who they are"
    )
    if not options.is_insecure:
        raise InvalidOptionError(f"{meaning}. Listen on tcp://127.0.0.1:0, or add --insecure on a network you trust")
    report.warn(f"--insecure: {meaning}")


def listen(hub: Hub, address: str) -> str:
    """Bind, and name the process that has the port when it is taken.

    Raises:
        AddressInUseError: the address is taken or does not belong to this machine.
    """
    try:
        return hub.listen(address)
    except AddressInUseError as error:
        holder = _holder(Address.parse(address).port)
        if holder is None:
            raise
        raise AddressInUseError(f"{error} (the port is held by {holder})") from error


def _holder(port: int) -> str | None:
    """The process that listens on `port`, when the system lets us know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid}, {psutil.Process(connection.pid).name()}"
    return None


def _verify(bundle: Path, manifest: Manifest, stages: tuple[int, ...], report: Report) -> None:
    # The tokenizer's files are checked by the clients that fetch them, by the hash they ask for; the last stage reads one itself.
    is_last = manifest.num_stages - 1 in stages
    own = tuple(file for file in manifest.tokenizer_files if is_last and file.path.endswith("/tokenizer.json"))
    files = own + tuple(file for stage_idx in stages for file in manifest.stages[stage_idx].files)
    with report.progress("verifying", sum(file.num_bytes for file in files)) as progress:
        verify_files(bundle, files, lambda num_bytes: progress.advance(progress.task_ids[0], num_bytes))


def identify(manifest: Manifest, runners: dict[int, Runner]) -> Identity:
    """What the worker says about itself, now that its engines are warm."""
    offers = tuple(
        StageOffer(
            stage_idx=stage_idx,
            num_stages=manifest.num_stages,
            span=manifest.stages[stage_idx].span,
            num_bytes=manifest.stages[stage_idx].num_bytes,
            kv_capacity_tokens=runner.kv_capacity_tokens,
            is_resumable=runner.is_rewind_exact,
            kv_stream_tokens=runner.kv_stream_tokens,
        )
        for stage_idx, runner in runners.items()
    )
    return Identity(
        worker=WorkerId(secrets.token_hex(8)),
        software=software_version(),
        manifest=manifest,
        numerics=next(iter(runners.values())).numerics,
        offers=offers,
    )
