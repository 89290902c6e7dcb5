"""What several users get from two balanced stages, one core each: tokens per second of all together, prompts included.

Against one user of the same fleet, and against openvino_genai on the whole model: one user on one core, or as many users on both cores.
All processes stay up through a run and take turns. Our client has no core to itself: it shares those of the workers.

The ratios are of plain decoding. What many users get who leave the settings as they are, n-gram drafts included, is told beside; the text
of a small base model repeats itself, so it flatters drafts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import settings_of, start_chain, two_cores
from benchmarks.genai import NAMES, Peer, Pipeline, check_installed, running_peer
from benchmarks.prompts import PROMPTS
from benchmarks.report import Figure, Report, Samples
from langchain_pshard import PipelineClient
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.pipeline.generation import Draft, GenerationParams

LAYERS = (17, 1)
"""Balanced by the cost of a step of 8 rows: the head, which cannot be cut, is more than half of it."""
WHOLE = (18,)
REPETITIONS = 7
NUM_TOKENS = 128
MANY = 16


def tokens_per_second(client: PipelineClient, prompts: Sequence[Sequence[int]], num_tokens: int, *, draft: Draft = None) -> float:
    """What users see who ask at the same time: all their tokens over the time until the last has its answer, prompts included."""
    params = GenerationParams(max_tokens=num_tokens, ignore_eos=True, draft=draft, prefix_cache=False)
    with ThreadPoolExecutor(len(prompts)) as pool:
        started = time.perf_counter()
        generations = list(pool.map(lambda prompt: client.complete(prompt, params), prompts))
        seconds = time.perf_counter() - started
    return sum(len(generation.token_ids) for generation in generations) / seconds


def prompts_of(client: PipelineClient, num_users: int) -> list[list[int]]:
    """A prompt for each user, of eight kinds."""
    texts = list(PROMPTS.values())
    return [client.tokenizer.encode(texts[user % len(texts)]) for user in range(num_users)]


def run_two(console: Console) -> Report:
    """Two users against one on two workers, one core each (tok/s ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cores = two_cores()
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        client = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=LAYERS), cores).client
        prompts = prompts_of(client, 2)
        sides = {
            "two users": lambda: tokens_per_second(client, prompts, NUM_TOKENS),
            "one user": lambda: tokens_per_second(client, prompts[:1], NUM_TOKENS),
        }
        ours, theirs = taking_turns(progress, sides)
    return _report(
        "users2",
        "two users against one, two workers on one core each",
        ours,
        theirs,
        beside={},
        at_least=1.85,
        settings={"users": "2 against 1"},
    )


def run_many(console: Console) -> Report:
    """16 users on two workers, one core each, against one of openvino_genai.LLMPipeline on one core (tok/s ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core, or openvino_genai is not installed.
    """
    return _against_genai(console, "users16", ("SDPA", "PA"), num_their_cores=1, num_their_users=1, at_least=10.0)


def run_many_batching(console: Console) -> Report:
    """16 users on two workers, one core each, against openvino_genai.ContinuousBatchingPipeline on both cores (tok/s ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core, or openvino_genai is not installed.
    """
    return _against_genai(console, "users16-cb", ("CB",), num_their_cores=2, num_their_users=MANY, at_least=0.95)


def _against_genai(
    console: Console, bench: str, pipelines: Sequence[Pipeline], *, num_their_cores: int, num_their_users: int, at_least: float
) -> Report:
    """Our many users against theirs, on the better of `pipelines`."""
    check_installed()
    cores = two_cores()
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        whole = demo_bundle(weights=WeightMode.INT4, layers=WHOLE, for_genai=True)
        client = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=LAYERS), cores).client
        prompts = prompts_of(client, MANY)
        peers = {pipeline: stack.enter_context(running_peer(whole, pipeline, cores=cores[:num_their_cores])) for pipeline in pipelines}

        def side(peer: Peer) -> Callable[[], float]:
            return lambda: num_their_users * NUM_TOKENS / peer.generate(prompts[:num_their_users], NUM_TOKENS)[0]

        sides = {
            f"{MANY} users": lambda: tokens_per_second(client, prompts, NUM_TOKENS),
            f"{MANY} users, with drafts": lambda: tokens_per_second(client, prompts, NUM_TOKENS, draft="auto"),
        }
        sides |= {NAMES[pipeline]: side(peer) for pipeline, peer in peers.items()}
        ours, drafting, *theirs = taking_turns(progress, sides)
    return _report(
        bench,
        f"{MANY} users on two workers, one core each, against {num_their_users} of openvino_genai on {num_their_cores}",
        ours,
        *theirs,
        beside={"ratio_with_drafts": drafting},
        at_least=at_least,
        settings={
            "users": f"{MANY} against {num_their_users}",
            "peer's precisions": peers[pipelines[0]].precisions,
            "peer's threads": num_their_cores,
            "our numerics": "fast",
        },
    )


def taking_turns(progress: Progress, sides: dict[str, Callable[[], float]]) -> list[Samples]:
    """Measure every side in turn, once to warm it up and then `REPETITIONS` times."""
    measuring = progress.add_task(f"{REPETITIONS} x {NUM_TOKENS} tokens a user, taking turns", total=REPETITIONS + 1)
    values: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(REPETITIONS + 1):
        for name, measure in sides.items():
            value = measure()
            if turn:
                values[name].append(value)
        progress.advance(measuring)
    return [Samples(name=name, unit="tok/s", values=tuple(each)) for name, each in values.items()]


def _report(
    bench: str,
    question: str,
    ours: Samples,
    *theirs: Samples,
    beside: Mapping[str, Samples],
    at_least: float,
    settings: dict[str, object],
) -> Report:
    """Ours against the better of theirs. Sides `beside` ours are told under the keys of their figures, and have no bound."""
    better = max(theirs, key=lambda samples: samples.median)
    pairs = tuple(our / their for our, their in zip(ours.values, better.values, strict=True))
    return Report(
        bench=bench,
        question=question,
        figures=(
            Figure(key="ratio", value=ours.median / better.median, at_least=at_least),
            *(Figure(key=key, value=samples.median / better.median) for key, samples in beside.items()),
        ),
        samples=(ours, *beside.values(), *theirs, Samples(name="ratio of neighbours", unit="", values=pairs)),
        settings=settings_of(LAYERS, tokens=NUM_TOKENS, against=better.name, **settings),
    )
