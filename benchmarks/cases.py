"""The ways in which a text can be generated, none of which may change a token; shared by the client processes of `exactness`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.scripted import ScriptedDrafter
from langchain_pshard import PipelineClient
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.generation import Generation, GenerationParams
from langchain_pshard.pipeline.options import ClientOptions

AXES: dict[str, tuple[Any, ...]] = {
    "is_together": (False, True),
    "chunk_tokens": (16, 48, 256),
    "steps_ahead": (0, 7),
    "drafts": ("none", "ngram", "0 %", "50 %", "100 %"),
    "has_prefix_cache": (False, True),
    "is_sampled": (False, True),
    "num_clients": (1, 2),
}
"""Beside the number of stages."""
NUM_DRAFTS = 4
"""Of the drafter that knows the answer; as many as pay with the n-gram drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way of generating."""

    is_together: bool
    """All prompts at once, or one after another."""
    chunk_tokens: int
    """Longest chunk of a prompt."""
    steps_ahead: int
    """Steps that the chain may take by itself."""
    drafts: str
    """`none`, `ngram`, or how many of a scripted drafter's guesses are right."""
    has_prefix_cache: bool
    is_sampled: bool
    num_clients: int
    """Processes that generate the same at the same time."""


PLAIN = Setting(is_together=False, chunk_tokens=256, steps_ahead=0, drafts="none", has_prefix_cache=False, is_sampled=False, num_clients=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is generated."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The tokens of each prompt, and what shows that a setting did what it says."""

    tokens: list[list[int]]
    num_cached: int
    num_drafted: int
    num_accepted: int


class Clients:
    """Clients of one fleet, one for each length of chunk and number of steps ahead: they are settings of a client. A context manager."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._stack = contextlib.ExitStack()
        self._clients: dict[ClientOptions, PipelineClient] = {}

    def client(self, setting: Setting) -> PipelineClient:
        """The client with the setting's options."""
        options = ClientOptions(max_chunk_tokens=setting.chunk_tokens, max_steps_ahead=setting.steps_ahead)
        if options not in self._clients:
            self._clients[options] = self._stack.enter_context(PipelineClient.connect(self._addresses, options=options))
        return self._clients[options]

    def generate(self, task: Task, setting: Setting, answers: Sequence[Sequence[int]]) -> Outcome:
        """Generate every prompt of the task; `answers` is what the scripted drafter knows."""
        client = self.client(setting)

        def one(idx: int) -> Generation:
            params = GenerationParams(
                max_tokens=task.num_tokens,
                ignore_eos=True,
                sampling=SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=idx) if setting.is_sampled else SamplingParams(),
                prefix_cache=setting.has_prefix_cache,
                draft="ngram" if setting.drafts == "ngram" else None,
                draft_tokens=NUM_DRAFTS if setting.drafts.endswith("%") else "auto",
            )
            return client.complete(task.prompts[idx], params, drafter=_scripted(setting, answers[idx] if answers else (), idx))

        indices = range(len(task.prompts))
        with ThreadPoolExecutor(len(indices) if setting.is_together else 1) as pool:
            generations = list(pool.map(one, indices))
        return Outcome(
            tokens=[list(generation.token_ids) for generation in generations],
            num_cached=sum(generation.stats.num_cached_tokens for generation in generations),
            num_drafted=sum(generation.stats.num_drafted_tokens for generation in generations),
            num_accepted=sum(generation.stats.num_accepted_tokens for generation in generations),
        )

    def close(self) -> None:
        """Close all of them. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _scripted(setting: Setting, answer: Sequence[int], seed: int) -> ScriptedDrafter | None:
    if not setting.drafts.endswith("%"):
        return None
    return ScriptedDrafter(answer, chance=float(setting.drafts.removesuffix("%")) / 100, seed=seed)
