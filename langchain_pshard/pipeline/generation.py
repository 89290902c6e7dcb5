"""What a caller asks of a generation and what comes back; shared by the client, its streams and the chat model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs

DEFAULT_MAX_TOKENS = 1024
MAX_DRAFT_TOKENS = 64
Draft = Literal["auto", "ngram", "model"] | None
_DRAFTS = ("auto", "ngram", "model", None)
PrefixCache = bool | Literal["all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Options of one generation.

    Raises:
        InvalidOptionError: a value out of range; sampling values are checked by `SamplingParams`.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None means `DEFAULT_MAX_TOKENS` or what the context leaves, whichever is less."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float | None = None
    """Longest time from the call to the last token."""
    marks: tuple[str, ...] = ()
    """Special tokens that are shown in the text, for a caller that reads them (tool calls, reasoning)."""
    grammar: Grammar | None = None
    """What the whole text must conform to; the generation ends when it is complete."""
    ignore_eos: bool = False
    """Generate on past end tokens, for measurements of a fixed length."""
    prefix_cache: PrefixCache = True
    """Whether the workers may reuse what they computed for prompts that begin alike, and keep it of this one. No token depends on it,
    unless it is `all`: then generated text counts too, such as the last answer in a chat, which differs in its last bits from a prompt."""
    draft: Draft = "auto"
    """What guesses tokens ahead for the model to verify, which changes the speed, never the text: `ngram` looks the text up in itself,
    `auto` does so where the fleet verifies exactly, `model` asks the fleet's draft model, None is off."""
    draft_tokens: int | Literal["auto"] = "auto"
    """Drafts a step; `auto` sends as many as pay, by measured acceptance and times."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not (isinstance(self.max_tokens, int) and self.max_tokens >= 1):
            raise InvalidOptionError(f"max_tokens={self.max_tokens!r} is out of range; valid: 1 or more, or None")
        stop: object = self.stop
        if isinstance(stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise InvalidOptionError(f"stop={stop!r} is no tuple of strings")
        if any(not text for text in self.stop):
            raise InvalidOptionError("stop contains an empty string, which would end every text at once; remove it")
        if not isinstance(self.prefix_cache, bool) and self.prefix_cache != "all":
            raise InvalidOptionError(f"prefix_cache={self.prefix_cache!r} is unknown; valid: True, False, 'all'")
        if self.draft not in _DRAFTS:
            raise InvalidOptionError(f"draft={self.draft!r} is unknown; valid: 'auto', 'ngram', 'model', None")
        if self.draft_tokens != "auto" and not _is_draft_count(self.draft_tokens):
            raise InvalidOptionError(f"draft_tokens={self.draft_tokens!r} is out of range; valid: 'auto', or 1 to {MAX_DRAFT_TOKENS}")
        if self.timeout_s is not None and not (isinstance(self.timeout_s, int | float) and self.timeout_s > 0):
            raise InvalidOptionError(f"timeout_s={self.timeout_s!r} is out of range; valid: above 0, or None")


def _is_draft_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DRAFT_TOKENS


class FinishReason(Enum):
    """Why a generation ended: an end token or stop string, or `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


class GenerationStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation took. Times in milliseconds, measured at the client. (A msgspec struct because every delivery makes one.)"""

    num_prompt_tokens: int
    num_generated_tokens: int
    """Every token the model produced, an end token included."""
    num_cached_tokens: int
    """Prompt tokens whose KV was reused."""
    num_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    queue_ms: float
    """From the call to the first step sent."""
    first_token_ms: float
    """From the call to the first token."""
    decode_ms: float
    """From the first token to the last."""
    stage_compute_ms: tuple[float, ...]
    """Total time in inference, per stage of the chain, over the steps of this stream (shared with others in the batch)."""
    stage_queue_ms: tuple[float, ...]
    """The same, waiting at a stage for its turn."""
    way_ms: float = 0.0
    """Total time of this stream's steps outside the stages: client to first stage, stage to stage, last stage to client or to the first."""
    num_hops: int = 0
    """Links that its steps crossed, all together."""
    guess_ms: float = 0.0
    """Total time that the stream waited for guesses of the draft model."""

    @property
    def hop_ms(self) -> float:
        """Mean time of one crossing of one link, with what both ends spend on it."""
        return self.way_ms / self.num_hops if self.num_hops else 0.0

    @property
    def acceptance(self) -> float:
        """Part of the drafts that became tokens; 0 when none were sent."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding rate after the first token; 0 when there was no second one."""
        return 1e3 * (self.num_generated_tokens - 1) / self.decode_ms if self.decode_ms > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnd:
    """The last chunk's account of the generation."""

    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """A piece of a generation: some text (possibly none yet), the tokens behind it, and on the last chunk the end."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    end: GenerationEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A whole generation, joined."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stats: GenerationStats
