"""What sixteen streams take in memory beyond their KV, against one: all share one compiled model.

Both times the workers compute the same sixteen prompts: one after another, so that there is one stream at a time, and then side by side.
Resident memory counts the mapped file of the model too, and of its table of embeddings those pages that prompts have asked for: 150 MiB
lie between one random prompt of 512 tokens and sixteen, whoever asks when.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import RunningChain, random_prompt, settings_of, start_chain, two_cores
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.bundle import Manifest, WeightMode
from langchain_pshard.pipeline.generation import GenerationParams

TARGET_RATIO = 1.10
LAYERS = (16, 2)
NUM_STREAMS = 16
NUM_PROMPT_TOKENS = 512
NUM_TOKENS = 160
"""Enough that the first stream still runs when the last one has its prompt through."""
_BYTES_PER_VALUE = 2  # f16
_PARAMS = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft=None)


def kv_bytes(manifest: Manifest, num_positions: int) -> int:
    """KV of so many positions over all layers."""
    return num_positions * manifest.num_layers * 2 * manifest.num_kv_heads * manifest.head_dim * _BYTES_PER_VALUE


def _resident_bytes(chain: RunningChain) -> int:
    return sum(psutil.Process(worker.process.pid).memory_info().rss for worker in chain.workers)


def _run_prompts(chain: RunningChain, num_beside: int) -> int:
    """Run all prompts, so many side by side; the most memory that the workers had together, looked at with every token of the last one."""
    peak = 0

    def generate(seed: int) -> None:
        nonlocal peak
        for _ in chain.client.generate(random_prompt(chain.client, NUM_PROMPT_TOKENS, seed), _PARAMS):
            if seed == NUM_STREAMS - 1:
                peak = max(peak, _resident_bytes(chain))

    with ThreadPoolExecutor(num_beside) as pool:
        list(pool.map(generate, range(NUM_STREAMS)))
    return max(peak, _resident_bytes(chain))


def run(console: Console) -> Report:
    """Resident memory of the workers with 16 streams, less the KV of 15, against 1 stream (ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        measuring = progress.add_task(f"{NUM_STREAMS} prompts, one at a time and side by side", total=2)
        # Without the cache of prompts: blocks that no stream uses any more would count for the streams that do.
        chain = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=LAYERS), two_cores(), options=["--no-prefix-cache"])
        one = _run_prompts(chain, 1)
        progress.advance(measuring)
        many = _run_prompts(chain, NUM_STREAMS)
        progress.advance(measuring)
        kv = kv_bytes(chain.client.manifest, (NUM_STREAMS - 1) * (NUM_PROMPT_TOKENS + NUM_TOKENS))
    return Report(
        bench="memory",
        question="resident memory of 16 streams without the KV of 15, against that of 1",
        figures=(Figure(key="ratio", value=(many - kv) / one, at_most=TARGET_RATIO),),
        samples=tuple(
            Samples(name=name, unit="MiB", values=(value / 2**20,))
            for name, value in (("1 stream", one), (f"{NUM_STREAMS} streams", many), ("KV of 15 streams", kv))
        ),
        settings=settings_of(LAYERS, prompt_tokens=NUM_PROMPT_TOKENS, tokens=NUM_TOKENS, measured="both workers together"),
    )
