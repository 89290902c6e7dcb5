"""What compressing weights costs: perplexity of a fixed English text in every weight mode, against float32.

The text was written for this purpose, so that no model has seen it. Bundles of one stage: how a model is cut changes no bit, and
`tests/integration` holds that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.bundles import demo_bundle
from benchmarks.report import Figure, Report
from langchain_pshard.core.bundle import TOKENIZER_DIR, WeightMode, load_manifest
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from workers.runners.runner import Runner, RunSlice, StreamKey
from workers.shard import NumericsName, Settings, make_runner

LARGEST_RATIO = 1.06
NUM_LAYERS = 18
TEXT = Path(__file__).with_name("harbour.txt")
MODES = (WeightMode.INT4, WeightMode.INT8, WeightMode.FP16, WeightMode.FP32)
"""From the smallest to the largest."""
_CHUNK_TOKENS = 128  # that many rows of logits at a time are 134 MB, the whole text's would be 700
KEY = StreamKey(ClientId("bench"), StreamId(1))
_KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeResult:
    """Perplexities of one weight mode, by numerics class."""

    mode: WeightMode
    num_bytes: int
    num_tokens: int
    """Of the text, begin token included."""
    exact: float
    fast: float

    def ratio(self, base: ModeResult) -> float:
        """How much worse than `base` under `exact`, by the worse of the two classes."""
        return max(self.exact, self.fast) / base.exact


def token_losses(logits: npt.NDArray[np.float32], following: Sequence[int]) -> npt.NDArray[np.float64]:
    """-log of the probability of each token that came next, [n]. Pure.

    Args:
        logits: [n, vocab].
        following: the n tokens.
    """
    highest = logits.max(axis=1)
    sums = np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)  # hundreds of thousands of small terms
    losses: npt.NDArray[np.float64] = np.log(sums) + highest - logits[np.arange(len(following)), list(following)]
    return losses


def smallest_within(results: Sequence[ModeResult], largest_ratio: float) -> ModeResult:
    """The smallest mode whose ratio to the last one, float32, is at most `largest_ratio`. Pure."""
    base = results[-1]
    return next(result for result in results if result.ratio(base) <= largest_ratio)


def prefill_slices(tokens: Sequence[int]) -> Iterator[RunSlice]:
    """All of the stream `KEY` but its last token, of which nothing is known to follow, in chunks that sample every position."""
    last = len(tokens) - 1
    begins = range(0, last - last % _CHUNK_TOKENS, _CHUNK_TOKENS)  # the remainder joins the last chunk: none has a single token
    for begin, end in zip(begins, [*begins[1:], last], strict=True):
        piece = np.array(tokens[begin:end], dtype=np.int32)
        yield RunSlice(key=KEY, start=begin, tokens=piece, kind=SliceKind.PREFILL, num_sampled=len(piece))


def _score(runner: Runner, tokens: Sequence[int]) -> float:
    """Perplexity of `tokens` through a runner that holds the whole model, as the prefill of one stream in chunks."""
    runner.open(KEY, len(tokens))
    losses = []
    for piece in prefill_slices(tokens):
        logits = runner.run([piece], None).astype(np.float32, copy=False)
        losses.append(token_losses(logits, tokens[piece.start + 1 : piece.start + len(piece.tokens) + 1]))
    runner.close_stream(KEY)
    return float(np.exp(np.concatenate(losses).mean()))


def text_tokens(bundle: Path, bos_token_id: int | None) -> list[int]:
    """The text as the model wants it: Gemma's perplexity without a begin token is ten times as high."""
    tokens = Tokenizer.from_file(str(bundle / TOKENIZER_DIR / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    return tokens if bos_token_id is None or tokens[0] == bos_token_id else [bos_token_id, *tokens]


def _measure(mode: WeightMode, *, awq: bool = False) -> ModeResult:
    """Export (once per machine), load under both numerics classes, score the text."""
    bundle = demo_bundle(weights=mode, layers=(NUM_LAYERS,), awq=awq)
    manifest = load_manifest(bundle)
    tokens = text_tokens(bundle, manifest.bos_token_id)

    def score(numerics: NumericsName) -> float:
        runner = make_runner(bundle, manifest, 0, Settings(numerics=numerics, kv_memory_bytes=_KV_BYTES))
        try:
            return _score(runner, tokens)
        finally:
            runner.close()

    return ModeResult(mode=mode, num_bytes=manifest.stages[0].num_bytes, num_tokens=len(tokens), exact=score("exact"), fast=score("fast"))


def run(console: Console) -> Report:
    """Perplexity of a fixed text in fp32, fp16, int8 and int4, under both numerics classes (ratio to fp32)."""
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(MODES) + 1)
        results = []
        for mode in MODES:
            progress.update(task, description=f"{mode.value} (exported once per machine)")
            results.append(_measure(mode))
            progress.advance(task)
        progress.update(task, description="int4 with --awq")
        scaled = _measure(WeightMode.INT4, awq=True)
        progress.advance(task)
    return _report(results, scaled)


def _report(results: Sequence[ModeResult], scaled: ModeResult) -> Report:
    base = results[-1]
    chosen = smallest_within(results, LARGEST_RATIO)
    rows = [
        {
            "mode": result.mode.value + (" --awq" if result is scaled else ""),
            "MiB": round(result.num_bytes / 2**20, 1),
            "exact": round(result.exact, 3),
            "fast": round(result.fast, 3),
            "ratio": round(result.ratio(base), 4),
        }
        for result in [scaled, *results]
    ]
    return Report(
        bench="perplexity",
        question=f"the smallest weight mode within {LARGEST_RATIO - 1:.0%} of fp32: {chosen.mode.value}",
        figures=(
            Figure(key="ratio", value=chosen.ratio(base), at_most=LARGEST_RATIO),
            Figure(key="awq_over_int4", value=scaled.exact / results[0].exact),
        ),
        tables={"modes": rows},
        settings={
            "model": "Gemma 3 270M",
            "text": f"{TEXT.name}, {base.num_tokens} tokens",
            "runner": "paged",
            "smallest mode": chosen.mode.value,
        },
    )
