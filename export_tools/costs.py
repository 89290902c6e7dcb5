"""What the parts of a model cost on this machine: a few stages of one to four layers, compiled as a worker compiles them, and timed.

A stage's time is a sum: what any inference costs, its layers (each of some kind), the embedding if it is the first, the head if it is
the last. Every measured stage is one equation; the parts are the solution. What is measured depends on the model alone, not on the
machine, and is far less than the model: one layer of each kind, one run of several, the two ends.

Layers are of one kind when their weights have the same shapes. An attention window makes no other kind: it shows only in contexts longer
than itself, and what a decoded token costs there is still the weights it reads.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino._offline_transformations import compress_model_transformation

from export_tools.architectures import ModelShape
from export_tools.compress import WeightModes, compress_stage
from export_tools.convert import convert_stage
from export_tools.progress import Progress
from export_tools.stage_module import StageModule
from export_tools.stateful import make_stateful
from langchain_pshard.core.bundle import LayerSpan, ModelCosts, PartCost, WeightMode
from langchain_pshard.core.yardstick import Yardstick, fast_properties, fastest_ms, machine_speed

PREFILL_TOKENS = 64
_PREFILL_ROUNDS = 4
_DECODE_ROUNDS = 40
_MOST_REPEATS = 4
"""How often decoding is timed again while the times make a layer cost nothing: on a busy machine, until each was undisturbed once."""
_LONG_RUN_LAYERS = 4
_LONG_RUN_BYTES = 256 << 20
"""A run of several layers tells what one more of them costs. It is kept below this size where layers are large: their times are long enough
to be told apart in pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBytes:
    """Stored bytes of the parts of a model."""

    layers: tuple[int, ...]
    embedding: int
    head: int


