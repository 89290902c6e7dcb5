"""What the whole stack is worth over a long way: two users with drafts against one without, 50 and 100 ms on every hop.

The one without decodes plainly: each token crosses all hops, to the client and back. With steps ahead the chain spares the way to the
client; how far that alone gets is told beside.
"""

from __future__ import annotations

import contextlib
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress

from benchmarks.prompts import PROMPTS
from benchmarks.proxy import delayed
from benchmarks.report import Figure, Report, Samples
from benchmarks.scripted import ScriptedDrafter
from benchmarks.two_workers import settings, start_two_workers
from langchain_pshard import PipelineClient
from langchain_pshard.pipeline.generation import Generation, GenerationParams
from langchain_pshard.pipeline.options import ClientOptions

HOPS_MS = (50.0, 100.0)
CHANCE = 0.7
USERS = ("creative", "factual")
NUM_PLAIN_TOKENS = 24
NUM_TOKENS = 128
REPETITIONS = 3
PLAIN = GenerationParams(max_tokens=NUM_PLAIN_TOKENS, ignore_eos=True, draft=None)
WHOLE = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft=None)
FULL = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(slots=True)
class _Series:
    plain: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.full_against(self.plain)

    def full_against(self, other: list[float]) -> float:
        return statistics.median(self.full) / statistics.median(other)


def _decode_rate(generations: list[Generation]) -> float:
    """Tokens per second of all users together, each from its first token to its last."""
    return sum(generation.stats.tokens_per_s for generation in generations)


def _full_stack(client: PipelineClient, answers: dict[str, tuple[int, ...]], turn: int) -> list[Generation]:
    def one(user: str) -> Generation:
        return client.complete(PROMPTS[user], FULL, drafter=ScriptedDrafter(answers[user], chance=CHANCE, seed=turn))

    with ThreadPoolExecutor(len(USERS)) as pool:
        return list(pool.map(one, USERS))


def run(console: Console) -> Report:
    """Two users with drafts of 70 % acceptance against one without, 50 and 100 ms on every hop (tok/s, the smaller ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    series = {hop_ms: _Series() for hop_ms in HOPS_MS}
    num_differing = 0
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        addresses = start_two_workers(stack, progress)
        with PipelineClient.connect(addresses) as near:
            answers = {user: near.complete(PROMPTS[user], WHOLE).token_ids for user in USERS}
        measuring = progress.add_task(f"{REPETITIONS} x {len(HOPS_MS)} distances, plain and full", total=REPETITIONS * len(HOPS_MS))
        for hop_ms, one in series.items():
            with (
                delayed(addresses, hop_ms) as far_addresses,
                PipelineClient.connect(far_addresses) as far,
                PipelineClient.connect(far_addresses, options=ClientOptions(max_steps_ahead=0)) as stepwise,
            ):
                for turn in range(REPETITIONS):
                    one.plain.append(_decode_rate([stepwise.complete(PROMPTS[USERS[0]], PLAIN)]))
                    one.ahead.append(_decode_rate([far.complete(PROMPTS[USERS[0]], PLAIN)]))
                    full = _full_stack(far, answers, turn)
                    one.full.append(_decode_rate(full))
                    for user, generation in zip(USERS, full, strict=True):
                        num_differing += sum(a != b for a, b in zip(answers[user], generation.token_ids, strict=True))
                    progress.advance(measuring)
    return Report(
        bench="wan",
        question=f"{len(USERS)} users with drafts of {CHANCE:.0%} acceptance against one without, over a long way",
        figures=(
            Figure(key="ratio", value=min(one.ratio for one in series.values()), at_least=5.5),
            *(Figure(key=f"ratio_{hop_ms:g}_ms", value=one.ratio) for hop_ms, one in series.items()),
            *(Figure(key=f"ratio_to_ahead_{hop_ms:g}_ms", value=one.full_against(one.ahead)) for hop_ms, one in series.items()),
            Figure(key="differing_tokens", value=num_differing, at_most=0),
        ),
        samples=tuple(
            Samples(name=f"{hop_ms:g} ms a hop, {name}", unit="tok/s", values=tuple(values))
            for hop_ms, one in series.items()
            for name, values in (("plain", one.plain), ("plain with steps ahead", one.ahead), ("full stack", one.full))
        ),
        settings=settings(
            users=f"{len(USERS)} against 1", hops=3, tokens=f"{NUM_TOKENS} against {NUM_PLAIN_TOKENS}", chance=CHANCE, drafts="adaptive"
        ),
    )
