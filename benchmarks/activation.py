"""What int8 hidden states cost: the real model in three stages, its two boundaries as float32 and as int8, on the same text.

Quality only, so that a busy machine measures the same as a quiet one. The stages run in this process, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from benchmarks.bundles import demo_bundle
from benchmarks.chains import settings_of
from benchmarks.perplexity import KEY, TEXT, prefill_slices, text_tokens, token_losses
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.bundle import Manifest, WeightMode, load_manifest
from langchain_pshard.core.codec import NUMPY_DTYPES, Tensor
from workers.runners.boundary import row_width
from workers.runners.runner import Runner
from workers.shard import ActivationName, Settings, make_runner

LAYERS = (9, 7, 2)
LARGEST_RATIO = 1.02
"""Of the perplexities."""
_KV_BYTES = 64 << 20


def logits_of(runners: Sequence[Runner], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits after every token but the last, [n - 1, vocab], of a prefill in chunks through all stages."""
    for runner in runners:
        runner.open(KEY, len(tokens))
    parts = []
    for piece in prefill_slices(tokens):
        hidden: Tensor | None = None
        for runner in runners:
            hidden = runner.run([piece], hidden)
        parts.append(cast(npt.NDArray[np.float32], hidden).copy())  # the engine's own memory, gone with the next run
    for runner in runners:
        runner.close_stream(KEY)
    return np.concatenate(parts)


def row_bytes(runner: Runner, manifest: Manifest) -> int:
    """What one token's hidden states take on the wire."""
    boundary = runner.numerics.boundary
    return row_width(boundary, manifest.hidden_size) * NUMPY_DTYPES[boundary].itemsize


def _measure(bundle: Path, manifest: Manifest, tokens: Sequence[int], activation: ActivationName) -> tuple[npt.NDArray[np.float32], int]:
    settings = Settings(activation=activation, kv_memory_bytes=_KV_BYTES)
    runners = [make_runner(bundle, manifest, stage_idx, settings) for stage_idx in range(manifest.num_stages)]
    try:
        return logits_of(runners, tokens), row_bytes(runners[0], manifest)
    finally:
        for runner in runners:
            runner.close()


def run(console: Console) -> Report:
    """int8 hidden states between three stages against float32: perplexity (ratio), greedy tokens that agree, bytes."""
    with Progress(console=console) as progress:
        task = progress.add_task("bundle (exported once per machine), float32, int8", total=3)
        bundle = demo_bundle(weights=WeightMode.INT4, layers=LAYERS)
        progress.advance(task)
        manifest = load_manifest(bundle)
        tokens = text_tokens(bundle, manifest.bos_token_id)
        whole, whole_bytes = _measure(bundle, manifest, tokens, "f32")
        progress.advance(task)
        thin, thin_bytes = _measure(bundle, manifest, tokens, "int8")
        progress.advance(task)
    before, after = (float(np.exp(token_losses(logits, tokens[1:]).mean())) for logits in (whole, thin))
    return Report(
        bench="activation",
        question="int8 hidden states at both boundaries of three stages, against float32",
        figures=(
            Figure(key="ratio", value=after / before, at_most=LARGEST_RATIO),
            Figure(key="agreement", value=float((whole.argmax(axis=1) == thin.argmax(axis=1)).mean())),
            Figure(key="bytes_ratio", value=thin_bytes / whole_bytes),
        ),
        samples=(
            Samples(name="float32", unit="perplexity", values=(before,)),
            Samples(name="int8", unit="perplexity", values=(after,)),
        ),
        settings=settings_of(
            LAYERS,
            text=f"{TEXT.name}, {len(tokens)} tokens",
            numerics="fast",
            **{"bytes per token and hop": f"{thin_bytes} against {whole_bytes}"},
        ),
    )
