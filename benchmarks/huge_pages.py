"""What weights on huge pages are worth: two workers of the whole model on the same core, one with `--no-huge-pages`, taking turns."""

from __future__ import annotations

import contextlib
import statistics

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import settings_of, start_chain
from benchmarks.fleet import available_cores
from benchmarks.report import Figure, Report, Samples
from benchmarks.users import prompts_of, tokens_per_second
from langchain_pshard.core.bundle import WeightMode

REPETITIONS = 7
NUM_TOKENS = 128
NUM_USERS = (1, 8)
LAYERS = (18,)


def run(console: Console) -> Report:
    """Weights on huge pages against small ones, 1 and 8 users (tok/s ratio).

    Raises:
        PShardError: the workers do not start.
    """
    core = available_cores()[0]
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        measuring = progress.add_task(f"{REPETITIONS} x {NUM_TOKENS} tokens a user, taking turns", total=REPETITIONS + 1)
        bundle = demo_bundle(weights=WeightMode.INT4, layers=LAYERS)
        clients = {
            name: start_chain(stack, bundle, (core,), options=options).client
            for name, options in (("huge", ("--huge-pages",)), ("small", ("--no-huge-pages",)))
        }
        values: dict[tuple[str, int], list[float]] = {(name, num_users): [] for num_users in NUM_USERS for name in clients}
        for turn in range(REPETITIONS + 1):
            for (name, num_users), each in values.items():
                value = tokens_per_second(clients[name], prompts_of(clients[name], num_users), NUM_TOKENS)
                if turn:
                    each.append(value)
            progress.advance(measuring)
    medians = {key: statistics.median(each) for key, each in values.items()}
    return Report(
        bench="huge-pages",
        question="weights on huge pages against weights on small ones, one core",
        figures=tuple(
            Figure(key=f"ratio_{num_users}", value=medians["huge", num_users] / medians["small", num_users]) for num_users in NUM_USERS
        ),
        samples=tuple(
            Samples(name=f"{name} pages, {num_users} user{'s' if num_users > 1 else ''}", unit="tok/s", values=tuple(each))
            for (name, num_users), each in values.items()
        ),
        settings=settings_of(LAYERS, users=" and ".join(map(str, NUM_USERS)), tokens=NUM_TOKENS),
    )
