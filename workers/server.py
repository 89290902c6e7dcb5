"""The loop of a worker: receive, decide, run, send. One thread; it owns the hub and the engines.

What to do is decided in `worker`, without any of these; here it is carried out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
import psutil

from langchain_pshard.core.errors import BundleError, CapacityError, InferenceError, PShardError, StateLostError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.messages import FETCH_CHUNK_BYTES, Fetched, Message, Refused, SliceResult, Status
from langchain_pshard.core.roles import EngineStatus, StageStatus
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived, Event, Hub, Lost
from workers.cadence import Cadence
from workers.draft import Drafts
from workers.instructions import (
    CloseDraft,
    CloseStream,
    Dial,
    Forward,
    HangUp,
    Instruction,
    OpenDraft,
    OpenStream,
    Reply,
    ReplyPiece,
    ReplyStatus,
    Run,
    RunDraft,
)
from workers.runners.boundary import Float32s, check_finite
from workers.runners.runner import NO_TOKENS, Logits, Runner, RunSlice, StreamKey, TokenArray
from workers.stage import Stage
from workers.worker import Worker

IDLE_POLL_S = 1.0
"""Longest wait for a message: leases and joins are looked after this often."""
DRAIN_S = 30.0
"""How long open streams may go on after the worker was told to stop."""
_MAX_POLLS = 8  # before each inference: lets waiting steps merge, and a flood cannot starve the engine

logger = logging.getLogger("pshard.worker")


_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))  # Windows has only the latter


class Sampler(Protocol):
    """What the last stage needs besides its runner; `head.Head` is the real one."""

    def open(self, key: StreamKey, params: SamplingParams, prompt: TokenArray, grammar: Grammar | None = None) -> None:
        """Raises PShardError when it cannot: then the stream is not open."""

    def close_stream(self, key: StreamKey) -> None: ...

    def sample(self, logits: Logits, slices: Sequence[RunSlice]) -> list[SliceResult]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngine:
    """What computes the draft model's guesses."""

    runner: Runner
    sampler: Sampler


