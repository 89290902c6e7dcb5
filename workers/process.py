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

from langchain_pshard.core.bundle import DraftEntry, Manifest, load_manifest, verify_files
from langchain_pshard.core.errors import AddressInUseError, InvalidOptionError
from langchain_pshard.core.messages import WorkerId
from langchain_pshard.core.roles import DraftOffer, StageOffer
from langchain_pshard.core.version import software_version
from langchain_pshard.transport.address import Address
from langchain_pshard.transport.hub import Hub
from langchain_pshard.transport.zeromq import ZmqHub
from workers.grammar import GrammarCompiler
from workers.head import Head
from workers.huge_pages import move_to_huge_pages
from workers.report import Report
from workers.runners.runner import Runner
from workers.server import DraftEngine, Server
from workers.shard import Settings, make_draft_runner, make_runner
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
    drafts: bool = False
    """Whether it serves the bundle's draft model too, or alone when there are no stages."""
    is_insecure: bool = False
    allows_logits: bool = False
    """Clients may ask for whole logits, to compare them with others'."""
    exits_with_parent: bool = False
    uses_huge_pages: bool = True
    """Move the weights to huge pages, where the system offers them."""
    busy_poll_s: float = 0.0
    """Longest pause between inferences that is spent awake; 0 to sleep in every one."""


def serve(options: Options, report: Report) -> None:
    """Serve until told to stop. Runs in the main thread, whose signals it takes over.

    Raises:
        PShardError: the options contradict the bundle or the machine, or the address is taken.
    """
    with StopSwitch() as switch, ZmqHub() as hub, contextlib.ExitStack() as stack:
        if options.exits_with_parent:
            switch.watch_parent()
        _check_exposure(options, report)
        _warn_of_sharing(options.settings, report)
        manifest = load_manifest(options.bundle)
        stages = check_stages(options.stages, manifest)
        draft = check_draft(manifest, options.bundle) if options.drafts else None
        assert stages or draft is not None, "a worker serves something"
        address = listen(hub, options.listen)
        _verify(options.bundle, manifest, stages, draft, report)
        # Read beside the weights: it takes seconds of its own.
        grammars = GrammarCompiler.of_bundle(options.bundle, manifest) if manifest.num_stages - 1 in stages else None
        runners: dict[int, Runner] = {}
        for stage_idx in stages:
            with report.busy(f"loading stage {stage_idx}"):
                runners[stage_idx] = make_runner(options.bundle, manifest, stage_idx, options.settings)
            stack.callback(runners[stage_idx].close)
        engine = None
        if draft is not None:
            with report.busy("loading the draft"):
                engine = DraftEngine(runner=make_draft_runner(options.bundle, draft, options.settings), sampler=Head())
            stack.callback(engine.runner.close)
        if options.uses_huge_pages:
            with report.busy("moving to huge pages"):
                move_to_huge_pages()
        if grammars is not None:
            grammars.wait()
        identity = identify(manifest, runners, engine.runner if engine else None, allows_logits=options.allows_logits)
        worker = Worker(identity)
        server = Server(
            hub=hub,
            worker=worker,
            runners=runners,
            sampler=Head(grammars),
            bundle=options.bundle,
            draft=engine,
            busy_poll_s=options.busy_poll_s,
        )
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


def check_draft(manifest: Manifest, bundle: Path) -> DraftEntry:
    """The bundle's draft model.

    Raises:
        InvalidOptionError: it has none.
    """
    if manifest.draft is None:
        raise InvalidOptionError(
            f"--draft: {bundle} holds no draft of {manifest.model_name}; export it again with pshard-export --draft MODEL, or leave it out"
        )
    return manifest.draft


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


def _warn_of_sharing(settings: Settings, report: Report) -> None:
    if settings.has_prefix_cache and not settings.is_sharing_exact:
        why = (
            "u8 keys of a block share scales" if settings.kv_precision == "u8" else "the stateful runner's KV depends on chunks under fast"
        )
        report.warn(f"--prefix-cache is not exact here, as {why}: a prompt that others shared may get another text than one computed anew")


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


def _verify(bundle: Path, manifest: Manifest, stages: tuple[int, ...], draft: DraftEntry | None, report: Report) -> None:
    # The tokenizer's files are checked by the clients that fetch them, by the hash they ask for; the last stage reads one itself.
    is_last = manifest.num_stages - 1 in stages
    own = tuple(file for file in manifest.tokenizer_files if is_last and file.path.endswith("/tokenizer.json"))
    files = own + tuple(file for stage_idx in stages for file in manifest.stages[stage_idx].files)
    files += draft.files if draft is not None else ()
    with report.progress("verifying", sum(file.num_bytes for file in files)) as progress:
        verify_files(bundle, files, lambda num_bytes: progress.advance(progress.task_ids[0], num_bytes))


def identify(
    manifest: Manifest, runners: dict[int, Runner], draft_runner: Runner | None = None, *, allows_logits: bool = False
) -> Identity:
    """What the worker says about itself, now that its engines are warm; `draft_runner` where it drafts."""
    offers = tuple(
        StageOffer(
            stage_idx=stage_idx,
            num_stages=manifest.num_stages,
            span=manifest.stages[stage_idx].span,
            num_bytes=manifest.stages[stage_idx].num_bytes,
            kv_capacity_tokens=runner.kv_capacity_tokens,
            is_resumable=runner.is_rewind_exact,
            allows_logits=allows_logits and stage_idx == manifest.num_stages - 1,
            kv_stream_tokens=runner.kv_stream_tokens,
        )
        for stage_idx, runner in runners.items()
    )
    return Identity(
        worker=WorkerId(secrets.token_hex(8)),
        software=software_version(),
        manifest=manifest,
        numerics=next(runner for runner in (*runners.values(), draft_runner) if runner is not None).numerics,
        offers=offers,
        draft=None if manifest.draft is None or draft_runner is None else _draft_offer(manifest.draft, draft_runner),
    )


def _draft_offer(draft: DraftEntry, runner: Runner) -> DraftOffer:
    return DraftOffer(
        model_name=draft.model_name,
        num_bytes=draft.num_bytes,
        kv_capacity_tokens=runner.kv_capacity_tokens,
        context_length=draft.context_length,
    )
