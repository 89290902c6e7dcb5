"""One generation as the client sees it: tokens, positions, what is in flight, how it ends. Pure: time is a parameter.

Invariants:
- the fleet's KV of the stream is always a prefix of prompt + tokens (+ drafts in flight): `start` of every slice says which;
- prefill chunks may be in flight one behind another; rows go alone: the next ones need the answer;
- tokens are confirmed in order and never taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.errors import ProtocolError, PShardError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.messages import Slice, SliceKind, SliceResult, StageTiming, StepId, StreamId
from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs
from langchain_pshard.pipeline.generation import FinishReason, GenerationStats
from langchain_pshard.pipeline.speculation import Drafter, draft, num_accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """New tokens of a stream, with the account of it so far; `finish_reason` is set on the last one."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: GenerationStats
    finish_reason: FinishReason | None


Sink = Callable[[Delivery | PShardError], bool]
"""Where a stream's deliveries go, in order, ended by a finish reason or an error. False: nobody is listening any more.
Called in the reactor thread: it must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What a caller asks the fleet for, checked and complete."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    """Empty to generate on past end tokens."""
    vocab_size: int
    sink: Sink
    timeout_s: float | None = None
    drafter: Drafter | None = None
    grammar: Grammar | None = None

    @property
    def num_positions(self) -> int:
        """KV positions to set aside. Drafts need none of their own: they never reach beyond `max_tokens`."""
        return len(self.prompt) + self.max_tokens


class Stream:
    """The state of one generation."""

    def __init__(self, stream_id: StreamId, request: StreamRequest, now: float) -> None:
        self.id = stream_id
        self.request = request
        self.tokens: list[int] = []
        self._text = list(request.prompt)  # prompt and tokens, what a drafter reads
        self.submitted_at = now
        self.deadline = None if request.timeout_s is None else now + request.timeout_s
        self.num_prompt_sent = 0
        self.num_in_flight = 0
        self.waiting_since = now
        """When the answer now awaited was last brought nearer: the last send into nothing in flight, or the last answer."""
        self.last_step: StepId = StepId(0)
        self._drafts: tuple[int, ...] = ()
        self._forced: tuple[int, ...] = ()
        """What the grammar leaves no choice about: drafts that need no drafter."""
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at = now
        self._num_steps = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._compute_us: list[int] = []
        self._queue_us: list[int] = []

    @property
    def num_prompt_left(self) -> int:
        return len(self.request.prompt) - self.num_prompt_sent

    @property
    def is_decoding(self) -> bool:
        """Whether the first token is known: from here on the stream takes decode turns."""
        return bool(self.tokens)

    @property
    def is_ready(self) -> bool:
        """Whether the stream waits for a decode turn."""
        return self.is_decoding and not self.num_in_flight

    def next_chunk(self, num_tokens: int, step: StepId, now: float) -> Slice:
        """The next `num_tokens` of the prompt; the last ones sample the first token."""
        start = self.num_prompt_sent
        self.num_prompt_sent = start + num_tokens
        self._sent(step, now)
        return Slice(
            stream=self.id,
            start=start,
            tokens=pack_tokens(self.request.prompt[start : start + num_tokens]),
            kind=SliceKind.PREFILL,
            num_sampled=1 if self.num_prompt_left == 0 else 0,
        )

    def next_rows(self, max_drafts: int, step: StepId, now: float) -> Slice:
        """The last token, and drafts of what may follow it.

        Raises:
            InvalidOptionError: the caller's drafter failed.
        """
        num_left = self.request.max_tokens - len(self.tokens)
        limit = min(max_drafts, num_left - 1)
        if self._forced:
            self._drafts, self._forced = self._forced[:limit], ()
        elif self.request.drafter is not None:
            self._drafts = draft(self.request.drafter, self._text, max_tokens=limit, vocab_size=self.request.vocab_size)
        self._num_drafted += len(self._drafts)
        self._sent(step, now)
        return Slice(
            stream=self.id,
            start=len(self.request.prompt) + len(self.tokens) - 1,
            tokens=pack_tokens((self.tokens[-1], *self._drafts)),
            kind=SliceKind.ROWS,
            num_sampled=1 + len(self._drafts),
        )

    def apply(self, result: SliceResult | None, timings: Sequence[StageTiming], now: float) -> Delivery | None:
        """Take the answer to the oldest slice in flight; None for a prompt chunk that samples nothing.

        Raises:
            ProtocolError: the answer has another number of tokens than was asked for, or an id out of the vocabulary.
        """
        num_expected = self.num_awaited
        self.num_in_flight -= 1
        self.waiting_since = now
        self._add(timings)
        sampled = unpack_tokens(result.tokens) if result is not None else []
        self._check(sampled, num_expected)
        if not num_expected:
            return None
        forced = unpack_tokens(result.forced) if result is not None else []
        self._check_ids(forced)
        self._forced = tuple(forced)
        accepted = num_accepted(self._drafts, sampled)
        self._drafts = ()
        new, finish_reason = self._until_end(sampled[: accepted + 1])
        self._num_accepted += min(accepted, len(new))
        self.tokens += new
        self._text += new
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now
        logprobs = result.logprobs[: len(new)] if result is not None and result.logprobs is not None else None
        return Delivery(tokens=tuple(new), logprobs=logprobs, stats=self.stats, finish_reason=finish_reason)

    @property
    def stats(self) -> GenerationStats:
        first_token_at = self._last_token_at if self._first_token_at is None else self._first_token_at
        started_at = first_token_at if self._started_at is None else self._started_at
        return GenerationStats(
            num_prompt_tokens=len(self.request.prompt),
            num_generated_tokens=len(self.tokens),
            num_cached_tokens=0,
            num_steps=self._num_steps,
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            queue_ms=1e3 * (started_at - self.submitted_at),
            first_token_ms=1e3 * (first_token_at - self.submitted_at),
            decode_ms=1e3 * (self._last_token_at - first_token_at),
            stage_compute_ms=tuple(us / 1e3 for us in self._compute_us),
            stage_queue_ms=tuple(us / 1e3 for us in self._queue_us),
        )

    @property
    def num_awaited(self) -> int:
        """Tokens that the oldest slice in flight samples: only the prompt's last chunk and rows sample any."""
        if self.is_decoding:
            return 1 + len(self._drafts)
        return 1 if self.num_prompt_left == 0 and self.num_in_flight == 1 else 0

    def _sent(self, step: StepId, now: float) -> None:
        if self._started_at is None:
            self._started_at = now
        if not self.num_in_flight:
            self.waiting_since = now
        self.num_in_flight += 1
        self.last_step = step
        self._num_steps += 1

    def _check(self, sampled: Sequence[int], num_expected: int) -> None:
        if len(sampled) != num_expected:
            raise ProtocolError(f"the last stage answered {len(sampled)} tokens where {num_expected} were asked for")
        self._check_ids(sampled)

    def _check_ids(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.request.vocab_size:
                raise ProtocolError(f"the last stage answered token {token}; the vocabulary has {self.request.vocab_size}")

    def _until_end(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to an end token (included) or `max_tokens`, and why they end there."""
        num_left = self.request.max_tokens - len(self.tokens)
        for count, token in enumerate(tokens[:num_left], start=1):
            if token in self.request.eos_token_ids:
                return tokens[:count], FinishReason.STOP
        return tokens[:num_left], FinishReason.LENGTH if len(tokens) >= num_left else None

    def _add(self, timings: Sequence[StageTiming]) -> None:
        if len(self._compute_us) < len(timings):
            missing = len(timings) - len(self._compute_us)
            self._compute_us += [0] * missing
            self._queue_us += [0] * missing
        for idx, timing in enumerate(timings):
            self._compute_us[idx] += timing.compute_us
            self._queue_us[idx] += timing.queue_us
