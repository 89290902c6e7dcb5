"""Which streams form the next micro-batch and how many prompt tokens each. Pure: the situation and the learned costs in, a plan out.

- Decode rows first. Streams that decode form groups, which alternate: as many as make a cycle shortest by the measured times. A stage
  that spends its time on reading weights wants one large group; one that spends it on computing rows, or a long way between machines,
  wants several.
- Prompts go in chunks, several in flight, so that the stages work on different ones at the same time. The micro-batches that hold them
  are of equal duration, not length, as a token costs more the later it stands; and as many as bring all prompts that wait through
  soonest: short ones fill the pipeline sooner, each costs its overhead. Lengths are rounded, so that few different ones occur.
- While somebody decodes, the chunks of a micro-batch take no longer than `STALL_MS` on the slowest stage.
- Decode rows without drafts are sent with steps ahead: the chain goes on by itself, and what comes back is tokens. Only while no prompt is
  under way, so that who begins to decode soon does so together with the others.
- Fair: the streams that waited longest decode first; of prompts, the oldest and the shortest come first in turn, so neither waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from langchain_pshard.core.messages import StreamId
from langchain_pshard.pipeline.prompt_costs import PromptLoad, PromptPrice
from langchain_pshard.pipeline.step_costs import STEP_OVERHEAD_MS, StepCosts

MIN_CHUNK_TOKENS = 32
MAX_CHUNK_TOKENS = 256
CHUNK_STEP = 16
"""A micro-batch that does not end its prompts has a multiple of so many tokens: an engine prepares itself for every new number of tokens
(7 ms beside 21 for 100 tokens, Gemma 3 270M, 9 layers on one core), and takes 1 to 2 ms to return to an earlier one."""
LONG_CHUNK_TOKENS = 80
"""From here on a multiple of twice as many: it is no coarser, as a part of the whole, and fewer lengths occur."""
LAST_PART = 0.85
"""The last of several micro-batches is so much of the others by its price, which leaves out that its length is seldom one that the engine
knows, and that the last stage computes logits for it (7 ms each there)."""
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
_HAIR = 1e-3
"""Of a token."""


class Prefilling(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that has prompt tokens to send."""

    stream: StreamId
    begin: int
    """Position of the first one that has to be computed; those before are cached."""
    start: int
    """Position of the first one that was not sent."""
    num_left: int
    max_tokens: int = MAX_CHUNK_TOKENS
    """Of one chunk."""

    @property
    def whole(self) -> PromptLoad:
        """All that has to be computed."""
        return PromptLoad.of(self.begin, self.start - self.begin + self.num_left)

    @property
    def rest(self) -> PromptLoad:
        """What was not sent."""
        return PromptLoad.of(self.start, self.num_left)


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that the choice depends on, the costs apart."""

    num_in_flight: int
    """Micro-batches sent and not answered."""
    num_decode_in_flight: int
    """Those of them that carry decode rows."""
    least_ahead: int = 0
    """Steps that the chain goes on by itself with each of those, at least."""
    num_decoding: int
    """Streams past their prompt, ready or in flight."""
    ready: Sequence[StreamId]
    """Streams that wait for their next decode turn, the longest-waiting first."""
    prefilling: Sequence[Prefilling]
    """In order of arrival."""
    prompts_sent: PromptLoad = PromptLoad()
    """Prompts that were sent to the last token, and not answered."""
    rows_per_stream: float = 1.0
    """Rows that a stream's turn has had of late, drafts included."""
    max_chunk_tokens: int = MAX_CHUNK_TOKENS
    """Most prompt tokens of one stream."""
    turn: int = 0
    """Counts micro-batches."""
    max_steps_ahead: int = 0
    """Most steps that the chain may take by itself."""


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
    max_ahead: int = 0
    """How many steps the chain may take by itself with `rows` behind this one, if none of them has drafts."""


def plan(now: Situation, costs: StepCosts) -> Plan | None:
    """The next micro-batch, or None when it is better to wait for an answer."""
    if not now.ready and not now.prefilling:
        return None
    num_groups = num_decode_groups(now.num_decoding, costs, now.rows_per_stream) if now.num_decoding else 0
    rows, max_ahead = _rows(now, num_groups)
    chunks = _chunks(now, costs) if now.prefilling and _may_send_chunks(now, costs, num_groups) else ()
    if not rows and not chunks:
        return None
    return Plan(
        rows=rows,
        max_drafts=ROW_BUDGET - len(rows) if rows else 0,
        chunks=chunks,
        num_groups=max(1, num_groups),
        # A prompt under way, sent or not, soon brings a stream to decode along.
        max_ahead=0 if now.prefilling or now.prompts_sent else max_ahead,
    )


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


