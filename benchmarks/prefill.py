"""What splitting gains on a long prompt: chunks overlap, the second stage works on one while the first is at the next.

The cut is not that of decoding. A prompt needs one row of logits, so the head, half of a decode step, hardly counts here: 9 of 18 layers
on each side are balanced.
"""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import RunningChain, random_prompt, settings_of, start_chain, two_cores
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.pipeline.generation import GenerationParams

TARGET_RATIO = 0.65
REPETITIONS = 7
LAYERS = (9, 9)
NUM_PROMPT_TOKENS = 1_000
_ONE_TOKEN = GenerationParams(max_tokens=1, ignore_eos=True, prefix_cache=False)


def _first_token_ms(chain: RunningChain, seed: int) -> float:
    return chain.client.complete(random_prompt(chain.client, NUM_PROMPT_TOKENS, seed), _ONE_TOKEN).stats.first_token_ms


def run(console: Console) -> Report:
    """Time to first token of a prompt of 1,000 tokens, two workers on one core each against one on one core (ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    first_core, second_core = two_cores()
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        measuring = progress.add_task(f"{REPETITIONS} prompts, alternating", total=2 * REPETITIONS)
        split = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=LAYERS), (first_core, second_core))
        whole = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=(sum(LAYERS),)), (first_core,))
        values: dict[str, list[float]] = {"two workers": [], "one worker": []}
        for seed in range(REPETITIONS + 1):
            for chain, name in ((split, "two workers"), (whole, "one worker")):
                value = _first_token_ms(chain, seed)
                if seed:  # the first of each touches its KV for the first time
                    values[name].append(value)
                    progress.advance(measuring)
    split_samples, whole_samples = (Samples(name=name, unit="ms", values=tuple(each)) for name, each in values.items())
    pairs = tuple(after / before for after, before in zip(split_samples.values, whole_samples.values, strict=True))
    return Report(
        bench="prefill",
        question="time to first token, two workers on one core each against one worker on one core",
        figures=(Figure(key="ratio", value=split_samples.median / whole_samples.median, at_most=TARGET_RATIO),),
        samples=(split_samples, whole_samples, Samples(name="ratio of neighbours", unit="", values=pairs)),
        settings=settings_of(LAYERS, users=1, prompt_tokens=NUM_PROMPT_TOKENS),
    )
