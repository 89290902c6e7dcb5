"""Everything a client believes about its fleet and its streams, and what follows from each event. Pure: commands, messages and time in,
instructions out; no sockets, clocks or threads. `reactor` is the thin loop around it.

Life of a stream: waiting -> opening (admission) -> running -> ended, by its last token, an error, or because its caller left.

Invariants:
- every submitted stream gets exactly one end (a finish reason or an error), unless its caller cancelled it;
- results of older epochs change nothing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import (
    CapacityError,
    ClosedError,
    DeadlineError,
    PShardError,
    StateLostError,
    WorkerLostError,
    error_from_code,
)
from langchain_pshard.core.messages import (
    MAX_END_TOKENS,
    ClientId,
    Close,
    Drafted,
    Fetched,
    Joined,
    Message,
    MicroBatch,
    Open,
    Opened,
    Refused,
    RequestId,
    SliceResult,
    Status,
    Step,
    StepFailed,
    StepResult,
    StreamId,
)
from langchain_pshard.pipeline.admission import Admission
from langchain_pshard.pipeline.chain import Chain
from langchain_pshard.pipeline.instructions import Deliver, Instruction, Send
from langchain_pshard.pipeline.membership import Membership, Phase
from langchain_pshard.pipeline.model_drafts import ModelDrafts
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.requests import ReplySink, Requests
from langchain_pshard.pipeline.stream import Stream, StreamRequest, logits_by_stream
from langchain_pshard.pipeline.turns import Turns

MAX_REJOINS = 2
"""How often in a row waiting streams survive that a worker is lost or has forgotten this client, before they end with the error."""
ACTIVE_TICK_S = 0.05
IDLE_TICK_S = 0.5


class Session:
    """One client's whole state. Each method returns what is to be done now, in order."""

    def __init__(
        self,
        client: ClientId,
        addresses: Sequence[str],
        *,
        software: str,
        connect_timeout_s: float,
        options: ClientOptions,
        now: float,
        on_lost: Callable[[PShardError], object] | None = None,
    ) -> None:
        """`on_lost` hears of every chain that is given up, and why; whoever waits goes on waiting for the workers to come back."""
        self._client = client
        self._on_lost = on_lost
        self._addresses = tuple(addresses)
        self._options = options
        self._request_ids = itertools.count(1)
        self._membership = Membership(
            client,
            addresses,
            software=software,
            connect_timeout_s=connect_timeout_s,
            options=options,
            new_request=self._new_request,
            now=now,
        )
        self._admission = Admission()
        self._streams: dict[StreamId, Stream] = {}
        self._turns = Turns(max_draft_tokens=options.max_draft_tokens, max_chunk_tokens=options.max_chunk_tokens)
        self._drafts = ModelDrafts(client, max_draft_tokens=options.max_draft_tokens, lost_after_s=options.step_timeout_s)
        self._turns_epoch = self._membership.epoch
        self._opens: dict[RequestId, StreamId] = {}
        self._requests = Requests()
        self._connecting: list[Callable[[Chain | PShardError], object]] = []
        self._num_rejoins = 0

    @property
    def chain(self) -> Chain | None:
        """The chain joined last."""
        return self._membership.chain

    @property
    def tick_interval_s(self) -> float:
        """How soon `tick` wants to be called again."""
        is_idle = self._membership.is_steady and not (self._streams or self._admission.num_waiting or self._requests)
        return IDLE_TICK_S if is_idle else ACTIVE_TICK_S

    # --- commands ----------------------------------------------------------------------------------------------------

    def connect(self, sink: Callable[[Chain | PShardError], object], now: float) -> list[Instruction]:
        """Tell `sink` the chain once it is joined, or why it cannot be."""
        self._connecting.append(sink)
        return self._settle(now)

    def submit(self, stream_id: StreamId, request: StreamRequest, now: float) -> list[Instruction]:
        """Begin a generation; ids count up in the order of the calls."""
        if self._admission.num_waiting >= self._options.max_waiting:
            error = CapacityError(
                f"{self._admission.num_waiting} generations already wait for KV room, the most this client allows: try again later"
                " or raise ClientOptions.max_waiting"
            )
            return [Deliver(request.sink, error)]
        self._admission.add(Stream(stream_id, request, now))
        return self._settle(now)

    def cancel(self, stream_id: StreamId, now: float) -> list[Instruction]:
        """Nobody waits for this stream any more: free what it holds everywhere. Unknown ones are ignored."""
        if self._streams.pop(stream_id, None) is None and self._admission.remove(stream_id) is None:
            return []
        self._admission.retry_now()
        return [*self._close([stream_id]), *self._settle(now)]

    def ask(
        self,
        address: str,
        build: Callable[[RequestId], Message],
        sink: ReplySink,
        timeout_s: float,
        now: float,
    ) -> list[Instruction]:
        """Send a control request and hand its reply, or the error, to `sink`."""
        request = self._new_request()
        self._requests.asked(request, address, sink, timeout_s, now)
        return [Send(address, build(request))]

    def close(self, error: PShardError | None = None) -> list[Instruction]:
        """End everything and say goodbye."""
        reason = ClosedError("the client was closed") if error is None else error
        return [*self._end_all(reason, with_waiting=True), *self._membership.leave()]

    # --- events ------------------------------------------------------------------------------------------------------

    def on_message(self, address: str, message: Message, now: float, tensor: Tensor | None = None) -> list[Instruction]:
        """A worker said something; `tensor` came beside the message."""
        out = self._membership.on_message(address, message, now)
        delivers: list[Instruction] = []
        match message:
            case StepResult(epoch=epoch) if epoch == self._membership.epoch:
                ended, delivers = self._on_result(message, tensor, now)
                out += ended
            case StepFailed(epoch=epoch) if epoch == self._membership.epoch:
                delivers = self._on_failed(address, message)
            case Drafted(epoch=epoch) if epoch == self._membership.epoch:
                out += self._drafts.on_drafted(message, now)
            case Opened():
                self._on_opened(message)
            case Joined(is_ring=False) if self._membership.is_steady and not self._membership.has_ring:
                for stream_id in self._turns.take_back():
                    self._streams[stream_id].take_back(now)
            case Refused(request=request):
                delivers = self._requests.answered(message, now)
                out += self._on_refused(address, request, message, now)
            case Fetched() | Status():
                delivers = self._requests.answered(message, now)
            case _:
                pass  # what only workers get, and what membership took
        # The next step goes out before callers hear of the last one: their work overlaps with the fleet's.
        return [*out, *self._settle(now), *delivers]

    def on_lost(self, address: str, now: float) -> list[Instruction]:
        """The connection to a worker broke."""
        return [*self._membership.on_lost(address, now), *self._settle(now)]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        out = self._membership.tick(now)
        out += self._requests.expired(now)
        out += self._drafts.expire(now)
        out += self._expire_streams(now)
        for opening in self._admission.repeats(now):
            out += [Send(address, self._open(opening.stream, request)) for request, address in opening.unanswered.items()]
        return [*out, *self._settle(now)]

    # --- what follows ------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Instruction]:
        """Do whatever the present state allows: report, connect, admit, send steps."""
        out: list[Instruction] = []
        if (failure := self._membership.failure) is not None:
            self._membership.failure = None
            out += self._end_all(failure, with_waiting=not self._can_rejoin(failure))
            if self._on_lost is not None:
                out.append(Deliver(self._on_lost, failure))
        if self._membership.phase is Phase.OFFLINE and (self._admission.num_waiting or self._connecting):
            out += self._membership.connect(now)
        if self._membership.phase is Phase.READY:
            out += [Deliver(sink, self._membership.chain) for sink in self._connecting]
            self._connecting = []
        if self._membership.is_steady:
            self._drafts.follow(self._membership.epoch, self._membership.draft, self._streams.values(), now)
            out += self._admit(now)
            out += self._drafts.ask(self._turns.step_ms, now)
            out += self._send_steps(now)
        return out

    def _can_rejoin(self, failure: PShardError) -> bool:
        """Whether waiting streams may simply go on waiting: they have nothing on the fleet to lose, and a worker that was restarted or has
        forgotten us knows us again after a join. One that stays away ends them when connecting anew has taken too long."""
        if not self._admission.num_waiting or not isinstance(failure, StateLostError | WorkerLostError):
            return False
        self._num_rejoins += 1
        return self._num_rejoins <= MAX_REJOINS

    def _admit(self, now: float) -> list[Instruction]:
        assert self.chain is not None
        out: list[Instruction] = []
        while (stream := self._admission.next_to_open(now)) is not None:
            requests = {self._new_request(): address for address in self.chain.addresses}
            self._opens |= dict.fromkeys(requests, stream.id)
            self._admission.started(stream, requests, now)
            out += [Send(address, self._open(stream, request)) for request, address in requests.items()]
        return out

    def _send_steps(self, now: float) -> list[Instruction]:
        assert self.chain is not None
        if self._turns_epoch != self._membership.epoch:
            self._turns_epoch = self._membership.epoch
            self._turns.reset(self.chain.route, max_steps_ahead=self._options.max_steps_ahead if self._membership.has_ring else 0)
        out: list[Instruction] = []
        while self._streams and (turn := self._turns.next_turn(self._streams, now)) is not None:
            out += self._end(turn.failed)
            if turn.slices:
                step = Step(client=self._client, epoch=self._membership.epoch, step_id=turn.step_id, slices=turn.slices)
                out.append(Send(self.chain.first.address, MicroBatch(stage_idx=0, steps=(step,))))
        return out

    def _on_result(self, message: StepResult, tensor: Tensor | None, now: float) -> tuple[list[Instruction], list[Instruction]]:
        landing = self._turns.landed(message.step_id, message.timings, now)
        if landing is None:
            return [], []  # a repeated answer
        results: dict[StreamId, SliceResult] = {result.stream: result for result in message.results}
        logits = logits_by_stream(message, tensor) if tensor is not None else {}
        delivers: list[Instruction] = []
        ended: list[tuple[Stream, PShardError | None]] = []
        for stream in [self._streams[stream_id] for stream_id in landing.streams]:
            result = results.get(stream.id)
            if result is None and stream.num_awaited:
                continue  # it failed on the way: its StepFailed comes over another link, or its step times out
            try:
                delivery = stream.apply(result, landing.trip, now, logits.get(stream.id))
            except PShardError as error:
                ended.append((stream, error))
                continue
            if delivery is not None:
                delivers.append(Deliver(stream.request.sink, delivery, stream.id))
                if delivery.finish_reason is not None:
                    ended.append((stream, None))
        return self._end(ended), delivers

    def _on_failed(self, address: str, message: StepFailed) -> list[Instruction]:
        """Streams named in it end, unless they have already."""
        ended: list[tuple[Stream, PShardError | None]] = []
        for failure in message.failures:
            stream = self._streams.get(failure.stream)
            if stream is not None:
                text = f"stage {message.stage_idx} at {address} failed a step: {failure.message}"
                ended.append((stream, error_from_code(failure.code, text)))
        return self._end(ended)

    def _on_opened(self, message: Opened) -> None:
        stream_id = self._opens.pop(message.request, None)
        if stream_id is None:
            return
        stream = self._admission.opened(stream_id, message.request, message.cached)
        if stream is not None:
            self._num_rejoins = 0
            self._streams[stream.id] = stream
            self._drafts.add(stream)

    def _on_refused(self, address: str, request: RequestId, message: Refused, now: float) -> list[Instruction]:
        stream_id = self._opens.pop(request, None)
        if stream_id is None or stream_id not in self._admission.opening:
            return []
        error = error_from_code(message.code, f"the worker at {address} refused: {message.message}")
        if isinstance(error, CapacityError | WorkerLostError):  # a worker that shuts down may come back
            self._admission.refused(stream_id, str(error), now)
            return self._close([stream_id])
        if isinstance(error, StateLostError):
            self._membership.drop(error)
            return []
        stream = self._admission.remove(stream_id)
        assert stream is not None
        return self._end([(stream, error)])

    # --- ends --------------------------------------------------------------------------------------------------------

    def _expire_streams(self, now: float) -> list[Instruction]:
        ended: list[tuple[Stream, PShardError | None]] = []
        num_stuck = 0
        for stream in [*self._streams.values(), *self._admission.waiting.values(), *(o.stream for o in self._admission.opening.values())]:
            if stream.deadline is not None and now >= stream.deadline:
                text = (
                    f"the generation took longer than timeout_s={stream.request.timeout_s:g} ({len(stream.tokens)} tokens were generated)"
                )
                ended.append((stream, DeadlineError(text)))
            elif stream.num_in_flight and now - stream.waiting_since >= self._options.step_timeout_s:
                text = f"a step brought no answer for {self._options.step_timeout_s:g} s, though all workers answer pings"
                ended.append((stream, DeadlineError(text)))
                num_stuck += 1
        if num_stuck and num_stuck == len(self._streams):
            # Every worker answers, and nothing comes through: a way between two of them is broken. To join anew is to look at them all.
            text = "no step comes through the chain, though all workers answer pings. The next call connects anew"
            self._membership.drop(WorkerLostError(text))
        if self._membership.phase is Phase.READY:
            done = {stream.id for stream, _ in ended}
            for stream in self._admission.overdue(now, self._options.queue_timeout_s):
                if stream.id not in done:
                    text = f"no KV room came free within {self._options.queue_timeout_s:g} s: {self._admission.refusal or 'no answer'}"
                    ended.append((stream, CapacityError(text)))
        for stream, _ in ended:
            self._admission.remove(stream.id)
        return self._end(ended)

    def _end(self, ended: Iterable[tuple[Stream, PShardError | None]]) -> list[Instruction]:
        """Free streams that are over; those with an error are told."""
        pairs = list(ended)
        for stream, _ in pairs:
            self._streams.pop(stream.id, None)
            self._admission.retry_now()
        told: list[Instruction] = [Deliver(stream.request.sink, error) for stream, error in pairs if error is not None]
        return [*self._close([stream.id for stream, _ in pairs]), *told]

    def _close(self, stream_ids: Sequence[StreamId]) -> list[Instruction]:
        """Tell the fleet, and take the streams out of every flight."""
        if not stream_ids:
            return []
        self._turns.forget(stream_ids)
        self._drafts.forget(stream_ids)
        self._opens = {request: stream for request, stream in self._opens.items() if stream not in stream_ids}
        message = Close(client=self._client, epoch=self._membership.epoch, streams=tuple(stream_ids))
        return [Send(address, message) for address in self._addresses]

    def _end_all(self, error: PShardError, *, with_waiting: bool) -> list[Instruction]:
        """The chain is gone: running streams end; waiting ones too, or go on waiting."""
        running = list(self._streams.values())
        if with_waiting:
            running += self._admission.clear()
        else:
            for stream_id in list(self._admission.opening):
                self._admission.put_back(stream_id)
        out = self._end((stream, copy.copy(error)) for stream in running)
        self._turns.clear()
        self._opens.clear()
        out += [Deliver(sink, copy.copy(error)) for sink in self._connecting if with_waiting]
        if with_waiting:
            self._connecting = []
        if isinstance(error, ClosedError):
            out += self._requests.end_all(error)
        return out

    def _open(self, stream: Stream, request: RequestId) -> Open:
        return Open(
            request=request,
            client=self._client,
            epoch=self._membership.epoch,
            stream=stream.id,
            num_tokens=stream.request.num_positions,
            sampling=stream.request.sampling,
            prompt=stream.shared_prompt,
            grammar=stream.request.grammar,
            shares_generated=stream.request.prefix_cache == "all",
            end_tokens=tuple(sorted(stream.request.eos_token_ids)[:MAX_END_TOKENS]),
        )

    def _new_request(self) -> RequestId:
        return RequestId(next(self._request_ids))
