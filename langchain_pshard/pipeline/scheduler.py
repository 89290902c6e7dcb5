"""Which streams form the next micro-batch and how many prompt tokens each. Pure: the situation and the learned costs in, a plan out.

- Decode rows first. Streams that decode form groups, which alternate: as many as make a cycle shortest by the measured times. A stage
  that spends its time on reading weights wants one large group; one that spends it on computing rows, or a long way between machines,
  wants several.
- Prompts go in chunks, several in flight, so that the stages work on different ones at the same time. What a micro-batch holds of them is
  as much as brings all prompts that wait through soonest: small ones fill the pipeline sooner, each costs its overhead.
- While somebody decodes, the chunks of a micro-batch take no longer than `STALL_MS` on the slowest stage.
- Fair: the streams that waited longest decode first; of prompts, the oldest and the shortest come first in turn, so neither waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from langchain_pshard.core.messages import StreamId
from langchain_pshard.pipeline.step_costs import StepCosts

MIN_CHUNK_TOKENS = 32
MAX_CHUNK_TOKENS = 256
MIN_CHUNK_LIMIT = 3
"""What the longest chunk has to be at least, so that every prompt can be cut into chunks of two or more."""
PREFILL_BUDGET_TOKENS = 512
"""Most prompt tokens of a micro-batch."""
ROW_BUDGET = 128
"""Decode rows per micro-batch, drafts included."""
STALL_MS = 60.0
"""Longest time that prompts may add to a step while others decode: a reader does not notice it."""
SILENCE_MS = 2_000.0
"""Longest time of an inference over prompts, where nobody waits for it: a worker answers pings between inferences only, and counts as lost
when it is silent for several seconds (`ClientOptions.liveness_timeout_s`)."""
SPLIT_MS = 1.5
"""One more group has to make a cycle shorter by this: each costs client and workers another step, which the times of stages do not show
(2 streams of Gemma 3 270M on two cores: a cycle of 14 ms together, 16 ms alternating)."""
MIN_SPLIT_GAIN = 1.02
"""And by this: the times are measured, not exact."""
MAX_GROUPS = 16
MAX_CHUNKS_IN_FLIGHT = 16


class Prefilling(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that has prompt tokens to send."""

    stream: StreamId
    num_left: int
    max_tokens: int = MAX_CHUNK_TOKENS
    """Of one chunk."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that the choice depends on, the costs apart."""

    num_in_flight: int
    """Micro-batches sent and not answered."""
    num_decode_in_flight: int
    """Those of them that carry decode rows."""
    num_decoding: int
    """Streams past their prompt, ready or in flight."""
    ready: Sequence[StreamId]
    """Streams that wait for their next decode turn, the longest-waiting first."""
    prefilling: Sequence[Prefilling]
    """In order of arrival."""
    rows_per_stream: float = 1.0
    """Rows that a stream's turn has had of late, drafts included."""
    max_chunk_tokens: int = MAX_CHUNK_TOKENS
    """Most prompt tokens of one stream."""
    turn: int = 0
    """Counts micro-batches."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    stream: StreamId
    num_tokens: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The next micro-batch."""

    rows: tuple[StreamId, ...]
    max_drafts: int
    """Most drafts of all `rows` together."""
    chunks: tuple[Chunk, ...]
    num_groups: int = 1
    """How many micro-batches of decode rows alternate."""


def plan(now: Situation, costs: StepCosts) -> Plan | None:
    """The next micro-batch, or None when it is better to wait for an answer."""
    if not now.ready and not now.prefilling:
        return None
    num_groups = num_decode_groups(now.num_decoding, costs, now.rows_per_stream) if now.num_decoding else 0
    rows = _rows(now, num_groups)
    chunks = _chunks(now, costs) if now.prefilling and _may_send_chunks(now, costs, num_groups) else ()
    if not rows and not chunks:
        return None
    return Plan(rows=rows, max_drafts=ROW_BUDGET - len(rows) if rows else 0, chunks=chunks, num_groups=max(1, num_groups))


