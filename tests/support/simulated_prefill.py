"""A pipeline that takes in prompts, in simulated time: what the scheduler sends, when it is through, and what is learned meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from langchain_pshard.core.messages import StageTiming, StreamId
from langchain_pshard.pipeline.prompt_costs import PromptLoad, PromptPrice
from langchain_pshard.pipeline.scheduler import Chunk, Plan, Prefilling, Situation, plan
from langchain_pshard.pipeline.step_costs import STEP_OVERHEAD_MS, StepCosts

WAY_MS = 0.2


def price(base_ms: float, slope_ms: float, curve_ms: float) -> PromptPrice:
    return PromptPrice(base_ms=base_ms, slope_ms=slope_ms, curve_ms=curve_ms)


MEASURED = price(2.5, 0.225, 1.4e-4)
"""What nine of eighteen layers of Gemma 3 270M take, int4, on one core."""


@dataclass
class Prompts:
    """Prompts that wait: how much of each was sent, in order of arrival."""

    lengths: dict[int, int]
    sent: dict[int, int] = field(default_factory=dict)

    @property
    def waiting(self) -> list[Prefilling]:
        return [
            Prefilling(stream=StreamId(stream), begin=0, start=self.sent.get(stream, 0), num_left=length - self.sent.get(stream, 0))
            for stream, length in self.lengths.items()
            if self.sent.get(stream, 0) < length
        ]

    def is_sent(self, stream: int) -> bool:
        """Whether nothing of it waits any more."""
        return self.sent.get(stream, 0) == self.lengths[stream]

    @property
    def sent_whole(self) -> PromptLoad:
        whole = [PromptLoad.of(0, length) for stream, length in self.lengths.items() if self.is_sent(stream)]
        return sum(whole, start=PromptLoad())

    def send(self, chunks: Iterable[Chunk]) -> PromptLoad:
        """The chunks go out; returns what they are to a stage."""
        load = PromptLoad()
        for chunk in chunks:
            start = self.sent.get(chunk.stream, 0)
            load += PromptLoad.of(start, chunk.num_tokens)
            self.sent[chunk.stream] = start + chunk.num_tokens
            assert self.sent[chunk.stream] <= self.lengths[chunk.stream]
        return load


@dataclass(frozen=True)
class Prefill:
    """How it went."""

    finished_ms: float
    loads: tuple[PromptLoad, ...]
    """Of the micro-batches."""
    chunks: tuple[Chunk, ...]


def observe(costs: StepCosts, stages: Sequence[PromptPrice], load: PromptLoad) -> None:
    """A step of nothing but prompts came back from these stages."""
    timings = [StageTiming(0, round(1e3 * stage.at(load))) for stage in stages]
    spent_ms = sum(timing.compute_us for timing in timings) / 1e3
    costs.observe(num_rows=0, prompt=load, timings=timings, round_trip_ms=spent_ms + WAY_MS)


def prefill(costs: StepCosts, stages: Sequence[PromptPrice], lengths: Sequence[int]) -> Prefill:
    """Prompts of these lengths arrive together where nobody decodes."""
    prompts = Prompts(dict(enumerate(lengths, start=1)))
    free_ms = [0.0] * len(stages)
    flights: deque[_Flight] = deque()
    loads: list[PromptLoad] = []
    chunks: list[Chunk] = []
    now_ms = 0.0
    while True:
        while (found := _next_plan(prompts, len(flights), len(loads), costs)) is not None:
            load = prompts.send(found.chunks)
            left_ms = now_ms
            for idx, stage in enumerate(stages):
                free_ms[idx] = left_ms = max(left_ms, free_ms[idx]) + stage.at(load) + STEP_OVERHEAD_MS
            flights.append(_Flight(left_ms, load, [chunk.stream for chunk in found.chunks if prompts.is_sent(chunk.stream)]))
            loads.append(load)
            chunks += found.chunks
        if not flights:
            return Prefill(now_ms, tuple(loads), tuple(chunks))
        landing = flights.popleft()
        now_ms = landing.lands_at_ms
        for stream in landing.ends:
            del prompts.lengths[stream]
        observe(costs, stages, landing.load)


class _Flight(NamedTuple):
    lands_at_ms: float
    load: PromptLoad
    ends: list[StreamId]
    """Prompts whose last chunk it has."""


def _next_plan(prompts: Prompts, num_in_flight: int, turn: int, costs: StepCosts) -> Plan | None:
    now = Situation(
        num_in_flight=num_in_flight,
        num_decode_in_flight=0,
        num_decoding=0,
        ready=(),
        prefilling=prompts.waiting,
        prompts_sent=prompts.sent_whole,
        turn=turn,
    )
    return plan(now, costs)


def best_finish_ms(stages: Sequence[PromptPrice], lengths: Sequence[int]) -> float:
    """When the best of all cuts into micro-batches of exactly equal duration is through, of equal stages."""
    stage = stages[0]
    assert all(other == stage for other in stages)
    work_ms = sum(stage.work_ms(PromptLoad.of(0, length)) for length in lengths)
    base_ms = stage.base_ms + STEP_OVERHEAD_MS
    return min((count + len(stages) - 1) * (base_ms + work_ms / count) for count in range(1, sum(lengths)))