class Server:
    """Serves until told to stop. `drain` and `stop` may be called from any thread, the rest from one.

    Args:
        hub: listening already; closed by whoever made it.
        runners: one engine for each stage of `worker`.
        sampler: needed exactly when the last stage is among them.
        bundle: folder that the tokenizer files are read from.
        draft: needed exactly when `worker` drafts.
        busy_poll_s: longest pause between inferences that is spent awake; 0 to sleep in every one.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        hub: Hub,
        worker: Worker,
        runners: Mapping[int, Runner],
        sampler: Sampler,
        bundle: Path,
        draft: DraftEngine | None = None,
        busy_poll_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._worker = worker
        self._runners = runners
        self._sampler = sampler
        self._bundle = bundle
        self._draft = draft
        self._cadence = Cadence(busy_poll_s)
        self._clock = clock
        self._started_s = clock()
        self._looked_s = clock()
        self._drain_until_s: float | None = None
        self._is_drain_wanted = False
        self._is_stopped = False

    def serve(self) -> None:
        """Receive, decide, run and send until `stop`, or until `drain` has let the open streams finish."""
        while not self._is_done():
            for event in self._receive():
                self._carry_out(self._decide(event))
            self._look_at_clock()
            self._carry_out(self._worker.next_run())

    def drain(self) -> None:
        """Admit nothing more, let open streams finish for at most `DRAIN_S`, then end `serve`."""
        self._is_drain_wanted = True
        self._hub.wake()

    def stop(self) -> None:
        """End `serve` after the inference that is running."""
        self._is_stopped = True
        self._hub.wake()

    def _is_done(self) -> bool:
        if self._is_drain_wanted and self._drain_until_s is None:
            self._worker.drain()
            self._drain_until_s = self._clock() + DRAIN_S
            logger.info("draining: %d streams are open", self._worker.num_streams)
        if self._is_stopped or self._drain_until_s is None:
            return self._is_stopped
        return not self._worker.num_streams or self._clock() >= self._drain_until_s

    # --- receive, decide ---------------------------------------------------------------------------------------------

    def _receive(self) -> Iterable[Event]:
        is_awake = self._cadence.stays_awake(self._clock())
        timeout_s = 0.0 if self._worker.has_work or is_awake else IDLE_POLL_S
        for _ in range(_MAX_POLLS):
            events = self._hub.poll(timeout_s)
            yield from events
            if not events or not self._worker.expects_more:
                break
            timeout_s = 0.0
        if is_awake and not self._worker.has_work:
            _give_way()  # to whoever shares this core: a client, another worker

    def _decide(self, event: Event) -> list[Instruction]:
        match event:
            case Arrived():
                return self._worker.received(event, self._clock())
            case Lost(link=link):
                # The link is being dialled again, and clients watch every worker themselves.
                logger.warning("lost the connection to the next worker at %s", self._worker.address_of(link))
                return self._worker.lost(link)

    def _look_at_clock(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s >= IDLE_POLL_S:
            self._looked_s = now_s
            self._carry_out(self._worker.time_passed(now_s))

    # --- run, send ---------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        unsent: list[Forward] = []
        for instruction in instructions:
            match instruction:
                case Reply(link=link, message=message, tensor=tensor):
                    self._hub.send(link, message, tensor)
                case Forward(link=link, message=message, hidden=hidden):
                    if not self._hub.send(link, message, hidden):
                        unsent.append(instruction)
                case Run():
                    self._carry_out(self._run(instruction))
                case RunDraft(run=run):
                    self._carry_out(self._guess(run))
                case OpenDraft(key=key):
                    self._carry_out(self._drafts.opened(key, self._open_draft(instruction), self._clock()))
                case CloseDraft(key=key):
                    draft = self._draft_engine()
                    draft.runner.close_stream(key)
                    draft.sampler.close_stream(key)
                case OpenStream():
                    self._carry_out(self._worker.opened(instruction.key, self._open(instruction)))
                case CloseStream(stage_idx=stage_idx, key=key):
                    self._runners[stage_idx].close_stream(key)
                    if self._worker.stage(stage_idx).shape.is_last:
                        self._sampler.close_stream(key)
                case Dial(address=address):
                    self._carry_out(self._worker.dialled(address, self._hub.dial(address), self._clock()))
                case HangUp(link=link):
                    self._hub.hang_up(link)
                case ReplyPiece():
                    self._hub.send(instruction.link, self._read_piece(instruction))
                case ReplyStatus(link=link):
                    self._hub.send(link, self._status(instruction))
        for forward in unsent:  # after the results that came with them: a step's tokens count also when the next one fails
            self._carry_out(self._worker.not_sent(forward))

    def _run(self, run: Run) -> list[Instruction]:
        slices = run.slices
        results: list[SliceResult] | None = None
        started_s = self._clock()
        try:
            output = self._runners[run.stage_idx].run(slices, run.hidden)
            if self._worker.stage(run.stage_idx).shape.is_last:
                results = self._sampler.sample(cast(Logits, output), slices)
            elif output.dtype == np.float32:
                check_finite(cast(Float32s, output), slices)
        except (InferenceError, CapacityError, StateLostError) as error:
            logger.error("stage %d failed on %d steps: %s", run.stage_idx, len(run.steps), error)
            return self._worker.failed(run, error)
        ended_s = self._clock()
        self._cadence.ran(started_s, ended_s)
        if results is None:
            return self._worker.computed(run, output, started_s=started_s, ended_s=ended_s)
        return self._worker.sampled(run, results, output, started_s=started_s, ended_s=ended_s)

    def _open(self, wanted: OpenStream) -> int | PShardError:
        is_last = self._worker.stage(wanted.stage_idx).shape.is_last
        prompt = np.frombuffer(wanted.prompt, dtype="<i4")
        try:
            if is_last:  # before KV is set aside: a grammar may be refused
                self._sampler.open(wanted.key, wanted.sampling, prompt, wanted.grammar)
            runner = self._runners[wanted.stage_idx]
            return runner.open(wanted.key, wanted.num_tokens, prompt, shares_generated=wanted.shares_generated)
        except PShardError as error:
            if is_last:
                self._sampler.close_stream(wanted.key)
            return error

    @property
    def _drafts(self) -> Drafts:
        assert self._worker.drafts is not None  # nobody else asks for the draft's engine
        return self._worker.drafts

    def _draft_engine(self) -> DraftEngine:
        assert self._draft is not None  # whoever makes a worker that drafts gives it the engine
        return self._draft

    def _guess(self, run: Run) -> list[Instruction]:
        draft = self._draft_engine()
        started_s = self._clock()
        try:
            slices = run.slices
            results = draft.sampler.sample(cast(Logits, draft.runner.run(slices, None)), slices)
        except (InferenceError, CapacityError, StateLostError) as error:
            logger.error("the draft failed on %d steps: %s", len(run.steps), error)
            return self._drafts.failed(run, error)
        ended_s = self._clock()
        self._cadence.ran(started_s, ended_s)
        return self._drafts.sampled(run, results, started_s=started_s, ended_s=ended_s)

    def _open_draft(self, wanted: OpenDraft) -> int | PShardError:
        draft = self._draft_engine()
        try:
            num_cached = draft.runner.open(wanted.key, wanted.num_tokens, np.frombuffer(wanted.prompt, dtype="<i4"))
        except PShardError as error:
            return error
        draft.sampler.open(wanted.key, SamplingParams(), NO_TOKENS)  # the most likely token: it is right more often than any draw
        return num_cached

    def _read_piece(self, piece: ReplyPiece) -> Message:
        path = self._bundle / piece.file.path
        try:
            with path.open("rb") as file:
                file.seek(piece.offset)
                data = file.read(FETCH_CHUNK_BYTES)
        except OSError as error:
            text = f"the worker cannot read {piece.file.path} of its bundle: {error.strerror}"
            return Refused(request=piece.request, code=BundleError.code, message=text)
        return Fetched(request=piece.request, num_bytes=piece.file.num_bytes, data=data)

    def _status(self, ask: ReplyStatus) -> Status:
        return Status(
            request=ask.request,
            worker=self._worker.id,
            uptime_s=self._clock() - self._started_s,
            rss_bytes=psutil.Process().memory_info().rss,
            num_clients=self._worker.num_clients,
            num_malformed=self._hub.num_malformed + self._worker.num_malformed,
            stages=tuple(_stage_status(idx, _figures(self._worker.stage(idx), runner)) for idx, runner in self._runners.items()),
            draft=self._draft_status(),
        )

    def _draft_status(self) -> EngineStatus | None:
        return None if self._worker.drafts is None else _figures(self._worker.drafts.stage, self._draft_engine().runner)


def _figures(stage: Stage, runner: Runner) -> EngineStatus:
    return EngineStatus(
        num_streams=stage.num_streams,
        kv_used_tokens=runner.kv_used_tokens,
        kv_capacity_tokens=runner.kv_capacity_tokens,
        num_steps=stage.num_steps,
        num_tokens=stage.num_tokens,
        compute_ms=1e3 * stage.compute_s,
    )


def _stage_status(stage_idx: int, figures: EngineStatus) -> StageStatus:
    return StageStatus(stage_idx=stage_idx, **msgspec.structs.asdict(figures))
