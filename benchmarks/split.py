"""What splitting costs one user: two workers on one core each against one worker on one core, the same model and the same prompt.

Both fleets stay up through the whole run and the repetitions alternate, so that a change of the machine's mood hits both alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import AWAKE, start_chain
from benchmarks.fleet import available_cores
from benchmarks.processes import can_pin
from benchmarks.report import Figure, Report, Samples
from langchain_pshard import PipelineClient
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.pipeline.generation import GenerationParams

TARGET_RATIO = 0.92
REPETITIONS = 7
NUM_TOKENS = 128
LAYERS = (16, 2)
"""Balanced by cost, not by count: the tied output head is 63 % of the int4 bytes, about nine layers' worth of a decode step."""
PROMPT = "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs and"


def _tokens_per_second(client: PipelineClient) -> float:
    """What a user sees: all tokens over the whole time of the call, the prompt included."""
    started = time.perf_counter()
    generation = client.complete(PROMPT, GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft=None))
    return generation.stats.num_generated_tokens / (time.perf_counter() - started)


def _connect(stack: contextlib.ExitStack, bundle: Path, cores: Sequence[int]) -> PipelineClient:
    """A client of a fresh fleet with stage i of `bundle` on core `cores[i]`, warmed up by one whole generation."""
    client = start_chain(stack, bundle, cores, options=AWAKE).client
    _tokens_per_second(client)
    return client


def run(console: Console) -> Report:
    """One user, two workers on one core each, against one worker on one core (tok/s ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cores = available_cores()
    if len(cores) < 2:
        raise InvalidOptionError(f"the split benchmark needs 2 cores, one for each worker; this process may use {len(cores)}")
    first_core, second_core = cores[:2]
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        exporting = progress.add_task("bundles (exported once per machine)", total=2)
        whole_bundle = demo_bundle(weights=WeightMode.INT4, layers=(sum(LAYERS),))
        progress.advance(exporting)
        split_bundle = demo_bundle(weights=WeightMode.INT4, layers=LAYERS)
        progress.advance(exporting)

        starting = progress.add_task("workers", total=2)
        split = _connect(stack, split_bundle, cores=(first_core, second_core))
        progress.advance(starting)
        whole = _connect(stack, whole_bundle, cores=(first_core,))
        progress.advance(starting)

        measuring = progress.add_task(f"{REPETITIONS} x {NUM_TOKENS} tokens, alternating", total=2 * REPETITIONS)
        split_values: list[float] = []
        whole_values: list[float] = []
        for _ in range(REPETITIONS):
            for client, values in ((split, split_values), (whole, whole_values)):
                values.append(_tokens_per_second(client))
                progress.advance(measuring)

    split_samples = Samples(name="two workers", unit="tok/s", values=tuple(split_values))
    whole_samples = Samples(name="one worker", unit="tok/s", values=tuple(whole_values))
    pairs = tuple(after / before for after, before in zip(split_values, whole_values, strict=True))
    return Report(
        bench="split",
        question="one user, two workers on one core each, against one worker on one core",
        figures=(Figure(key="ratio", value=split_samples.median / whole_samples.median, at_least=TARGET_RATIO),),
        samples=(split_samples, whole_samples, Samples(name="ratio of neighbours", unit="", values=pairs)),
        settings={
            "model": "Gemma 3 270M",
            "weights": WeightMode.INT4.value,
            "layers": "+".join(map(str, LAYERS)),
            "users": 1,
            "tokens": NUM_TOKENS,
            "threads per worker": 1,
            "workers": " ".join(AWAKE),
            "cores": f"{first_core},{second_core} against {first_core}" if can_pin() else "not pinned: this system cannot",
        },
    )