def num_decode_groups(num_decoding: int, costs: StepCosts, rows_per_stream: float = 1.0) -> int:
    """Into how many alternating micro-batches the decoding streams split."""
    if num_decoding == 1:
        return 1
    best, best_ms = 1, math.inf
    for num_groups in range(1, min(num_decoding, MAX_GROUPS) + 1):
        size = -(-num_decoding // num_groups)
        if size > ROW_BUDGET:
            continue
        cycle_ms = costs.cycle_ms(size * rows_per_stream, num_groups)
        if cycle_ms * MIN_SPLIT_GAIN ** (num_groups - best) + SPLIT_MS * (num_groups - best) < best_ms:
            best, best_ms = num_groups, cycle_ms
    return best


def chunk_length(num_left: int, room: int) -> int:
    """Tokens of the next prefill chunk, 0 when none fits.

    Never one token of several, and never so many that one is left alone: a single token runs another kernel, whose KV differs.
    """
    limit = min(room, MAX_CHUNK_TOKENS)
    if num_left <= limit:
        return num_left
    length = limit - 1 if num_left - limit == 1 else limit
    return length if length >= 2 else 0


def best_chunk_tokens(num_left: int, costs: StepCosts) -> int:
    """The chunk length that brings `num_left` tokens through all stages soonest.

    k chunks of n / k tokens take k + stages - 1 turns of (base + slope n / k): least about n / k = sqrt(n base / (slope (stages - 1))).
    A chunk that is left over costs a turn like any other, so they are of one length.
    """
    line = costs.slowest_prompt()
    if costs.num_stages == 1 or line.slope_ms <= 0:
        return MAX_CHUNK_TOKENS
    ideal = math.sqrt(num_left * line.base_ms / (line.slope_ms * (costs.num_stages - 1)))
    few = max(1, math.floor(num_left / min(max(ideal, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)))
    best, best_ms = MAX_CHUNK_TOKENS, math.inf
    for num_chunks in (few, few + 1):
        length = -(-num_left // num_chunks)
        turns_ms = (num_chunks + costs.num_stages - 1) * line.at(length)
        if length <= MAX_CHUNK_TOKENS and (length >= MIN_CHUNK_TOKENS or num_chunks == 1) and turns_ms < best_ms:
            best, best_ms = length, turns_ms
    return best


def _rows(now: Situation, num_groups: int) -> tuple[StreamId, ...]:
    # A stream that gets ready while its group is in flight waits for it: alone it would alternate with the group for ever.
    if not now.ready or now.num_decode_in_flight >= num_groups:
        return ()
    group_size = -(-now.num_decoding // num_groups)
    return tuple(now.ready[: min(group_size, ROW_BUDGET)])


def _may_send_chunks(now: Situation, costs: StepCosts, num_groups: int) -> bool:
    if now.num_decoding:
        # One more than there are stages keeps them busy; behind more of them, decode rows would queue.
        return now.num_in_flight <= max(costs.num_stages, num_groups)
    line = costs.slowest_prompt()
    turn_ms = line.at(MIN_CHUNK_TOKENS)
    num_on_the_way = math.ceil(costs.way_ms / turn_ms) if turn_ms > 0 else 0
    return now.num_in_flight <= min(costs.num_stages + num_on_the_way, MAX_CHUNKS_IN_FLIGHT)


def _chunks(now: Situation, costs: StepCosts) -> tuple[Chunk, ...]:
    # All prompts together fill the pipeline: cut one by one, short prompts would each pay for several chunks.
    best = best_chunk_tokens(sum([prompt.num_left for prompt in now.prefilling]), costs)
    budget = _prefill_budget(now, costs)
    if costs.num_stages > 1:
        budget = min(budget, best)
    chunks = []
    for turn in _in_order(now.prefilling, now.turn):
        limit = min(budget, now.max_chunk_tokens, turn.max_tokens, best)
        if length := chunk_length(turn.num_left, limit):
            chunks.append(Chunk(stream=turn.stream, num_tokens=length))
            budget -= length
        if budget < MIN_CHUNK_TOKENS:
            break
    return tuple(chunks)


def _prefill_budget(now: Situation, costs: StepCosts) -> int:
    if not costs.knows_prompts:
        return MIN_CHUNK_TOKENS  # on a large model and a slow machine, 256 tokens may take a minute
    line = costs.slowest_prompt()
    limit_ms = STALL_MS if now.num_decoding else SILENCE_MS
    affordable = (limit_ms - line.base_ms) / line.slope_ms if line.slope_ms > 0 else PREFILL_BUDGET_TOKENS
    return round(min(max(affordable, MIN_CHUNK_TOKENS), PREFILL_BUDGET_TOKENS))


def _in_order(prefilling: Sequence[Prefilling], turn: int) -> list[Prefilling]:
    if turn % 2 == 0:
        return list(prefilling)
    return sorted(prefilling, key=lambda one: one.num_left)
