"""How even the exporter's cut is: the real model exported anew with measured costs, its two stages on one core each, timed as they decode.

The cut is decided on whatever the machine was like during the export, and judged on what the workers report of their inferences.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.fleet import available_cores, running_worker
from benchmarks.processes import can_pin
from benchmarks.report import Figure, Report, Samples
from langchain_pshard import PipelineClient
from langchain_pshard.core.bundle import LayerSpan, Manifest, ModelCosts, WeightMode
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.pipeline.generation import GenerationParams

TARGET_RATIO = 1.15
REPETITIONS = 7
NUM_TOKENS = 128
PROMPT = "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs and"


def _step_ms(client: PipelineClient) -> tuple[float, ...]:
    """What one step took in each stage's inference, on average over a generation."""
    stats = client.complete(PROMPT, GenerationParams(max_tokens=NUM_TOKENS, ignore_eos=True, draft=None)).stats
    return tuple(total_ms / stats.num_steps for total_ms in stats.stage_compute_ms)


def _unevenness(stage_ms: tuple[float, ...]) -> float:
    return max(stage_ms) / statistics.mean(stage_ms)


def _predicted(costs: ModelCosts, *edges: int) -> float:
    """The same ratio as the measured costs have it, for stages between these layers."""
    return _unevenness(tuple(costs.stage(LayerSpan(start, end)).decode_ms for start, end in pairwise(edges)))


def run(console: Console) -> Report:
    """Slowest stage over the mean stage of the real model in two stages, one core each, cut by measured cost (ratio).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    cores = available_cores()
    if len(cores) < 2:
        raise InvalidOptionError(f"the balance benchmark needs 2 cores, one for each worker; this process may use {len(cores)}")
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pshard-balance-"))
        exporting = progress.add_task("exporting, with measured costs", total=1)
        bundle = Path(folder) / "bundle"
        manifest = _export(bundle)
        progress.advance(exporting)
        addresses = [stack.enter_context(running_worker(bundle, idx, cores=[core])).address for idx, core in enumerate(cores[:2])]
        client = stack.enter_context(PipelineClient.connect(addresses))
        _step_ms(client)  # warm
        measuring = progress.add_task(f"{REPETITIONS} x {NUM_TOKENS} tokens", total=REPETITIONS)
        runs = []
        for _ in range(REPETITIONS):
            runs.append(_step_ms(client))
            progress.advance(measuring)
    ratios = Samples(name="slowest over mean", unit="", values=tuple(_unevenness(stage_ms) for stage_ms in runs))
    stages = tuple(
        Samples(name=f"stage {idx}, layers {stage.span}", unit="ms/token", values=tuple(stage_ms[idx] for stage_ms in runs))
        for idx, stage in enumerate(manifest.stages)
    )
    return Report(
        bench="balance",
        question="how even is the cut by measured cost, two stages on one core each",
        figures=(Figure(key="ratio", value=ratios.median, at_most=TARGET_RATIO),),
        samples=(*stages, ratios),
        settings=_settings(manifest, cores[:2]),
    )


def _export(bundle: Path) -> Manifest:
    from export_tools.export import export_bundle  # seconds of imports that `bench list` does not need

    return export_bundle("demo", bundle, num_stages=2, weights=WeightMode.INT4, measure=True)


def _settings(manifest: Manifest, cores: tuple[int, ...]) -> dict[str, object]:
    costs = manifest.costs
    assert costs is not None, "the export was told to measure"
    half = manifest.num_layers // 2
    cut = manifest.stages[0].span.end
    return {
        "model": "Gemma 3 270M",
        "weights": WeightMode.INT4.value,
        "layers": "+".join(str(stage.span.num_layers) for stage in manifest.stages),
        "predicted ratio": round(_predicted(costs, 0, cut, manifest.num_layers), 3),
        "predicted ratio of an even split": round(_predicted(costs, 0, half, manifest.num_layers), 3),
        "predicted ms": ", ".join(f"{stage.cost.decode_ms:.2f}" for stage in manifest.stages if stage.cost),
        "head against a layer": round(costs.head.decode_ms / max(1e-9, costs.layers[1].decode_ms), 1),
        "tokens": NUM_TOKENS,
        "threads per worker": 1,
        "cores": ",".join(map(str, cores)) if can_pin() else "not pinned: this system cannot",
    }
