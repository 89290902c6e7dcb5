"""What a grammar costs, and what it saves: tokens per second of bound texts against free ones of the same length, on one fleet in turn.

Drafts are off on both sides. Text that a grammar leaves no choice about is verified several tokens at a step all the same: that is a part
of constrained decoding, so it is never switched off but counted, and the two questions are asked of schemas at its two ends.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.prompts import PROMPTS
from benchmarks.report import Figure, Report, Samples
from benchmarks.two_workers import settings, start_two_workers
from langchain_pshard import PipelineClient
from langchain_pshard.core.grammar import Grammar, GrammarKind
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.assembler import joined
from langchain_pshard.pipeline.generation import Generation, GenerationParams

NUM_TOKENS = 128
REPETITIONS = 7
MANY = 8
LEAST_RATIO = 0.90
MOST_FORCED = 0.10
SAMPLINGS = {"greedy": SamplingParams(), "drawn": SamplingParams(temperature=0.8, seed=1)}

PROSE: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 120, "maxLength": 240}, "minItems": 100}
"""Nearly every token is the model's choice, and the grammar is at its dearest: near the bound of a string a mask measures all tokens. The
strings are long because what is forced between them makes steps of another number of rows, and each change of that number costs OpenVINO
4 ms on 16 layers of Gemma 3 270M (8 rows: 7 ms), whatever asked for it."""
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "format_version": {"const": "harbour-measurement/2"},
        "measuring_station": {"const": "Lantern Bay, east pier"},
        "water_level_in_centimetres": {"type": "integer", "minimum": 0, "maximum": 999},
        "wind_speed_in_metres_per_second": {"type": "integer", "minimum": 0, "maximum": 60},
        "direction_of_the_wind": {"enum": ["north", "east", "south", "west"]},
        "is_the_harbour_gate_closed": {"type": "boolean"},
        "responsible_harbour_master": {"const": "to be filled in by the office"},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])
"""A record of fixed format: long keys and constants around a few values."""


def bound_by(schema: dict[str, Any], *, max_tokens: int = 400, sampling: SamplingParams = SAMPLINGS["greedy"]) -> GenerationParams:
    """Without drafts, whatever the schema allows."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return GenerationParams(max_tokens=max_tokens, draft=None, grammar=grammar, sampling=sampling)


def together(client: PipelineClient, prompts: Sequence[str], params: Sequence[GenerationParams]) -> tuple[float, list[Generation]]:
    """The texts of users who ask at the same time, and how many tokens all of them together got per second of the whole."""
    began = time.perf_counter()
    streams = [client.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    generations = [joined(stream) for stream in streams]
    return sum(len(one.token_ids) for one in generations) / (time.perf_counter() - began), generations


@dataclass(slots=True)
class Comparison:
    """One schema against free text of the same lengths."""

    free: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    num_tokens: int = 0
    """Of one repetition, all users together; the same on both sides."""
    num_forced: int = 0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of neighbours in time."""
        return tuple(bound / free for bound, free in zip(self.bound, self.free, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def forced_share(self) -> float:
        """Part of the bound tokens that took no step of their own, because nothing else was allowed."""
        return self.num_forced / self.num_tokens

    def samples(self, name: str) -> tuple[Samples, ...]:
        return (
            Samples(name=f"free, {name}", unit="tok/s", values=tuple(self.free)),
            Samples(name=f"bound, {name}", unit="tok/s", values=tuple(self.bound)),
            Samples(name=f"ratio of neighbours, {name}", unit="", values=self.ratios),
        )


def compare(
    client: PipelineClient, prompts: Sequence[str], bound: GenerationParams, *, repetitions: int, advance: Callable[[], None]
) -> Comparison:
    """Bound and free texts in turn. Bound ones come first, once, unmeasured: their lengths are those of the free ones."""
    params = [bound] * len(prompts)
    _, first = together(client, prompts, params)
    free = [replace(bound, grammar=None, ignore_eos=True, max_tokens=len(generation.token_ids)) for generation in first]
    together(client, prompts, free)
    found = Comparison()
    for _ in range(repetitions):
        free_rate, free_texts = together(client, prompts, free)
        bound_rate, bound_texts = together(client, prompts, params)
        lengths = [[len(one.token_ids) for one in texts] for texts in (free_texts, bound_texts, first)]
        assert lengths[0] == lengths[1] == lengths[2], "both sides generate the same number of tokens"
        found.free.append(free_rate)
        found.bound.append(bound_rate)
        found.num_tokens = sum(lengths[1])
        found.num_forced = sum(one.stats.num_accepted_tokens for one in bound_texts)
        advance()
    return found


def _measured(console: Console, variants: Mapping[str, tuple[GenerationParams, int]]) -> dict[str, Comparison]:
    """Name of a variant to what comes of it; each is its bound side and a number of users."""
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        client = stack.enter_context(PipelineClient.connect(start_two_workers(stack, progress)))
        measuring = progress.add_task(f"{REPETITIONS} x free and bound", total=REPETITIONS * len(variants))
        prompts = list(PROMPTS.values())
        return {
            name: compare(client, prompts[:users], bound, repetitions=REPETITIONS, advance=lambda: progress.advance(measuring))
            for name, (bound, users) in variants.items()
        }


def run_constrained(console: Console) -> Report:
    """Constrained decoding at batch 8 against free text, by a schema that forces nearly nothing (tok/s ratios).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    variants = {name: (bound_by(PROSE, max_tokens=NUM_TOKENS, sampling=sampling), MANY) for name, sampling in SAMPLINGS.items()}
    found = _measured(console, variants)
    return Report(
        bench="constrained",
        question=f"{MANY} users at once, bound by a JSON schema that leaves the model nearly every token, against free text",
        figures=(
            Figure(key="ratio", value=found["greedy"].ratio, at_least=LEAST_RATIO),
            Figure(key="ratio_drawn", value=found["drawn"].ratio, at_least=LEAST_RATIO),
            Figure(key="forced_share", value=max(one.forced_share for one in found.values()), at_most=MOST_FORCED),
        ),
        samples=tuple(samples for name, one in found.items() for samples in one.samples(name)),
        settings=settings(
            users=MANY,
            tokens=found["greedy"].num_tokens,
            drawn=f"temperature {SAMPLINGS['drawn'].temperature}",
            compared="all tokens over the whole time of the calls; no drafts",
        ),
    )


def run_forced(console: Console) -> Report:
    """A record of fixed format against free text of the same length, one user and eight (tok/s ratios).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    found = _measured(console, {"1 user": (bound_by(RECORD), 1), f"{MANY} users": (bound_by(RECORD), MANY)})
    alone, crowd = found.values()
    return Report(
        bench="forced",
        question="a record of fixed format by a JSON schema, forced text included, against free text of the same length",
        figures=(
            Figure(key="ratio", value=alone.ratio, at_least=1.0),
            Figure(key="ratio_batch", value=crowd.ratio, at_least=1.0),
            Figure(key="forced_share", value=alone.forced_share),
        ),
        samples=tuple(samples for name, one in found.items() for samples in one.samples(name)),
        settings=settings(
            users=f"1 and {MANY}",
            tokens=alone.num_tokens,
            compared="all tokens, keys and constants included, over the whole time of the calls; no drafts",
        ),
    )
