"""Settings of a client: every wait and queue it has, with its bound."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.messages import MAX_STEPS_AHEAD
from langchain_pshard.pipeline.scheduler import MAX_CHUNK_TOKENS, MIN_CHUNK_LIMIT

DEFAULT_STEPS_AHEAD = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Bounds of a `PipelineClient`; the defaults suit a local network.

    Raises:
        InvalidOptionError: a value that is not above 0, or a chunk length out of range.
    """

    liveness_timeout_s: float = 8.0
    """A worker not heard of for so long is lost. Longer than the longest single inference of a stage."""
    ping_interval_s: float = 2.0
    queue_timeout_s: float = 60.0
    """Longest wait of a stream for KV room."""
    step_timeout_s: float = 60.0
    """Longest time a stream's step may take while all workers answer pings."""
    max_waiting: int = 1024
    """Streams that may wait for KV room; one more is refused at once."""
    max_draft_tokens: int = 16
    """Most drafts in one step of one stream when the client chooses their number (`draft_tokens="auto"`)."""
    max_chunk_tokens: int = MAX_CHUNK_TOKENS
    """Most tokens of a prompt in one step. No token of a text depends on it: shorter chunks let others in sooner, longer ones cost less."""
    max_steps_ahead: int = DEFAULT_STEPS_AHEAD
    """Most decode steps that the chain takes by itself behind one of the client's: the last worker hands the token that it sampled to the
    first one, which spares the way to the client and back. No token depends on it. Where the last worker cannot reach the first one: 0."""
    cache_dir: Path | None = None
    """Where manifests and tokenizers are kept; None is the user's cache folder."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("cache_dir", "max_steps_ahead") and not value > 0:
                raise InvalidOptionError(f"{field.name}={value} is out of range; valid: above 0")
        steps: object = self.max_steps_ahead
        if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps <= MAX_STEPS_AHEAD:
            raise InvalidOptionError(f"max_steps_ahead={steps!r} is out of range; valid: 0 to {MAX_STEPS_AHEAD}")
        if not MIN_CHUNK_LIMIT <= self.max_chunk_tokens <= MAX_CHUNK_TOKENS:
            raise InvalidOptionError(
                f"max_chunk_tokens={self.max_chunk_tokens} is out of range; valid: {MIN_CHUNK_LIMIT} to {MAX_CHUNK_TOKENS}"
            )
