"""The steps of a client: which go out next, which are under way, and what they cost. Pure.

`scheduler` says which streams form a micro-batch and `adaptive_k` how many drafts ride; here their choices become slices, and every answer
teaches `StepCosts` what the next choice costs.

A turn with steps ahead comes back once for each of them: every answer but the last puts the next flight in the place of its own.

Invariant: a flight ends when each of its slices was answered, failed, or belongs to a stream that ended: nothing leaks in-flight turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from langchain_pshard.core.errors import PShardError
from langchain_pshard.core.messages import Slice, StageTiming, StepId, StreamId
from langchain_pshard.pipeline import adaptive_k, scheduler
from langchain_pshard.pipeline.account import Trip
from langchain_pshard.pipeline.chain import Route
from langchain_pshard.pipeline.prompt_costs import PromptLoad
from langchain_pshard.pipeline.step_costs import StepCosts
from langchain_pshard.pipeline.stream import Stream

_ROWS_FORGET = 0.9
MISSED_TOKENS = 1.5
"""What a step costs a stream in which a draft would have ridden, had the client been asked."""


class Turn(msgspec.Struct, frozen=True):
    """A micro-batch to send; without slices when all its streams failed."""

    step_id: StepId
    slices: tuple[Slice, ...]
    failed: tuple[tuple[Stream, PShardError], ...]
    """Streams whose drafter failed."""


class Flight(msgspec.Struct):
    """A micro-batch on its way."""

    sent_at: float
    awaited: set[StreamId]
    """Streams whose slices have not been answered."""
    rows: set[StreamId]
    """Those of them that decode."""
    num_sent: int = 0
    """Rows that were sent, drafts included; none of a step that the chain takes by itself."""
    prompt: PromptLoad = PromptLoad()
    num_ahead: int = 0
    """Steps that the chain goes on by itself behind this one."""
    is_ahead: bool = False
    """The chain took this one by itself."""

    @property
    def num_rows(self) -> int:
        """Rows that are computed. The chain goes on with those streams that did not end with the step before."""
        return len(self.rows) if self.is_ahead else self.num_sent

    def next_ahead(self, now: float) -> Flight:
        """The step that the chain takes behind this one, which has come back."""
        return Flight(now, self.rows.copy(), self.rows.copy(), num_ahead=self.num_ahead - 1, is_ahead=True)


class Landing(msgspec.Struct, frozen=True):
    """A micro-batch that came back."""

    streams: tuple[StreamId, ...]
    trip: Trip


class Turns:
    """The flights of one chain and their costs. `reset` begins a new chain."""

    def __init__(self, *, max_draft_tokens: int, max_chunk_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._max_steps_ahead = 0
        self._route = Route(1, 2, 0)
        self._last_step = 0
        self._num_turns = 0
        self._flights: dict[StepId, Flight] = {}
        self._costs = StepCosts(1)
        self._rows_per_stream = 1.0
        self._num_beside = 0
        self._num_groups = 1

    def reset(self, route: Route, *, max_steps_ahead: int) -> None:
        """A new chain, which may take so many steps by itself: what was under way is gone, and its costs are its own."""
        self._flights.clear()
        self._route, self._max_steps_ahead = route, max_steps_ahead
        self._costs = StepCosts(route.num_stages)
        self._rows_per_stream = 1.0

    def clear(self) -> None:
        """Nothing is under way any more."""
        self._flights.clear()

    def take_back(self) -> frozenset[StreamId]:
        """The chain takes no more steps by itself: what it was granted is not awaited any longer, and its streams take their turns again.

        An answer that comes all the same is one to no flight, and a step that is still on its way is a late duplicate to every stage.
        """
        granted = {step_id: flight for step_id, flight in self._flights.items() if flight.num_ahead or flight.is_ahead}
        for step_id in granted:
            del self._flights[step_id]
        self._max_steps_ahead = 0
        return frozenset(stream for flight in granted.values() for stream in flight.awaited)

    def next_turn(self, streams: Mapping[StreamId, Stream], now: float) -> Turn | None:
        """The next micro-batch of these streams, or None when it is better to wait for an answer."""
        plan = scheduler.plan(self._situation(streams.values()), self._costs)
        if plan is None:
            return None
        step_id = StepId(self._last_step + 1)
        self._num_turns += 1
        rows, failed = self._rows(plan, streams, step_id, now)
        num_ahead = rows[0].num_ahead if rows else 0
        self._last_step = step_id + num_ahead
        chunks = [streams[chunk.stream].next_chunk(chunk.num_tokens, step_id, now) for chunk in plan.chunks]
        slices = (*rows, *chunks)
        if slices:
            self._flights[step_id] = Flight(
                now,
                {piece.stream for piece in slices},
                {piece.stream for piece in rows},
                num_sent=sum([piece.num_tokens for piece in rows]),
                prompt=sum([PromptLoad.of(piece.start, piece.num_tokens) for piece in chunks], start=PromptLoad()),
                num_ahead=num_ahead,
            )
        return Turn(step_id, slices, tuple(failed))

    def step_ms(self, num_rows: int) -> float:
        """What a step takes in which a stream has so many rows, beside the streams of late."""
        return self._costs.cycle_ms(num_rows + self._num_beside * self._rows_per_stream, self._num_groups)

    def landed(self, step_id: StepId, timings: Sequence[StageTiming], now: float) -> Landing | None:
        """The answer to a step; None when it is a repeated one."""
        flight = self._flights.pop(step_id, None)
        if flight is None:
            return None
        round_trip_ms = 1e3 * (now - flight.sent_at)
        way_ms = self._costs.observe(
            num_rows=flight.num_rows,
            prompt=flight.prompt,
            timings=timings,
            round_trip_ms=round_trip_ms,
            is_round=not flight.is_ahead,
        )
        if flight.num_ahead:
            self._flights[StepId(step_id + 1)] = flight.next_ahead(now)
        num_hops = self._route.num_links_ahead if flight.is_ahead else self._route.num_links
        return Landing(tuple(flight.awaited), Trip(tuple(timings), way_ms, num_hops))

    def forget(self, stream_ids: Iterable[StreamId]) -> None:
        """Take streams that ended out of every flight."""
        for step_id, flight in list(self._flights.items()):
            flight.awaited.difference_update(stream_ids)
            flight.rows.difference_update(stream_ids)
            if not flight.awaited:
                del self._flights[step_id]

    def _situation(self, streams: Iterable[Stream]) -> scheduler.Situation:
        ready: list[Stream] = []
        prefilling: list[scheduler.Prefilling] = []
        prompts_sent = PromptLoad()
        num_decoding = 0
        for stream in streams:
            if stream.is_decoding:
                num_decoding += 1
                if stream.is_ready:
                    ready.append(stream)
            elif stream.num_prompt_left:
                prefilling.append(
                    scheduler.Prefilling(
                        stream=stream.id,
                        begin=stream.num_prompt_cached,
                        start=stream.num_prompt_sent,
                        num_left=stream.num_prompt_left,
                        max_tokens=min(scheduler.MAX_CHUNK_TOKENS, stream.request.max_chunk_tokens),
                    )
                )
            else:
                prompts_sent += PromptLoad.of(stream.num_prompt_cached, stream.num_prompt_computed)
        ready.sort(key=_last_step)
        decoding = [flight for flight in self._flights.values() if flight.rows]
        return scheduler.Situation(
            num_in_flight=len(self._flights),
            num_decode_in_flight=len(decoding),
            least_ahead=min([flight.num_ahead for flight in decoding], default=0),
            num_decoding=num_decoding,
            ready=[stream.id for stream in ready],
            prefilling=prefilling,
            prompts_sent=prompts_sent,
            rows_per_stream=self._rows_per_stream,
            max_chunk_tokens=self._max_chunk_tokens,
            turn=self._num_turns,
            max_steps_ahead=self._max_steps_ahead,
        )

    def _rows(
        self, plan: scheduler.Plan, streams: Mapping[StreamId, Stream], step_id: StepId, now: float
    ) -> tuple[list[Slice], list[tuple[Stream, PShardError]]]:
        # Of many streams each gets few drafts: guesses longer than twice an even share are not worth making.
        max_guess = min(self._max_draft_tokens, max(1, 2 * plan.max_drafts // max(1, len(plan.rows))))
        drafting: list[Stream] = []
        offers: list[adaptive_k.Offer] = []
        failed: list[tuple[Stream, PShardError]] = []
        for stream in (streams[stream_id] for stream_id in plan.rows):
            try:
                offers.append(stream.guess(max_guess))
            except PShardError as error:
                failed.append((stream, error))
            else:
                drafting.append(stream)
        num_drafts = adaptive_k.choose(offers, max_drafts=plan.max_drafts, step_ms=lambda rows: self._costs.cycle_ms(rows, plan.num_groups))
        num_ahead = 0
        if plan.max_ahead and not any(num_drafts):
            patience = self._patience(plan)
            num_ahead = min([plan.max_ahead, *[stream.max_ahead(patience) for stream in drafting]])
        slices = [stream.next_rows(count, step_id, now, num_ahead=num_ahead) for stream, count in zip(drafting, num_drafts, strict=True)]
        if drafting:
            self._num_beside, self._num_groups = len(drafting) - 1, plan.num_groups
            rows_per_stream = 1.0 + sum(num_drafts) / len(drafting)
            self._rows_per_stream = _ROWS_FORGET * self._rows_per_stream + (1 - _ROWS_FORGET) * rows_per_stream
        return slices, failed

    def _patience(self, plan: scheduler.Plan) -> float:
        """How many turns without drafts a stream has to have seen for each step ahead, so that what a step spares outweighs the drafts that
        it may miss: one in so many turns would have had one."""
        spared_ms = self._costs.way_ms * (1 - self._route.num_links_ahead / self._route.num_links)
        cycle_ms = self._costs.cycle_ms(len(plan.rows), plan.num_groups)
        return MISSED_TOKENS * cycle_ms / spared_ms if spared_ms > 0 else math.inf


def _last_step(stream: Stream) -> StepId:
    return stream.last_step
