"""Which streams form the next micro-batch and how many tokens each. Pure.

Decode rows come first; prefill chunks fill up to a token budget of their own, so that decoding never stalls behind a long prompt. At most
stages + 1 micro-batches are in flight: one for each stage to work on and one waiting, so that the first stage never idles for a round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_pshard.core.messages import StreamId

MAX_CHUNK_TOKENS = 256
PREFILL_BUDGET_TOKENS = 512
"""Prompt tokens per micro-batch while nobody decodes; the half of it while somebody does."""
ROW_BUDGET = 128
"""Decode rows per micro-batch, drafts included."""
MIN_SPLIT_STREAMS = 8
"""On one core, 16+2 layers: 2 streams reach 142 tok/s in one micro-batch and 125 alternating, 16 streams 762 in two alternating ones
(shared FACTS, "Speed on one core"): decoding is bound by weight reads until a batch has several rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """A stream that has prompt tokens to send."""

    stream: StreamId
    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the choice depends on."""

    num_stages: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    stream: StreamId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next micro-batch."""

    rows: tuple[StreamId, ...]
    max_drafts: int
    """Most drafts each of `rows` may add."""
    chunks: tuple[Chunk, ...]


def num_decode_groups(num_decoding: int, num_stages: int) -> int:
    """Into how many alternating micro-batches the decoding streams split. (To be replaced by measured step times.)"""
    if num_decoding < MIN_SPLIT_STREAMS:
        return 1
    return max(1, min(num_stages, num_decoding // (MIN_SPLIT_STREAMS // 2)))


def chunk_length(num_left: int, room: int) -> int:
    """Tokens of the next prefill chunk, 0 when none fits.

    Never one token of several, and never so many that one is left alone: a single token runs another kernel, whose KV differs.
    """
    limit = min(room, MAX_CHUNK_TOKENS)
    if num_left <= limit:
        return num_left
    length = limit - 1 if num_left - limit == 1 else limit
    return length if length >= 2 else 0


def plan(now: Situation) -> Plan | None:
    """The next micro-batch, or None when it is better to wait for an answer."""
    if now.num_in_flight > now.num_stages:
        return None
    rows = _rows(now)
    chunks = _chunks(now.prefilling, PREFILL_BUDGET_TOKENS // 2 if now.num_decoding else PREFILL_BUDGET_TOKENS)
    if not rows and not chunks:
        return None
    return Plan(rows=rows, max_drafts=ROW_BUDGET // len(rows) - 1 if rows else 0, chunks=chunks)


def _rows(now: Situation) -> tuple[StreamId, ...]:
    num_groups = num_decode_groups(now.num_decoding, now.num_stages)
    # A stream that gets ready while its group is in flight waits for it: alone it would alternate with the group for ever.
    if not now.ready or now.num_decode_in_flight >= num_groups:
        return ()
    group_size = -(-now.num_decoding // num_groups)
    return tuple(now.ready[: min(group_size, ROW_BUDGET)])


def _chunks(prefilling: Sequence[Prefilling], budget: int) -> tuple[Chunk, ...]:
    chunks = []
    for turn in prefilling:
        if length := chunk_length(turn.num_left, budget):
            chunks.append(Chunk(stream=turn.stream, num_tokens=length))
            budget -= length
        if budget < 1:
            break
    return tuple(chunks)
