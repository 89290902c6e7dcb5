"""How many bytes the last stage sends to the client for a token, counted by a relay between the two."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import PROMPT, settings_of, start_chain, two_cores
from benchmarks.relay import CountingRelay
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.generation import GenerationParams

TARGET_BYTES = 48
LAYERS = (16, 2)
NUM_TOKENS = 256
_VARIANTS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=1)}


def run(console: Console) -> Report:
    """Bytes on the wire from the last stage to the client for a decoded token.

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cores = two_cores()
    samples: list[Samples] = []
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        relays: list[CountingRelay] = []

        def through_relay(address: str) -> str:
            relays.append(stack.enter_context(CountingRelay(address)))
            return relays[-1].address

        measuring = progress.add_task(f"{len(_VARIANTS)} x {NUM_TOKENS} tokens", total=len(_VARIANTS))
        chain = start_chain(stack, demo_bundle(weights=WeightMode.INT4, layers=LAYERS), cores, reach=through_relay)
        for name, sampling in _VARIANTS.items():
            params = GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling, draft=None)
            chunks = chain.client.generate(PROMPT, params)
            next(chunks)  # the prompt and the answer to Open are behind us
            before = relays[-1].num_bytes
            num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
            samples.append(Samples(name=name, unit="bytes/token", values=((relays[-1].num_bytes - before) / num_tokens,)))
            progress.advance(measuring)
    return Report(
        bench="reply-bytes",
        question="what the last stage sends to the client for a token",
        figures=(Figure(key="bytes_per_token", value=max(each.median for each in samples), at_most=TARGET_BYTES),),
        samples=tuple(samples),
        settings=settings_of(LAYERS, users=1, tokens=NUM_TOKENS, counted="TCP payload from the last worker: frames, pongs, heartbeats"),
    )
