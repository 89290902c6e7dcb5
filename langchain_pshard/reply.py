"""What the pipeline generated -> LangChain messages. Pure; shared by the sync and async halves of the chat model."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs
from langchain_pshard.pipeline.generation import FinishReason, GenerationChunk, GenerationEnd, GenerationStats
from langchain_pshard.tokenizer import Tokenizer
from langchain_pshard.tool_formats import BrokenCall, CallPiece, TextPiece, as_json_string, breaking_suffix
from langchain_pshard.turn import ReasoningPiece, TurnPlan, TurnReader

PROVIDER = "pshard"
_PLAIN = TurnPlan()


@dataclass(slots=True)
class _Call:
    """A tool call as far as it was told. Mistral's templates insist on ids of nine letters and digits; the others take any."""

    name: str | None
    args: str = ""
    id: str = field(default_factory=lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9)))
    error: str | None = None
    raw: str = ""


@dataclass(slots=True)
class _Parts:
    """What a piece of an answer comes to."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallChunk] = field(default_factory=list)

    @property
    def extras(self) -> dict[str, Any]:
        return {"reasoning_content": self.reasoning} if self.reasoning else {}


class Reply:
    """The messages of one call. Everything about the call as a whole is on exactly one chunk, the last: LangChain adds chunks up."""

    def __init__(
        self,
        *,
        model_name: str,
        sampling: SamplingParams,
        strips_start: bool,
        tokenizer: Tokenizer,
        plan: TurnPlan = _PLAIN,
    ) -> None:
        """
        Args:
            model_name: what `response_metadata` calls the model.
            sampling: how tokens are drawn; the seed is reported when it mattered.
            strips_start: leave out white space before the first word, which plain-text dialogues begin an answer with.
            tokenizer: names the tokens of log-probabilities.
            plan: what the answer may hold beside text.
        """
        self._model_name = model_name
        self._sampling = sampling
        self._strips_start = strips_start
        self._tokenizer = tokenizer
        self._reader = TurnReader(plan)
        self._calls: dict[int, _Call] = {}

    def chunk(self, piece: GenerationChunk) -> ChatGenerationChunk | None:
        """The next chunk; None when there is nothing to tell yet."""
        parts = self._parts(piece)
        metadata = self._logprobs(piece)
        if piece.end is None:
            if not (parts.text or parts.reasoning or parts.calls or metadata):
                return None
            return ChatGenerationChunk(message=_message(parts, metadata))
        return ChatGenerationChunk(
            message=_message(parts, metadata | self._metadata(piece.end), usage_metadata=_usage(piece.end.stats), chunk_position="last")
        )

    def result(self, pieces: Iterable[GenerationChunk]) -> ChatResult:
        """The whole reply at once."""
        whole = _Parts()
        logprobs: list[dict[str, Any]] = []
        end: GenerationEnd | None = None
        for piece in pieces:
            parts = self._parts(piece)
            whole.text += parts.text
            whole.reasoning += parts.reasoning
            logprobs += self._logprobs(piece).get("logprobs", {}).get("content", [])
            end = piece.end
        assert end is not None, "a generation ends with a chunk that says so"
        metadata = self._metadata(end)
        if self._sampling.top_logprobs is not None:
            metadata["logprobs"] = {"content": logprobs}
        calls, broken = self._whole_calls()
        message = AIMessage(
            content=whole.text,
            additional_kwargs=whole.extras,
            tool_calls=calls,
            invalid_tool_calls=broken,
            usage_metadata=_usage(end.stats),
            response_metadata=metadata,
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _parts(self, piece: GenerationChunk) -> _Parts:
        found = self._reader.push(self._text(piece))
        if piece.end is not None:
            found += self._reader.finish()
        parts = _Parts()
        for one in found:
            match one:
                case TextPiece(text):
                    parts.text += text
                case ReasoningPiece(text):
                    parts.reasoning += text
                case CallPiece() | BrokenCall():
                    parts.calls.append(self._call(one))
        return parts

    def _call(self, piece: CallPiece | BrokenCall) -> ToolCallChunk:
        """The chunk of a piece of a call; its id comes with the first one."""
        known = self._calls.get(piece.index)
        call = known if known is not None else self._calls.setdefault(piece.index, _Call(piece.name))
        if isinstance(piece, CallPiece):
            args = piece.args
        else:
            call.error, call.raw = piece.reason, piece.raw
            args = breaking_suffix(call.args) if known is not None else as_json_string(piece.raw)
        call.args += args
        name, call_id = (call.name, call.id) if known is None else (None, None)
        return tool_call_chunk(name=name, args=args, id=call_id, index=piece.index)

    def _whole_calls(self) -> tuple[list[ToolCall], list[InvalidToolCall]]:
        good: list[ToolCall] = []
        broken: list[InvalidToolCall] = []
        for call in self._calls.values():
            if call.error is not None:
                broken.append(invalid_tool_call(name=call.name, args=call.raw, id=call.id, error=call.error))
            else:
                assert call.name is not None  # the reader tells a call's name first, or that it is broken
                good.append(tool_call(name=call.name, args=json.loads(call.args, strict=False), id=call.id))
        return good, broken

    def _text(self, piece: GenerationChunk) -> str:
        if not self._strips_start:
            return piece.text
        text = piece.text.lstrip()
        self._strips_start = not text
        return text

    def _metadata(self, end: GenerationEnd) -> dict[str, Any]:
        stats = end.stats
        is_call = end.finish_reason is FinishReason.STOP and any(call.error is None for call in self._calls.values())
        metadata: dict[str, Any] = {
            "finish_reason": "tool_calls" if is_call else end.finish_reason.value,
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

    def _logprobs(self, piece: GenerationChunk) -> dict[str, Any]:
        """Log-probabilities of a piece's tokens, in the form that LangChain's other chat models give them."""
        if not piece.logprobs:
            return {}
        pairs = zip(piece.token_ids, piece.logprobs, strict=False)
        return {"logprobs": {"content": [self._token(token, found) for token, found in pairs]}}

    def _token(self, token: int, found: TokenLogprobs) -> dict[str, Any]:
        top = [{"token": self._tokenizer.token_text(other), "logprob": value} for other, value in found.top]
        return {"token": self._tokenizer.token_text(token), "logprob": found.chosen, "top_logprobs": top}


def _message(parts: _Parts, metadata: dict[str, Any], **more: Any) -> AIMessageChunk:
    return AIMessageChunk(
        content=parts.text, additional_kwargs=parts.extras, tool_call_chunks=parts.calls, response_metadata=metadata, **more
    )


def _usage(stats: GenerationStats) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=stats.num_prompt_tokens,
        output_tokens=stats.num_generated_tokens,
        total_tokens=stats.num_prompt_tokens + stats.num_generated_tokens,
        input_token_details=InputTokenDetails(cache_read=stats.num_cached_tokens),
    )
