"""What PShard costs where it brings nothing: one stage, one user, one core, against openvino_genai on the same stage folder.

The three processes stay up through the whole run and take turns, each on the same core. Our client, which they do not have, is where the
system puts it; the whole time of its call counts.
"""

from __future__ import annotations

import contextlib
import statistics

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import PROMPT, settings_of, start_chain
from benchmarks.fleet import available_cores
from benchmarks.genai import NAMES, Pipeline, check_installed, running_peer
from benchmarks.report import Figure, Report, Samples
from benchmarks.users import tokens_per_second
from langchain_pshard.core.bundle import WeightMode

TARGET_RATIO = 1.05
REPETITIONS = 7
NUM_TOKENS = 128
LAYERS = (18,)
BACKENDS: tuple[Pipeline, ...] = ("SDPA", "PA")


def run(console: Console) -> Report:
    """One user on one core, against the better backend of openvino_genai.LLMPipeline (tok/s ratio).

    Raises:
        InvalidOptionError: openvino_genai is not installed.
    """
    check_installed()
    core = available_cores()[0]
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        starting = progress.add_task("bundle (exported once per machine), worker and peers", total=2 + len(BACKENDS))
        bundle = demo_bundle(weights=WeightMode.INT4, layers=LAYERS, for_genai=True)
        progress.advance(starting)
        client = start_chain(stack, bundle, (core,)).client
        progress.advance(starting)
        prompt = client.tokenizer.encode(PROMPT)
        peers = {}
        for backend in BACKENDS:
            peers[backend] = stack.enter_context(running_peer(bundle, backend, cores=(core,)))
            peers[backend].generate([prompt], NUM_TOKENS)  # warm
            progress.advance(starting)
        measuring = progress.add_task(f"{REPETITIONS} x {NUM_TOKENS} tokens, taking turns", total=REPETITIONS)
        ours: list[float] = []
        theirs: dict[Pipeline, list[float]] = {backend: [] for backend in BACKENDS}
        for _ in range(REPETITIONS):
            ours.append(tokens_per_second(client, [prompt], NUM_TOKENS))
            for backend, peer in peers.items():
                seconds, _tokens = peer.generate([prompt], NUM_TOKENS)
                theirs[backend].append(NUM_TOKENS / seconds)
            progress.advance(measuring)
    better = max(BACKENDS, key=lambda backend: statistics.median(theirs[backend]))
    ratios = tuple(our / their for our, their in zip(ours, theirs[better], strict=True))
    samples = Samples(name="ratio of neighbours", unit="", values=ratios)
    return Report(
        bench="parity",
        question="one stage, one user, one core, against the better backend of openvino_genai.LLMPipeline",
        figures=(Figure(key="ratio", value=statistics.median(ours) / statistics.median(theirs[better]), at_least=TARGET_RATIO),),
        samples=(
            Samples(name="PShard", unit="tok/s", values=tuple(ours)),
            *(Samples(name=NAMES[backend], unit="tok/s", values=tuple(values)) for backend, values in theirs.items()),
            samples,
        ),
        settings=settings_of(
            LAYERS,
            users=1,
            tokens=NUM_TOKENS,
            against=NAMES[better],
            **{"peer's precisions": peers[better].precisions, "our numerics": "fast", "prompt tokens": len(prompt)},
        ),
    )
