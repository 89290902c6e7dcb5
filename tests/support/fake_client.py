"""A client that answers from a script, for what a real fleet would not show: exact chunks, faults at a moment, who was asked what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from langchain_pshard.pipeline.generation import FinishReason, GenerationChunk, GenerationEnd, GenerationParams, GenerationStats
from langchain_pshard.tokenizer import Tokenizer


class FakeClient:
    """Each call takes the next script; the last one repeats. A script is a list of texts and exceptions."""

    def __init__(self, tokenizer: Tokenizer, *scripts: Sequence[str | Exception]) -> None:
        self.tokenizer = tokenizer
        self.manifest: Any = SimpleNamespace(model_name="fake-model", fingerprint="f" * 64, context_length=2048)
        self.scripts = list(scripts) or [["Hello", " world"]]
        self.prompts: list[str] = []
        self.params: list[GenerationParams] = []
        self.num_stopped = 0
        self.is_closed = False
        self.is_open = True
        self.barrier: threading.Barrier | None = None
        self.is_endless = False
        self.end_text = "!"
        self.finish_reason = FinishReason.STOP

    def generate(self, prompt: list[int], params: GenerationParams) -> Iterator[GenerationChunk]:
        try:
            for item in self._script(prompt, params):
                if self.barrier:
                    self.barrier.wait(timeout=10)
                yield self._next(item)
            yield self._end(prompt)
        except GeneratorExit:
            self.num_stopped += 1
            raise

    async def agenerate(self, prompt: list[int], params: GenerationParams) -> AsyncIterator[GenerationChunk]:
        try:
            for item in self._script(prompt, params):
                await asyncio.sleep(0)
                yield self._next(item)
            while self.is_endless:
                await asyncio.sleep(0.01)
            yield self._end(prompt)
        except (GeneratorExit, asyncio.CancelledError):
            self.num_stopped += 1
            raise

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _script(self, prompt: list[int], params: GenerationParams) -> Sequence[str | Exception]:
        self.prompts.append(self.tokenizer._fast.decode(prompt, skip_special_tokens=False))
        self.params.append(params)
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]

    def _next(self, item: str | Exception) -> GenerationChunk:
        if isinstance(item, Exception):
            raise item
        return GenerationChunk(text=item, token_ids=(1,))

    def _end(self, prompt: list[int]) -> GenerationChunk:
        stats = GenerationStats(
            num_prompt_tokens=len(prompt),
            num_generated_tokens=3,
            num_cached_tokens=2,
            num_steps=3,
            num_drafted_tokens=6,
            num_accepted_tokens=2,
            queue_ms=1.0,
            first_token_ms=2.0,
            decode_ms=4.0,
            stage_compute_ms=(1.5,),
            stage_queue_ms=(0.0,),
            way_ms=6.0,
            num_hops=6,
        )
        return GenerationChunk(text=self.end_text, token_ids=(2,), end=GenerationEnd(finish_reason=self.finish_reason, stats=stats))


WORKERS = ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
Serve = Callable[..., FakeClient]
"""Makes whatever connects from now on get a fake with these scripts; the fixture of that name."""


def connections(client: FakeClient) -> list[Any]:
    return client.connected  # type: ignore[attr-defined, no-any-return]
