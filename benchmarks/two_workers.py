"""Two workers of the real model, one core each: the fleet of the speculation and scheduling benchmarks."""

from __future__ import annotations

import contextlib
from typing import Any

from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.fleet import available_cores, running_worker
from benchmarks.processes import can_pin
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError

LAYERS = (16, 2)
"""Balanced by the cost of a decode step: see `split`."""


def start_two_workers(stack: contextlib.ExitStack, progress: Progress) -> list[str]:
    """Addresses of two fresh workers, stopped with the stack.

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cores = available_cores()
    if len(cores) < 2:
        raise InvalidOptionError(f"this benchmark needs 2 cores, one for each worker; this process may use {len(cores)}")
    task = progress.add_task("bundle (exported once per machine), workers", total=3)
    bundle = demo_bundle(weights=WeightMode.INT4, layers=LAYERS)
    progress.advance(task)
    addresses = []
    for stage_idx in range(len(LAYERS)):
        addresses.append(stack.enter_context(running_worker(bundle, stage_idx, cores=[cores[stage_idx]])).address)
        progress.advance(task)
    return addresses


def settings(**more: Any) -> dict[str, Any]:
    """What stands under a figure of this fleet."""
    return {
        "model": "Gemma 3 270M",
        "weights": WeightMode.INT4.value,
        "layers": "+".join(map(str, LAYERS)),
        "workers": "two, one core each" if can_pin() else "two, not pinned: this system cannot",
        "threads per worker": 1,
        **more,
    }
