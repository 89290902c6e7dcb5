"""Deliveries of tokens -> chunks of text, the same for sync and async callers, run on the caller's side. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from langchain_pshard.core.sampling import TokenLogprobs
from langchain_pshard.pipeline.generation import FinishReason, Generation, GenerationChunk, GenerationEnd, GenerationStats
from langchain_pshard.pipeline.stream import Delivery


class TextSource(Protocol):
    """Token ids in, text that is safe to show out: `langchain_pshard.output.TextStream`."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; nothing shows after it."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Assembler:
    """One generation's chunks. After the chunk that has an `end` there are no more."""

    def __init__(self, text: TextSource) -> None:
        self._text = text

    def chunk(self, delivery: Delivery) -> GenerationChunk:
        """The chunk of these tokens. Its `end` is set by a stop string, or by the stream's own end.

        Tokens behind a stop string are left out and not counted: how many verified drafts came along with it is a matter of speed, and no
        part of an answer may depend on that.
        """
        reason = delivery.finish_reason
        # A stream that stopped by itself did so at an end token, which never shows, whatever the tokenizer thinks of it.
        visible = delivery.tokens[:-1] if reason is FinishReason.STOP else delivery.tokens
        text = ""
        num_kept = len(delivery.tokens)
        for count, token in enumerate(visible, start=1):
            text += self._text.push((token,))
            if self._text.is_stopped:
                num_kept = count
                break
        if reason is not None and not self._text.is_stopped:
            text += self._text.finish()
        if self._text.is_stopped:
            reason = FinishReason.STOP
        return GenerationChunk(
            text=text,
            token_ids=delivery.tokens[:num_kept],
            logprobs=delivery.logprobs if delivery.logprobs is None else delivery.logprobs[:num_kept],
            end=None if reason is None else GenerationEnd(finish_reason=reason, stats=_without(delivery, num_kept)),
        )


def _without(delivery: Delivery, num_kept: int) -> GenerationStats:
    """The account of a delivery of which only the first tokens count."""
    stats = delivery.stats
    return msgspec.structs.replace(stats, num_generated_tokens=stats.num_generated_tokens - len(delivery.tokens) + num_kept)


def joined(chunks: Iterable[GenerationChunk]) -> Generation:
    """The whole generation of all its chunks, the last of which has the end."""
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    has_logprobs = False
    end: GenerationEnd | None = None
    for chunk in chunks:
        text.append(chunk.text)
        token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            has_logprobs = True
            logprobs += chunk.logprobs
        end = chunk.end
    assert end is not None
    return Generation(
        text="".join(text),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if has_logprobs else None,
        finish_reason=end.finish_reason,
        stats=end.stats,
    )
