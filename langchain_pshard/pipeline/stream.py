"""One generation as the client sees it: tokens, positions, what is in flight, how it ends. Pure: time is a parameter.

Invariants:
- the fleet's KV of the stream is always a prefix of prompt + tokens (+ drafts in flight): `start` of every slice says which;
- prefill chunks may be in flight one behind another; rows go alone: the next ones need the answer;
- tokens are confirmed in order and never taken back;
- the drafts in flight are the first ones of the guess, which is compared with the answer as far as the answer reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from langchain_pshard.core.codec import MAX_LOGITS_BYTES, Tensor, pack_tokens, unpack_tokens
from langchain_pshard.core.errors import ProtocolError, PShardError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.messages import Slice, SliceKind, SliceResult, StepId, StepResult, StreamId
from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs
from langchain_pshard.pipeline.account import Account, Trip
from langchain_pshard.pipeline.adaptive_k import Acceptance, Offer
from langchain_pshard.pipeline.generation import FinishReason, GenerationStats, PrefixCache
from langchain_pshard.pipeline.speculation import Drafting, draft, num_accepted


class Delivery(NamedTuple):
    """New tokens of a stream, with the account of it so far; `finish_reason` is set on the last one."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: GenerationStats
    finish_reason: FinishReason | None
    logits: Tensor | None = None  # [positions of a chunk, vocab], for who asked


