"""Whether a text depends on anything but itself: the same prompts over every number of stages, alone and in company, in short and long
chunks, with every kind of draft, with and without steps ahead, with and without shared prefixes, greedy and sampled, from one client
process and from two.

All of it at once would be 1,440 settings and hours. For each number of stages a covering design is run instead: every value of each axis
together with every value of each other axis, a different selection for each number of stages. Every generation is compared over its whole
length with that of one stage, one stream, one chunk, no drafts, no steps ahead, no cache.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.cases import AXES, PLAIN, Clients, Outcome, Setting, Task
from benchmarks.covering import covering
from benchmarks.fleet import available_cores, running_worker
from benchmarks.processes import JsonProcess
from benchmarks.prompts import PROMPTS
from benchmarks.report import Figure, Report
from benchmarks.second_client import ask, outcome, second_client
from langchain_pshard.core.bundle import TOKENIZER_DIR, WeightMode
from langchain_pshard.tokenizer import Tokenizer

CUTS: dict[int, tuple[int, ...]] = {1: (18,), 2: (16, 2), 3: (9, 7, 2)}
"""Layers of each stage, by the number of stages."""
NUM_TOKENS = 256
NUM_SHARED_TOKENS = 72
"""All prompts begin alike, with the first tokens of this text: two blocks of KV to share, and several chunks to cut."""
_SHARED_TEXT = Path(__file__).with_name("harbour.txt")
_Answers = dict[bool, list[list[int]]]
"""By whether they are sampled."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """One number of stages."""

    num_stages: int
    settings: int = 0
    cases: int = 0
    """Generations compared."""
    tokens: int = 0
    differing_tokens: int = 0
    cached_prompt_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    differing_settings: list[str] = field(default_factory=list)

    def add(self, setting: Setting, found: Outcome, answers: Sequence[Sequence[int]]) -> None:
        """Compare what came of a setting with what it should be."""
        num_differing = sum(_num_differing(tokens, answer) for tokens, answer in zip(found.tokens, answers, strict=True))
        self.cases += len(answers)
        self.tokens += sum(len(answer) for answer in answers)
        self.differing_tokens += num_differing
        self.cached_prompt_tokens += found.num_cached
        self.drafted_tokens += found.num_drafted
        self.accepted_tokens += found.num_accepted
        if num_differing:
            self.differing_settings.append(str(setting))


def _num_differing(tokens: Sequence[int], answer: Sequence[int]) -> int:
    return sum(one != other for one, other in itertools.zip_longest(tokens, answer))


def design(num_stages: int) -> list[Setting]:
    """The settings of so many stages: every pair of values of two axes is in one of them."""
    return [Setting(**row) for row in covering(AXES, seed=num_stages)]


def compare(bundles: Mapping[int, Path], task: Task, progress: Progress) -> list[Tally]:
    """Run the design over the bundles, which are one model in as many stages as their keys say.

    Raises:
        ProcessError: a worker or the second client ended, or did not answer in time.
        PShardError: a generation failed.
    """
    answers: _Answers = {}
    tallies = []
    designs = {num_stages: design(num_stages) for num_stages in bundles}
    running = progress.add_task(f"{len(task.prompts)} prompts x {task.num_tokens} tokens in each of", total=sum(map(len, designs.values())))
    for num_stages, bundle in bundles.items():
        with contextlib.ExitStack() as stack:
            cores = itertools.cycle(available_cores())
            workers = [stack.enter_context(running_worker(bundle, idx, cores=[next(cores)])) for idx in range(num_stages)]
            addresses = [worker.address for worker in workers]
            clients = stack.enter_context(Clients(addresses))
            second = stack.enter_context(second_client(addresses))
            if not answers:
                assert num_stages == 1, "what is right is what one stage says"
                answers = {
                    is_sampled: clients.generate(task, replace(PLAIN, is_sampled=is_sampled), ()).tokens for is_sampled in (False, True)
                }
            tally = Tally(num_stages=num_stages)
            for setting in designs[num_stages]:
                _run_setting(clients, second, task, setting, answers[setting.is_sampled], tally)
                progress.advance(running)
            tallies.append(tally)
    return tallies


def _run_setting(
    clients: Clients, second: JsonProcess, task: Task, setting: Setting, answers: Sequence[Sequence[int]], tally: Tally
) -> None:
    has_second = setting.num_clients == 2
    if has_second:
        ask(second, task, setting, answers)
    tally.settings += 1
    tally.add(setting, clients.generate(task, setting, answers), answers)
    if has_second:
        tally.add(setting, outcome(second), answers)


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Eight prompts that begin alike."""
    shared = tokenizer.encode(_SHARED_TEXT.read_text(encoding="utf-8"))[:NUM_SHARED_TOKENS]
    return [shared + tokenizer.encode(text)[1:] for text in PROMPTS.values()]  # one begin token


def run(console: Console) -> Report:
    """Tokens that depend on stages, company, chunks, drafts, shared prefixes or other clients (number of differing ones)."""
    started = time.monotonic()
    with Progress(console=console) as progress:
        exporting = progress.add_task("bundles (exported once per machine)", total=len(CUTS))
        bundles = {}
        for num_stages, layers in CUTS.items():
            bundles[num_stages] = demo_bundle(weights=WeightMode.INT4, layers=layers)
            progress.advance(exporting)
        prompts = prompts_of(Tokenizer.from_folder(bundles[1] / TOKENIZER_DIR))
        tallies = compare(bundles, Task(prompts=prompts, num_tokens=NUM_TOKENS), progress)
    return report(tallies, num_tokens=NUM_TOKENS, num_prompts=len(PROMPTS), minutes=round((time.monotonic() - started) / 60, 1))


def report(tallies: Sequence[Tally], **settings: object) -> Report:
    """What the tallies come to."""
    return Report(
        bench="exactness",
        question="does any token depend on stages, company, chunks, drafts, shared prefixes, sampling beside others, or other clients",
        figures=(
            Figure(key="cases", value=sum(tally.cases for tally in tallies)),
            Figure(key="differing_tokens", value=sum(tally.differing_tokens for tally in tallies), at_most=0),
        ),
        tables={
            "stages": [
                {
                    "stages": tally.num_stages,
                    "settings": tally.settings,
                    "cases": tally.cases,
                    "tokens": tally.tokens,
                    "differing": tally.differing_tokens,
                    "cached prompt tokens": tally.cached_prompt_tokens,
                    "drafts": tally.drafted_tokens,
                    "accepted": tally.accepted_tokens,
                }
                for tally in tallies
            ]
        },
        settings={
            "model": "Gemma 3 270M",
            "weights": WeightMode.INT4.value,
            "numerics": "fast",
            "design": f"every pair of values of {len(AXES)} axes, for each number of stages",
            "full product": len(tallies) * math.prod(len(values) for values in AXES.values()),
            **{f"axis {name}": "/".join(map(str, values)) for name, values in AXES.items()},
            **{f"differing at {tally.num_stages} stages": tally.differing_settings for tally in tallies if tally.differing_settings},
            **settings,
        },
    )
