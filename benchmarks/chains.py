"""What several benchmarks start from: a client of a fresh fleet, one worker on one core for each stage of a bundle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import RunningWorker, available_cores, running_worker
from benchmarks.processes import can_pin
from langchain_pshard import PipelineClient
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.transport.hub import Hub
from langchain_pshard.transport.zeromq import ZmqHub

PROMPT = "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs and"
AWAKE = ("--busy-poll-ms", "20")
"""Option of a worker that has a core to itself."""
DEFAULT_OPTIONS = ClientOptions()
WARM_UP = GenerationParams(max_tokens=16, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningChain:
    """A client and its workers, in order of their stages."""

    client: PipelineClient
    workers: tuple[RunningWorker, ...]


def start_chain(
    stack: contextlib.ExitStack,
    bundle: Path,
    cores: Sequence[int],
    *,
    hub_factory: Callable[[], Hub] = ZmqHub,
    options: Sequence[str] = (),
    client_options: ClientOptions = DEFAULT_OPTIONS,
    reach: Callable[[str], str] = lambda address: address,
) -> RunningChain:
    """A fleet with stage i of `bundle` on core `cores[i]`, warmed up by one generation; it ends with `stack`.

    Args:
        stack: what owns the processes and the client.
        bundle: folder of the bundle.
        cores: one for each stage.
        hub_factory: the client's transport.
        options: more options of the workers.
        client_options: of the client.
        reach: the address at which the client and the other workers reach the worker at an address.
    """
    workers = tuple(
        stack.enter_context(running_worker(bundle, stage_idx, cores=[core], options=options)) for stage_idx, core in enumerate(cores)
    )
    addresses = [reach(worker.address) for worker in workers]
    client = stack.enter_context(PipelineClient.connect(addresses, hub_factory=hub_factory, options=client_options))
    client.complete(PROMPT, WARM_UP)
    return RunningChain(client=client, workers=workers)


def two_cores() -> tuple[int, int]:
    """Two cores of this machine.

    Raises:
        InvalidOptionError: it lends us a single one.
    """
    cores = available_cores()
    if len(cores) < 2:
        raise InvalidOptionError(f"this benchmark needs 2 cores, one for each worker; this process may use {len(cores)}")
    return cores[0], cores[1]


def random_prompt(client: PipelineClient, num_tokens: int, seed: int) -> list[int]:
    """Token ids that no other seed begins with. What a prefill costs does not depend on what it says."""
    draw = random.Random(seed)
    return [draw.randrange(1_000, client.manifest.vocab_size) for _ in range(num_tokens)]


def settings_of(layers: Sequence[int], **more: Any) -> dict[str, Any]:
    """What every report of the real model says about its run."""
    return {
        "model": "Gemma 3 270M",
        "weights": WeightMode.INT4.value,
        "layers": "+".join(map(str, layers)),
        "threads per worker": 1,
        "cores": "one per worker" if can_pin() else "not pinned: this system cannot",
        **more,
    }