def best_turn_ms(whole: PromptLoad, rest: PromptLoad, costs: StepCosts, limit_ms: float = math.inf) -> float:
    """How long the chunks of a micro-batch take on the slowest stage when prompts come through all stages soonest.

    In k micro-batches of equal duration, the slowest stage takes `k base + work` and each other stage adds the last one, a k-th of its own
    work: least at k = sqrt(others' work / base). What is left takes its part of the k, so that the durations stay equal to the end; only
    the last one is a bit shorter.

    Args:
        whole: the prompts under way, with what was sent of them.
        rest: what is left of them.
        costs: of the chain; with one stage nothing overlaps, and any time is good.
        limit_ms: longest time that is allowed.
    """
    slowest, others = costs.prompt_prices(whole)
    work_ms = slowest.work_ms(rest)
    room_ms = limit_ms - slowest.base_ms
    if not others or not 0 < work_ms < room_ms * rest.num_tokens:  # in the end, not a token fits
        return limit_ms
    ideal = math.sqrt(sum([price.work_ms(whole) for price in others]) / (slowest.base_ms + STEP_OVERHEAD_MS))
    fewest = math.ceil(max(rest.num_tokens / MAX_CHUNK_TOKENS, work_ms / room_ms))
    most = max(fewest, rest.num_tokens // MIN_CHUNK_TOKENS)
    num_chunks = min(max(round(ideal * work_ms / slowest.work_ms(whole)), fewest), most)
    num_parts = num_chunks - 1 + LAST_PART if num_chunks > 1 else 1
    return min(slowest.base_ms + work_ms / num_parts, limit_ms)


def _rows(now: Situation, num_groups: int) -> tuple[tuple[StreamId, ...], int]:
    """Who decodes next, and for how many steps more without being asked."""
    max_ahead = now.max_steps_ahead
    if now.num_decode_in_flight >= num_groups:
        # A stream that gets ready while its group is in flight waits for it: alone it would alternate with the group for ever. But where
        # the chain goes on with the group by itself, it goes along, and is back when the group is.
        if not now.least_ahead:
            return (), 0
        max_ahead = min(max_ahead, now.least_ahead - 1)
    group_size = -(-now.num_decoding // num_groups)
    return tuple(now.ready[: min(group_size, ROW_BUDGET)]), max_ahead


def _may_send_chunks(now: Situation, costs: StepCosts, num_groups: int) -> bool:
    if now.num_decoding:
        # One more than there are stages keeps them busy; behind more of them, decode rows would queue. Those that went along with a group
        # that was ahead are merged with it by the stages, and hold nobody up.
        num_along = max(0, now.num_decode_in_flight - num_groups)
        return now.num_in_flight - num_along <= max(costs.num_stages, num_groups)
    shortest = PromptLoad.of(0, MIN_CHUNK_TOKENS)
    price, _ = costs.prompt_prices(shortest)
    turn_ms = price.at(shortest)
    num_on_the_way = math.ceil(costs.way_ms / turn_ms) if turn_ms > 0 else 0
    return now.num_in_flight <= min(costs.num_stages + num_on_the_way, MAX_CHUNKS_IN_FLIGHT)


def _chunks(now: Situation, costs: StepCosts) -> tuple[Chunk, ...]:
    # All prompts together fill the pipeline: cut one by one, short prompts would each pay for several chunks.
    whole = sum([prompt.whole for prompt in now.prefilling], start=now.prompts_sent)
    rest = sum([prompt.rest for prompt in now.prefilling], start=PromptLoad())
    price, _ = costs.prompt_prices(whole)
    limit_ms = STALL_MS if now.num_decoding else SILENCE_MS
    turn_ms = best_turn_ms(whole, rest, costs, limit_ms)
    room, load = _most_tokens(costs), PromptLoad()
    chunks: list[Chunk] = []
    for prompt in _in_order(now.prefilling, now.turn):
        fitting = min(room - load.num_tokens, _num_fitting(price, load, prompt, turn_ms=turn_ms, limit_ms=limit_ms))
        if not chunks:
            fitting = max(fitting, MIN_CHUNK_TOKENS)  # or the prompt would not get on
        elif fitting < min(MIN_CHUNK_TOKENS, prompt.num_left):
            break
        if length := chunk_length(prompt.num_left, min(fitting, now.max_chunk_tokens, prompt.max_tokens)):
            chunks.append(Chunk(stream=prompt.stream, num_tokens=length))
            load += PromptLoad.of(prompt.start, length)
    return tuple(chunks)


def _most_tokens(costs: StepCosts) -> int:
    if not costs.knows_prompts:
        return MIN_CHUNK_TOKENS  # on a large model and a slow machine, 256 tokens may take a minute
    return PREFILL_BUDGET_TOKENS if costs.num_stages == 1 else MAX_CHUNK_TOKENS


def _num_fitting(price: PromptPrice, load: PromptLoad, prompt: Prefilling, *, turn_ms: float, limit_ms: float) -> int:
    """How many tokens of a prompt make a micro-batch that holds `load` take about `turn_ms`, and no longer than `limit_ms`."""
    num_tokens = price.tokens_within(turn_ms - price.at(load), prompt.start)
    # The last micro-batch is as long as what is left: a hair less, by rounding, would leave a token behind.
    if num_tokens > prompt.num_left - _HAIR:
        return prompt.num_left
    total = load.num_tokens + num_tokens
    step = CHUNK_STEP if total < LONG_CHUNK_TOKENS else 2 * CHUNK_STEP
    below = step * math.floor(total / step) - load.num_tokens
    above = min(below + step, prompt.num_left)
    is_allowed = price.at(load + PromptLoad.of(prompt.start, above)) <= limit_ms
    return above if is_allowed and above - num_tokens < num_tokens - below else below


def _in_order(prefilling: Sequence[Prefilling], turn: int) -> list[Prefilling]:
    if turn % 2 == 0:
        return list(prefilling)
    return sorted(prefilling, key=lambda one: one.num_left)