MAX_SHARED_TOKENS = 128 << 10
"""Of 4 bytes each: half of what a message's header may have."""

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
    drafting: Drafting | None = None
    """Guesses for this stream, begun on its prompt."""
    drafts_by_model: bool = False
    """Guesses come from the fleet's draft model (`model_drafts`), instead of `drafting`."""
    num_drafts: int | None = None
    """How many drafts ride with each step; None: as many as pay."""
    prefix_cache: PrefixCache = True
    """Whether the beginning of the prompt may be shared with other streams; `all`: generated text too."""
    grammar: Grammar | None = None
    """What the generated text must conform to."""
    returns_logits: bool = False
    """Deliver the logits of every position of the prompt, chunk by chunk; `max_tokens` is 1 then, and nothing cached."""

    @property
    def num_positions(self) -> int:
        """KV positions to set aside. Drafts need none of their own: they never reach beyond `max_tokens`."""
        return len(self.prompt) + self.max_tokens

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens of the prompt in one slice."""
        return max(3, MAX_LOGITS_BYTES // (4 * self.vocab_size)) if self.returns_logits else len(self.prompt)


class Stream:
    """The state of one generation."""

    def __init__(self, stream_id: StreamId, request: StreamRequest, now: float) -> None:
        self.id = stream_id
        self.request = request
        self.tokens: list[int] = []
        self.submitted_at = now
        self.deadline = None if request.timeout_s is None else now + request.timeout_s
        self.num_prompt_cached = 0
        self.num_prompt_sent = 0
        """Of the prompt's tokens, those that need not be sent any more: cached ones included."""
        self.num_in_flight = 0
        """Answers that are awaited."""
        self.waiting_since = now
        """When the answer now awaited was last brought nearer: the last send into nothing in flight, or the last answer."""
        self.last_step: StepId = StepId(0)
        self._asked_at: float | None = None
        self._acceptance = Acceptance()
        self._chunks: deque[int] = deque()  # positions that the prompt chunks in flight sample
        self._num_told = 0  # tokens that the drafter knows
        self._guess: tuple[int, ...] = ()
        self._guess_ahead: tuple[int, ...] = ()
        """Of the draft model, for the next turn."""
        self._drafts: tuple[int, ...] = ()
        self._num_undrafted = 0
        """Turns in a row that carried no draft."""
        self._forced: tuple[int, ...] = ()
        """What the grammar leaves no choice about next: a guess that needs no drafter."""
        self._is_certain = False
        """The guess is what the grammar forces: it says nothing about the drafter."""
        self._account = Account(num_prompt_tokens=len(request.prompt), submitted_at=now)

    @property
    def num_prompt_left(self) -> int:
        return len(self.request.prompt) - self.num_prompt_sent

    @property
    def num_prompt_computed(self) -> int:
        """Tokens of the prompt that were not cached."""
        return len(self.request.prompt) - self.num_prompt_cached

    @property
    def is_decoding(self) -> bool:
        """Whether the first token is known: from here on the stream takes decode turns."""
        return bool(self.tokens)

    @property
    def awaits_guess(self) -> bool:
        """Whether the draft model has been asked: the stream takes its turn when it answers, or when it is late."""
        return self._asked_at is not None

    @property
    def is_ready(self) -> bool:
        """Whether the stream waits for a decode turn."""
        return self.is_decoding and not self.num_in_flight and not self.awaits_guess

    @property
    def has_guess(self) -> bool:
        """Whether the next turn needs no guess: one is there, or a grammar leaves no choice."""
        return bool(self._forced or self._guess_ahead)

    @property
    def num_drafts_left(self) -> int:
        """Drafts that could still become tokens: each step brings one token more."""
        return self.request.max_tokens - len(self.tokens) - 1

    @property
    def shared_prompt(self) -> bytes:
        """What stages may look up and offer to others: the prompt's token ids, as far as a header has room for them."""
        return pack_tokens(self.request.prompt[:MAX_SHARED_TOKENS]) if self.request.prefix_cache else b""

    def skip_cached(self, num_tokens: int) -> None:
        """All stages hold the first `num_tokens` of the prompt: begin behind them. Two tokens at least are computed, as one alone would
        run another kernel; a stage that holds more rewinds by the one step rule."""
        self.num_prompt_cached = self.num_prompt_sent = max(0, min(num_tokens, len(self.request.prompt) - 2))
        self._account.cached(self.num_prompt_cached)

    def next_chunk(self, num_tokens: int, step: StepId, now: float) -> Slice:
        """The next `num_tokens` of the prompt; the last ones sample the first token."""
        start = self.num_prompt_sent
        self.num_prompt_sent = start + num_tokens
        self._sent(step, now)
        num_sampled = num_tokens if self.request.returns_logits else int(self.num_prompt_left == 0)
        self._chunks.append(num_sampled)
        return Slice(
            stream=self.id,
            start=start,
            tokens=pack_tokens(self.request.prompt[start : start + num_tokens]),
            kind=SliceKind.PREFILL,
            num_sampled=num_sampled,
            returns_logits=self.request.returns_logits,
        )

    def gains(self, num_drafts: int) -> list[float]:
        """Tokens that each of so many drafts is expected to add."""
        return self._acceptance.gains(max(0, num_drafts))

    def await_guess(self, now: float) -> None:
        """The draft model is asked for the next turn."""
        self._asked_at = now

    def guessed(self, tokens: tuple[int, ...], now: float) -> None:
        """The draft model's guess for the next turn is there, or is waited for no longer; nothing when it was not waited for."""
        if self._asked_at is not None:
            self._account.waited(1e3 * (now - self._asked_at))
            self._asked_at, self._guess_ahead = None, tokens

    def guess(self, max_drafts: int) -> Offer:
        """Ask the drafter what may follow, at most `max_drafts` tokens (or as many as the caller chose), and what each is worth.

        Raises:
            InvalidOptionError: the caller's drafter failed.
        """
        request = self.request
        num_left = self.num_drafts_left
        ahead, self._guess_ahead = self._guess_ahead, ()
        self._is_certain = bool(self._forced)
        if self._forced:
            self._guess, self._forced = self._forced[: min(max_drafts, num_left)], ()
            return Offer((1.0,) * len(self._guess), len(self._guess))  # each saves a step that has to come
        if request.drafts_by_model:
            self._guess = ahead[:num_left]
            return Offer(self._acceptance.gains(len(self._guess)), request.num_drafts)
        if request.drafting is None:
            return _NO_OFFER
        wanted = max_drafts if request.num_drafts is None else request.num_drafts
        limit = min(wanted, num_left)
        untold = self.tokens[self._num_told :]
        self._num_told = len(self.tokens)
        self._guess = draft(request.drafting, untold, max_tokens=limit, vocab_size=request.vocab_size)
        return Offer(self._acceptance.gains(len(self._guess)), request.num_drafts)

    def max_ahead(self, patience: float) -> int:
        """How many steps the chain may take by itself behind the next one.

        Drafts ride with the client's steps only, so a stream that drafts lets the chain go on alone the longer, the longer no draft was
        worth a row: one step for each `patience` turns of that. What a grammar forces rides as a draft.
        """
        request = self.request
        if request.grammar is not None or request.drafts_by_model:
            return 0
        num_left = request.max_tokens - len(self.tokens) - 1
        return num_left if request.drafting is None else min(num_left, int(self._num_undrafted / patience))

    def next_rows(self, num_drafts: int, step: StepId, now: float, *, num_ahead: int = 0) -> Slice:
        """The last token, with the first `num_drafts` tokens of the guess, or with `num_ahead` steps more of the chain's own."""
        assert not (num_drafts and num_ahead)
        self._drafts = self._guess[:num_drafts]
        self._num_undrafted = 0 if num_drafts else self._num_undrafted + 1
        self._sent(step, now, num_answers=1 + num_ahead)
        return Slice(
            stream=self.id,
            start=len(self.request.prompt) + len(self.tokens) - 1,
            tokens=pack_tokens((self.tokens[-1], *self._drafts)),
            kind=SliceKind.ROWS,
            num_sampled=1 + len(self._drafts),
            num_ahead=num_ahead,
        )

    def take_back(self, now: float) -> None:
        """What is in flight is not awaited any longer: the next rows begin behind the last token that is known."""
        self.num_in_flight = 0
        self.waiting_since = now

    def apply(self, result: SliceResult | None, trip: Trip, now: float, logits: Tensor | None = None) -> Delivery | None:
        """Take the answer to the oldest slice in flight; None for a prompt chunk that samples nothing.

        Args:
            result: the answer, None when the slice samples nothing.
            trip: of the step that carried it.
            now: the time.
            logits: [tokens of the answer, vocab], for a stream that asked for them.

        Raises:
            ProtocolError: the answer has another number of tokens than was asked for, or an id out of the vocabulary.
        """
        num_expected = self.num_awaited
        if self._chunks:
            self._chunks.popleft()
        self.num_in_flight -= 1
        self.waiting_since = now
        self._account.answered(trip)
        sampled = unpack_tokens(result.tokens) if result is not None else []
        self._check(sampled, num_expected)
        if not num_expected:
            return None
        if self.request.returns_logits:
            self._check_logits(logits, num_expected)
            if self.num_prompt_left or self.num_in_flight:
                return Delivery((), None, self._account.stats(), None, logits)
            sampled = sampled[-1:]
        forced = unpack_tokens(result.forced) if result is not None and result.forced else []
        self._check_ids(forced)
        new = self._accept(sampled)
        self._forced = tuple(forced)
        finish_reason = self._finish_reason(new)
        self._account.generated(len(new), now)
        logprobs = result.logprobs[: len(new)] if result is not None and result.logprobs is not None else None
        return Delivery(tuple(new), logprobs, self._account.stats(), finish_reason, logits)

    def _accept(self, sampled: list[int]) -> list[int]:
        """The new tokens, up to an end token (included) or `max_tokens`; and what they say about the guess."""
        drafts, self._drafts = self._drafts, ()
        accepted = num_accepted(drafts, sampled) if drafts else 0
        new = sampled[: accepted + 1]
        if self._guess and not self._is_certain:
            # The bonus token shows whether one draft more would have been right: a stream that sends none learns from that.
            self._acceptance.observe(num_accepted(self._guess, new), min(len(self._guess), len(new)))
        self._guess = ()
        new = new[: self.request.max_tokens - len(self.tokens)]
        for count, token in enumerate(new, start=1):
            if token in self.request.eos_token_ids:
                del new[count:]
                break
        if drafts:
            self._account.drafted(len(drafts), min(accepted, len(new)))
        self.tokens += new
        return new

    def _finish_reason(self, new: Sequence[int]) -> FinishReason | None:
        if new[-1] in self.request.eos_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.request.max_tokens else None

    @property
    def num_awaited(self) -> int:
        """Tokens that the oldest slice in flight samples: only the prompt's last chunk and rows sample any."""
        if self.is_decoding:
            return 1 + len(self._drafts)
        return self._chunks[0] if self._chunks else 0

    def _sent(self, step: StepId, now: float, num_answers: int = 1) -> None:
        if not self.num_in_flight:
            self.waiting_since = now
        self.num_in_flight += num_answers
        self.last_step = step
        self._account.sent(now)

    def _check(self, sampled: Sequence[int], num_expected: int) -> None:
        if len(sampled) != num_expected:
            raise ProtocolError(f"the last stage answered {len(sampled)} tokens where {num_expected} were asked for")
        self._check_ids(sampled)

    def _check_logits(self, logits: Tensor | None, num_positions: int) -> None:
        wanted = (num_positions, self.request.vocab_size)
        if logits is None or logits.shape != wanted:
            found = "none" if logits is None else list(logits.shape)
            raise ProtocolError(f"the last stage answered logits {found} where {list(wanted)} were asked for")

    def _check_ids(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.request.vocab_size:
                raise ProtocolError(f"the last stage answered token {token}; the vocabulary has {self.request.vocab_size}")


_NO_OFFER = Offer(())


def logits_by_stream(message: StepResult, tensor: Tensor) -> dict[StreamId, Tensor]:
    """The rows of each stream that asked, as many as it has tokens; a stream whose rows are missing will say so."""
    num_rows = {result.stream: len(result.tokens) // 4 for result in message.results}
    found: dict[StreamId, Tensor] = {}
    begin = 0
    for stream in message.logits_of:
        end = begin + num_rows.get(stream, 0)
        found[stream] = tensor[begin:end]
        begin = end
    return found
