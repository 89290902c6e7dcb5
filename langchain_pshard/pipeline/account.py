"""What a generation has taken so far. Pure; the reactor asks for it with every delivery, so it has to be cheap."""

from __future__ import annotations

from typing import NamedTuple

from langchain_pshard.core.messages import StageTiming
from langchain_pshard.pipeline.generation import GenerationStats


class Trip(NamedTuple):
    """What became of a step's time."""

    timings: tuple[StageTiming, ...]
    """By stage."""
    way_ms: float
    """Outside the stages."""
    num_hops: int
    """Links that it crossed."""


class Account:
    """Counts and times of one stream."""

    __slots__ = (
        "_compute_ms",
        "_first_token_at",
        "_guess_ms",
        "_last_token_at",
        "_num_accepted",
        "_num_cached",
        "_num_drafted",
        "_num_hops",
        "_num_prompt_tokens",
        "_num_steps",
        "_num_tokens",
        "_queue_ms",
        "_started_at",
        "_submitted_at",
        "_way_ms",
    )

    def __init__(self, *, num_prompt_tokens: int, submitted_at: float) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._submitted_at = submitted_at
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at = submitted_at
        self._num_tokens = 0
        self._num_steps = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._num_cached = 0
        self._num_hops = 0
        self._compute_ms: list[float] = []
        self._queue_ms: list[float] = []
        self._way_ms = 0.0
        self._guess_ms = 0.0

    def cached(self, num_tokens: int) -> None:
        """So many tokens of the prompt need no computing."""
        self._num_cached = num_tokens

    def sent(self, now: float) -> None:
        """A slice went out."""
        if self._started_at is None:
            self._started_at = now

    def answered(self, trip: Trip) -> None:
        """The step that carried a slice came back."""
        self._num_steps += 1
        self._num_hops += trip.num_hops
        for idx, timing in enumerate(trip.timings):
            if idx == len(self._compute_ms):
                self._compute_ms.append(0.0)
                self._queue_ms.append(0.0)
            self._compute_ms[idx] += timing.compute_us / 1e3
            self._queue_ms[idx] += timing.queue_us / 1e3
        if trip.num_hops:  # what a worker spends between two steps of its own is no way
            self._way_ms += trip.way_ms

    def generated(self, num_tokens: int, now: float) -> None:
        """New tokens, confirmed."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now
        self._num_tokens += num_tokens

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """So many drafts rode, so many of them became tokens."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted

    def waited(self, milliseconds: float) -> None:
        """For the draft model."""
        self._guess_ms += milliseconds

    def stats(self) -> GenerationStats:
        first_token_at = self._last_token_at if self._first_token_at is None else self._first_token_at
        started_at = first_token_at if self._started_at is None else self._started_at
        return GenerationStats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_tokens,
            num_cached_tokens=self._num_cached,
            num_steps=self._num_steps,
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            queue_ms=1e3 * (started_at - self._submitted_at),
            first_token_ms=1e3 * (first_token_at - self._submitted_at),
            decode_ms=1e3 * (self._last_token_at - first_token_at),
            stage_compute_ms=tuple(self._compute_ms),
            stage_queue_ms=tuple(self._queue_ms),
            way_ms=self._way_ms,
            num_hops=self._num_hops,
            guess_ms=self._guess_ms,
        )
