"""What weights on huge pages are worth: two workers of the whole model on the same core, one with `--no-huge-pages`, taking turns."""

from __future__ import annotations

import contextlib
from functools import partial

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import settings_of, start_chain
from benchmarks.fleet import available_cores
from benchmarks.report import Figure, Report
from benchmarks.users import NUM_TOKENS, prompts_of, taking_turns, tokens_per_second
from langchain_pshard.core.bundle import WeightMode

NUM_USERS = (1, 8)
LAYERS = (18,)


def run(console: Console) -> Report:
    """Weights on huge pages against small ones, 1 and 8 users (tok/s ratio).

    Raises:
        PShardError: the workers do not start.
    """
    core = available_cores()[0]
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        bundle = demo_bundle(weights=WeightMode.INT4, layers=LAYERS)
        clients = {
            name: start_chain(stack, bundle, (core,), options=options).client
            for name, options in (("huge", ("--huge-pages",)), ("small", ("--no-huge-pages",)))
        }
        sides = {
            f"{name} pages, {num_users} user{'s' if num_users > 1 else ''}": partial(
                tokens_per_second, client, prompts_of(client, num_users), NUM_TOKENS
            )
            for num_users in NUM_USERS
            for name, client in clients.items()
        }
        samples = taking_turns(progress, sides)
    pairs = zip(NUM_USERS, samples[::2], samples[1::2], strict=True)
    return Report(
        bench="huge-pages",
        question="weights on huge pages against weights on small ones, one core",
        figures=tuple(Figure(key=f"ratio_{num_users}", value=huge.median / small.median) for num_users, huge, small in pairs),
        samples=tuple(samples),
        settings=settings_of(LAYERS, users=" and ".join(map(str, NUM_USERS)), tokens=NUM_TOKENS),
    )