def spans_to_measure(kinds: Sequence[Hashable], layer_bytes: Sequence[int], num_stages: int = 1) -> tuple[LayerSpan, ...]:
    """The stages to measure: both ends with one layer each, one middle layer of each kind, and the longest run of one kind, cut to at
    most `_LONG_RUN_LAYERS`, and to what the largest stage of any cut has: measuring needs no more memory than exporting. Pure.

    Args:
        kinds: kind of each layer.
        layer_bytes: stored bytes of each layer.
        num_stages: how many the model is cut into.
    """
    num_layers = len(kinds)
    middle = range(1, num_layers - 1)
    spans = {LayerSpan(0, 1), LayerSpan(num_layers - 1, num_layers)}
    seen: set[Hashable] = set()
    for idx in middle:
        if kinds[idx] not in seen:
            seen.add(kinds[idx])
            spans.add(LayerSpan(idx, idx + 1))
    changes = [idx for idx in middle if idx == 1 or kinds[idx] != kinds[idx - 1]]
    runs = [LayerSpan(start, end) for start, end in pairwise([*changes, num_layers - 1])]
    if runs:
        longest = max(runs, key=lambda run: run.num_layers)  # of equal ones the first
        fitting = min(_LONG_RUN_BYTES // max(1, layer_bytes[longest.start]), math.ceil(num_layers / num_stages))
        spans.add(LayerSpan(longest.start, longest.start + min(longest.num_layers, _LONG_RUN_LAYERS, max(2, fitting))))
    return tuple(sorted(spans))


def solve(
    spans: Sequence[LayerSpan], times_ms: Sequence[float], kinds: Sequence[Hashable]
) -> tuple[float, dict[Hashable, float], float, float]:
    """Costs of an inference, of each kind of layer, of the embedding and of the head, from the times of `spans`. Pure.

    Least squares: parts that always occur together (a first layer of its own kind, and the embedding) share their cost evenly, which no
    cut can tell from any other division. Noise may make a part negative; it is then free.
    """
    names = list(dict.fromkeys(kinds))
    rows = []
    for span in spans:
        inside = list(kinds[span.start : span.end])
        rows.append([1, *(inside.count(name) for name in names), span.start == 0, span.end == len(kinds)])
    solution: npt.NDArray[np.float64] = np.linalg.lstsq(np.array(rows, dtype=np.float64), np.array(times_ms), rcond=None)[0]
    step_ms, *layer_ms, embedding_ms, head_ms = (max(0.0, float(value)) for value in solution)
    return step_ms, dict(zip(names, layer_ms, strict=True)), embedding_ms, head_ms


def measure_costs(
    cut: Callable[[LayerSpan], StageModule],
    shape: ModelShape,
    spans: Sequence[LayerSpan],
    kinds: Sequence[Hashable],
    stored: PartBytes,
    *,
    modes: WeightModes,
    activation_group_size: int,
    progress: Progress,
) -> ModelCosts:
    """Measure what a decoded and a prefilled token cost, with one inference thread under `fast`.

    Args:
        cut: gives the stage module of a span; called for few spans, one after another.
        shape: the model's numbers.
        spans: what to measure, from `spans_to_measure`.
        kinds: of each layer, from `WeightReader.layer_kinds`.
        stored: stored bytes of the parts.
        modes: how the parts are stored.
        activation_group_size: as in the manifest.
        progress: shows each step.
    """
    compiled = []
    for span in spans:
        with progress.task(f"measuring costs: preparing layers {span}"):
            model = _sample(cut(span), shape, span, modes)
            compiled.append(ov.Core().compile_model(model, "CPU", fast_properties(activation_group_size, threads=1)))
            del model
            gc.collect()  # modules and graphs hold one another; only one sample is there in float32
    with progress.task("measuring costs: timing"):
        timers = [
            _Timer(stage, shape, is_first=span.start == 0, is_last=span.end == shape.num_layers)
            for stage, span in zip(compiled, spans, strict=True)
        ]
        yardstick = Yardstick(ov, threads=1)  # timed in turns with the samples: what counts is how they compare
        *prefill_ms, chunk_ms = fastest_ms([*(timer.prefill for timer in timers), yardstick.prefill], _PREFILL_ROUNDS)
        decoders = [*(timer.decode for timer in timers), yardstick.decode]
        *decode_ms, row_ms = fastest_ms(decoders, _DECODE_ROUNDS)
        step_ms, layer_decode, embedding_decode, head_decode = solve(spans, decode_ms, kinds)
        for _ in range(_MOST_REPEATS):
            if min(layer_decode.values()) > 0:
                break
            *decode_ms, row_ms = map(min, [*decode_ms, row_ms], fastest_ms(decoders, _DECODE_ROUNDS))
            step_ms, layer_decode, embedding_decode, head_decode = solve(spans, decode_ms, kinds)
    layer_prefill, embedding_prefill = _prefill(spans, prefill_ms, kinds, layer_decode)

    def part(decode: float, prefill: float, num_bytes: int) -> PartCost:
        return PartCost(decode_ms=round(decode, 4), prefill_ms=round(prefill / PREFILL_TOKENS, 4), num_bytes=num_bytes)

    return ModelCosts(
        layers=tuple(part(layer_decode[kind], layer_prefill[kind], size) for kind, size in zip(kinds, stored.layers, strict=True)),
        embedding=part(embedding_decode, embedding_prefill, stored.embedding),
        head=part(head_decode, head_decode, stored.head),  # a chunk of a prompt needs one row of logits, at most
        step_ms=round(step_ms, 4),
        machine=machine_speed(row_ms, chunk_ms),
        cpu=str(ov.Core().get_property("CPU", "FULL_DEVICE_NAME")),
    )


def _prefill(
    spans: Sequence[LayerSpan], times_ms: Sequence[float], kinds: Sequence[Hashable], layer_decode: dict[Hashable, float]
) -> tuple[dict[Hashable, float], float]:
    """Prefill costs of a chunk, per kind of layer, and of the embedding.

    The last stage is left out: as traced, it computes logits for every row of a chunk, which a worker never does. A kind that only the last
    layer has gets what the others' ratio of prefill to decode says.
    """
    without_head = [(span, time_ms) for span, time_ms in zip(spans, times_ms, strict=True) if span.end < len(kinds)]
    if not without_head:  # a model of one layer: the head's share is taken for a decoded row's
        return dict.fromkeys(kinds, times_ms[0]), 0.0
    _, layer_ms, embedding_ms, _ = solve([span for span, _ in without_head], [time_ms for _, time_ms in without_head], kinds)
    known = {kind for span, _ in without_head for kind in kinds[span.start : span.end]}
    decode_ms = sum(layer_decode[kind] for kind in known)
    ratio = sum(layer_ms[kind] for kind in known) / decode_ms if decode_ms else 0.0
    return {kind: layer_ms[kind] if kind in known else layer_decode[kind] * ratio for kind in layer_ms}, embedding_ms


def _sample(stage: StageModule, shape: ModelShape, span: LayerSpan, modes: WeightModes) -> ov.Model:
    """A stage as it would stand in the bundle, without the way over the disk."""
    model = convert_stage(stage, shape)
    make_stateful(model, shape, span)
    compress_stage(model, modes)
    if modes.layers is WeightMode.FP16:
        compress_model_transformation(model)
    return model


class _Timer:
    """One compiled sample and its one stream."""

    def __init__(self, compiled: Any, shape: ModelShape, *, is_first: bool, is_last: bool) -> None:
        self._request = compiled.create_infer_request()
        self._shape = shape
        self._is_first = is_first
        self._is_last = is_last
        self._num_held = 0
        self.prefill()  # re-packs the weights
        self.decode()

    def prefill(self) -> None:
        """A chunk at the start of a text."""
        self._request.reset_state()
        self._num_held = 0
        self._run(2 if self._is_last else PREFILL_TOKENS)  # a last stage's prefill is not used, and a chunk's logits are large

    def decode(self) -> None:
        """One more token."""
        self._run(1)

    def _run(self, num_tokens: int) -> None:
        held = self._num_held
        ids = np.zeros((1, num_tokens), dtype=np.int64)
        rng = np.random.default_rng(held)
        hidden = rng.standard_normal((1, num_tokens, self._shape.hidden_size)).astype(np.float32)
        inputs = {
            "input_ids" if self._is_first else "inputs_embeds": ids if self._is_first else hidden,
            "attention_mask": np.ones((1, held + num_tokens), dtype=np.int64),
            "position_ids": np.arange(held, held + num_tokens, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        for name, array in inputs.items():
            self._request.set_tensor(name, ov.Tensor(array))
        self._request.start_async()  # with one thread the synchronous call swallows exceptions
        self._request.wait()
        self._num_held += num_tokens
