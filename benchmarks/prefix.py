"""What a prompt costs that the workers have seen before: its KV is found by the text, and only the end is computed."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import random_prompt, settings_of, start_chain, two_cores
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.pipeline.generation import GenerationParams

TARGET_RATIO = 0.15
REPETITIONS = 7
LAYERS = (16, 2)
NUM_PROMPT_TOKENS = 1_000
_ONE_TOKEN = GenerationParams(max_tokens=1, ignore_eos=True)


def run(console: Console) -> Report:
    """Time to first token of a prompt of 1,000 tokens, the second time against the first (ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cold: list[float] = []
    again: list[float] = []
    num_cached: set[int] = set()
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        measuring = progress.add_task(f"{REPETITIONS} prompts, twice each", total=REPETITIONS)
        chain = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=LAYERS), two_cores())
        for seed in range(REPETITIONS + 1):
            prompt = random_prompt(chain.client, NUM_PROMPT_TOKENS, seed)
            first, second = (chain.client.complete(prompt, _ONE_TOKEN) for _ in range(2))
            assert first.token_ids == second.token_ids, "a cached prompt changed the text"
            if seed:  # the first touches its KV for the first time
                cold.append(first.stats.first_token_ms)
                again.append(second.stats.first_token_ms)
                num_cached.add(second.stats.num_cached_tokens)
                progress.advance(measuring)
    cold_samples = Samples(name="cold", unit="ms", values=tuple(cold))
    again_samples = Samples(name="again", unit="ms", values=tuple(again))
    return Report(
        bench="prefix",
        question="time to first token of a prompt that was there before, against the first time",
        figures=(Figure(key="ratio", value=again_samples.median / cold_samples.median, at_most=TARGET_RATIO),),
        samples=(cold_samples, again_samples),
        settings=settings_of(LAYERS, users=1, prompt_tokens=NUM_PROMPT_TOKENS, cached_tokens=sorted(num_cached)),
    )
