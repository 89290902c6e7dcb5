"""What a step costs beside its inferences, per hop: client to first worker, worker to worker, last worker to client.

Plain steps cross all of these hops, one after another. Of steps that the chain takes by itself the client is no part; what such a step
costs beyond its inferences in all is told beside.

The client's own hub takes the times. A step's whole turn goes from the arrival of one result to the arrival of the next, so that the
client's own work is in it; the time that the stages report as spent computing is taken off.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import AWAKE, DEFAULT_OPTIONS, PROMPT, settings_of, start_chain, two_cores
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.messages import StepResult
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.transport.hub import Arrived, Event
from langchain_pshard.transport.zeromq import ZmqHub

TARGET_MS = 0.30
LAYERS = (16, 2)
NUM_TOKENS = 512
NUM_HOPS = len(LAYERS) + 1


class TimedHub(ZmqHub):
    """Notes when each step's result arrived, in seconds, and how long its stages computed."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[float, float]] = []

    def poll(self, timeout_s: float | None) -> list[Event]:
        events = super().poll(timeout_s)
        for event in events:
            if isinstance(event, Arrived) and isinstance(event.message, StepResult):
                compute_s = sum(timing.compute_us for timing in event.message.timings) / 1e6
                self.results.append((time.perf_counter(), compute_s))
        return events


def overheads_ms(results: list[tuple[float, float]]) -> tuple[float, ...]:
    """Per step after the first, its turn without its compute time."""
    arrivals = [arrived for arrived, _ in results]
    return tuple(1e3 * (arrivals[idx] - arrivals[idx - 1] - results[idx][1]) for idx in range(1, len(results)))


def _timed_steps(
    layers: Sequence[int], cores: Sequence[int], on_tokens: Callable[[int], None], options: Sequence[str] = (), *, steps_ahead: int = 0
) -> list[tuple[float, float]]:
    """`TimedHub.results` of one generation, without the first token's, over a chain with stage i on core `cores[i]`.

    Args:
        layers: of each stage.
        cores: of each stage.
        on_tokens: hears of new tokens.
        options: of the workers.
        steps_ahead: that the chain may take by itself.
    """
    hubs: list[TimedHub] = []

    def make_hub() -> TimedHub:
        hubs.append(TimedHub())
        return hubs[-1]

    with contextlib.ExitStack() as stack:
        chain = start_chain(
            stack,
            demo_bundle(weights=WeightMode.INT4, layers=layers),
            cores,
            hub_factory=make_hub,
            options=options,
            client_options=ClientOptions(max_steps_ahead=steps_ahead),
        )
        hubs[0].results.clear()
        for chunk in chain.client.generate(PROMPT, GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft=None)):
            on_tokens(len(chunk.token_ids))
    return hubs[0].results[1:]


def run(console: Console) -> Report:
    """Time of a decode step beyond the stages' compute, per hop (p50 in ms).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cores = two_cores()
    with Progress(console=console) as progress:
        measuring = progress.add_task(f"4 x {NUM_TOKENS} tokens", total=4 * NUM_TOKENS)

        def advance(num_tokens: int) -> None:
            progress.advance(measuring, num_tokens)

        results = _timed_steps(LAYERS, cores, advance, AWAKE)
        asleep = _timed_steps(LAYERS, cores, advance)
        ahead = _timed_steps(LAYERS, cores, advance, steps_ahead=DEFAULT_OPTIONS.max_steps_ahead)
        # Two workers fill both cores, and an inference leaves nothing of the client's code in their caches. A single one leaves it a core.
        alone = _timed_steps((sum(LAYERS),), cores[:1], advance, AWAKE)
    per_step = Samples(name="step beyond compute", unit="ms", values=overheads_ms(results))
    per_hop = Samples(name="per hop", unit="ms", values=tuple(value / NUM_HOPS for value in per_step.values))
    per_hop_asleep = Samples(
        name="per hop, workers that sleep between steps", unit="ms", values=tuple(v / NUM_HOPS for v in overheads_ms(asleep))
    )
    per_step_ahead = Samples(name="step beyond compute, with steps ahead, workers that sleep", unit="ms", values=overheads_ms(ahead))
    per_hop_alone = Samples(
        name="per hop, one stage, client on a core of its own", unit="ms", values=tuple(v / 2 for v in overheads_ms(alone))
    )
    compute = Samples(name="compute of both stages", unit="ms", values=tuple(1e3 * value for _, value in results))
    return Report(
        bench="overhead",
        question="what a step costs beyond its inferences",
        figures=(
            Figure(key="p50_ms", value=per_hop.median, at_most=TARGET_MS),
            Figure(key="p50_step_ms", value=per_step.median),
            Figure(key="p50_asleep_ms", value=per_hop_asleep.median),
            Figure(key="p50_own_core_ms", value=per_hop_alone.median),
            Figure(key="p50_ahead_step_ms", value=per_step_ahead.median),
        ),
        samples=(per_hop, per_step, per_hop_asleep, per_hop_alone, per_step_ahead, compute),
        settings=settings_of(LAYERS, users=1, tokens=NUM_TOKENS, workers=" ".join(AWAKE), hops="to first, to last, back"),
    )
