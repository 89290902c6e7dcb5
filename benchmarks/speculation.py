"""What speculation is worth to one user: the same prompts with and without drafts, alternating on one fleet."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.progress import Progress

from benchmarks.prompts import PROMPTS
from benchmarks.report import Figure, Report, Samples
from benchmarks.scripted import ScriptedDrafter
from benchmarks.two_workers import settings, start_two_workers
from langchain_pshard import PipelineClient
from langchain_pshard.pipeline.generation import Generation, GenerationParams

NUM_TOKENS = 256
REPETITIONS = 3
PLAIN = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft=None)
NGRAM = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft="ngram")

SCRIPTED_CHANCE = 0.75
SCRIPTED_DRAFTS = 3
SCRIPTED = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft_tokens=SCRIPTED_DRAFTS)
SCRIPTED_REPETITIONS = 5


@dataclass(slots=True)
class _Series:
    """One prompt, again and again."""

    answer: tuple[int, ...] = ()
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    num_differing: int = 0
    drafts: int = 0
    accepted: int = 0

    @property
    def ratio(self) -> float:
        return statistics.median(self.drafted) / statistics.median(self.plain)

    def measure(self, plain: Callable[[], Generation], drafted: Callable[[], Generation]) -> None:
        rate, generation = _timed(plain)
        self.answer = self.answer or generation.token_ids
        self.plain.append(rate)
        self._compare(generation)
        rate, generation = _timed(drafted)
        self.drafted.append(rate)
        self._compare(generation)
        self.drafts += generation.stats.num_drafted_tokens
        self.accepted += generation.stats.num_accepted_tokens

    def _compare(self, generation: Generation) -> None:
        self.num_differing += sum(one != other for one, other in zip(self.answer, generation.token_ids, strict=True))


def _timed(generate: Callable[[], Generation]) -> tuple[float, Generation]:
    """Tokens per second as a user sees them: all tokens over the whole time of the call, the prompt included."""
    started = time.perf_counter()
    generation = generate()
    return len(generation.token_ids) / (time.perf_counter() - started), generation


def _samples(series: dict[str, _Series]) -> tuple[Samples, ...]:
    plain = tuple(Samples(name=f"{name}, plain", unit="tok/s", values=tuple(one.plain)) for name, one in series.items())
    drafted = tuple(
        Samples(name=f"{name}, drafts ({one.accepted / max(1, one.drafts):.0%} taken)", unit="tok/s", values=tuple(one.drafted))
        for name, one in series.items()
    )
    return (*plain, *drafted)


def _differing(series: Sequence[_Series]) -> Figure:
    return Figure(key="differing_tokens", value=sum(one.num_differing for one in series), at_most=0)


def run_ngram(console: Console) -> Report:
    """One user, n-gram drafts and adaptive K against none, 8 kinds of prompt on two workers (tok/s ratios).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    series = {name: _Series() for name in PROMPTS}
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        client = stack.enter_context(PipelineClient.connect(start_two_workers(stack, progress)))
        measuring = progress.add_task(
            f"{REPETITIONS} x {len(PROMPTS)} prompts x {NUM_TOKENS} tokens, twice", total=REPETITIONS * len(PROMPTS)
        )
        client.complete("Once upon a time", NGRAM)
        for _ in range(REPETITIONS):
            for name, prompt in PROMPTS.items():
                series[name].measure(partial(client.complete, prompt, PLAIN), partial(client.complete, prompt, NGRAM))
                progress.advance(measuring)
    ratios = [one.ratio for one in series.values()]
    return Report(
        bench="speculation",
        question="one user, n-gram drafts with adaptive K against none, 8 kinds of prompt",
        figures=(
            Figure(key="mean_ratio", value=statistics.fmean(ratios), at_least=1.9),
            Figure(key="min_ratio", value=min(ratios), at_least=1.25),
            _differing(list(series.values())),
        ),
        samples=_samples(series),
        settings=settings(users=1, tokens=NUM_TOKENS, **{f"ratio {name}": round(one.ratio, 2) for name, one in series.items()}),
    )


def run_scripted(console: Console) -> Report:
    """One user, a scripted drafter of 75 % acceptance and no cost, K=3, against none (tok/s ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    one = _Series()
    prompt = PROMPTS["creative"]
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        client = stack.enter_context(PipelineClient.connect(start_two_workers(stack, progress)))
        measuring = progress.add_task(f"{SCRIPTED_REPETITIONS} x {NUM_TOKENS} tokens, twice", total=SCRIPTED_REPETITIONS)
        client.complete(prompt, PLAIN)
        for turn in range(SCRIPTED_REPETITIONS):
            one.measure(
                lambda: client.complete(prompt, PLAIN),
                lambda turn=turn: client.complete(prompt, SCRIPTED, drafter=ScriptedDrafter(one.answer, chance=SCRIPTED_CHANCE, seed=turn)),
            )
            progress.advance(measuring)
    return Report(
        bench="scripted",
        question=f"one user, a scripted drafter of {SCRIPTED_CHANCE:.0%} acceptance, K={SCRIPTED_DRAFTS}, against none",
        figures=(Figure(key="ratio", value=one.ratio, at_least=2.1), _differing([one])),
        samples=_samples({"scripted": one}),
        settings=settings(users=1, tokens=NUM_TOKENS, drafts=SCRIPTED_DRAFTS, chance=SCRIPTED_CHANCE),
    )
