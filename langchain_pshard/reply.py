"""What the pipeline generated -> LangChain messages. Pure; shared by the sync and async halves of the chat model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.generation import GenerationChunk, GenerationEnd, GenerationStats

PROVIDER = "pshard"


class Reply:
    """The messages of one call. Everything about the call as a whole is on exactly one chunk, the last: LangChain adds chunks up."""

    def __init__(self, *, model_name: str, sampling: SamplingParams, strips_start: bool) -> None:
        """
        Args:
            model_name: what `response_metadata` calls the model.
            sampling: how tokens are drawn; the seed is reported when it mattered.
            strips_start: leave out white space before the first word, which plain-text dialogues begin an answer with.
        """
        self._model_name = model_name
        self._sampling = sampling
        self._strips_start = strips_start

    def chunk(self, piece: GenerationChunk) -> ChatGenerationChunk | None:
        """The next chunk; None when there is nothing to tell yet."""
        text = self._text(piece)
        if piece.end is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=text)) if text else None
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=text,
                usage_metadata=_usage(piece.end.stats),
                response_metadata=self._metadata(piece.end),
                chunk_position="last",
            )
        )

    def result(self, pieces: Iterable[GenerationChunk]) -> ChatResult:
        """The whole reply at once."""
        texts: list[str] = []
        end: GenerationEnd | None = None
        for piece in pieces:
            texts.append(self._text(piece))
            end = piece.end
        assert end is not None, "a generation ends with a chunk that says so"
        message = AIMessage(content="".join(texts), usage_metadata=_usage(end.stats), response_metadata=self._metadata(end))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _text(self, piece: GenerationChunk) -> str:
        if not self._strips_start:
            return piece.text
        text = piece.text.lstrip()
        self._strips_start = not text
        return text

    def _metadata(self, end: GenerationEnd) -> dict[str, Any]:
        stats = end.stats
        metadata: dict[str, Any] = {
            "finish_reason": end.finish_reason.value,
            "model_name": self._model_name,
            "model_provider": PROVIDER,
            "timings": {
                "num_steps": stats.num_steps,
                "queue_ms": stats.queue_ms,
                "first_token_ms": stats.first_token_ms,
                "decode_ms": stats.decode_ms,
                "tokens_per_s": stats.tokens_per_s,
                "stage_compute_ms": list(stats.stage_compute_ms),
                "stage_queue_ms": list(stats.stage_queue_ms),
                "hop_ms": stats.hop_ms,
                "num_drafted_tokens": stats.num_drafted_tokens,
                "num_accepted_tokens": stats.num_accepted_tokens,
            },
        }
        if not self._sampling.is_greedy:
            metadata["seed"] = self._sampling.seed
        return metadata


def _usage(stats: GenerationStats) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=stats.num_prompt_tokens,
        output_tokens=stats.num_generated_tokens,
        total_tokens=stats.num_prompt_tokens + stats.num_generated_tokens,
        input_token_details=InputTokenDetails(cache_read=stats.num_cached_tokens),
    )
