"""Shards against the unsplit model, as part of every export.

The reference is transformers' own forward pass (its masks, its eager attention, its order of layers), not the stage module that the
shards were made from. It runs span by span: the layers of other spans let the hidden states through, so that no more of the model is in
memory than the export needs anyway, and the result is that of the whole model. The shards run as plain stateful OpenVINO graphs in float32:
most of a text at once, the rest token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from export_tools.architectures import ModelShape
from export_tools.compress import WeightModes
from langchain_pshard.core.bundle import LayerSpan, Verification, WeightMode
from langchain_pshard.core.errors import VerificationError

TEXTS = (
    "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs, lit the lamp and wrote the"
    " weather into a book, and every morning the fishermen read it before they sailed.",
    "To divide 84 by 7, take 70 first, which is ten times 7; the rest is 14, twice 7. So the answer is 12. Divided by 5, the same number"
    " gives 16 and a rest of 4.",
    "def mean(values):\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))",
)
_MAX_TOKENS = 48
_NUM_DECODED = 4  # of each text, one at a time
_LIMITS = {WeightMode.FP32: 1e-4, WeightMode.FP16: 5e-2}
"""Largest logit difference relative to the largest logit. Measured: 1e-6 and 5e-3; int modes are a trade and have none."""

Arrays = list[NDArray[Any]]


def text_ids(tokenizer: Any, shape: ModelShape) -> Arrays:
    """Token ids of the texts, [tokens], cut so that they are quick and fit the context."""
    limit = min(_MAX_TOKENS, shape.context_length)
    found = [np.array(tokenizer(text)["input_ids"][:limit], dtype=np.int64) for text in TEXTS]
    return [ids[ids < shape.vocab_size] for ids in found]


def run_reference(model: Any, shape: ModelShape, span: LayerSpan, inputs: Arrays) -> Arrays:
    """One span as transformers computes it.

    Args:
        model: holds the weights of the span (`WeightReader.read`); its layers are not cut yet.
        shape: of the whole model.
        span: the layers.
        inputs: for each text its ids [tokens] (first span) or hidden states [tokens, hidden].

    Returns:
        For each text hidden states, or logits for the last span.
    """
    decoder = model.model
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    is_first, is_last = span.start == 0, span.end == shape.num_layers
    patched = [layer for idx, layer in enumerate(decoder.layers) if not span.start <= idx < span.end]
    patched += [] if is_last else [decoder.norm]
    for module in patched:
        module.forward = _pass_through
    multiplier = getattr(decoder, "embedding_multiplier", None)
    if multiplier is not None and not is_first:  # Granite scales whatever comes in
        decoder.embedding_multiplier = 1.0
    outputs = []
    try:
        with torch.no_grad():
            for values in inputs:
                tensor = torch.from_numpy(values)[None]
                arguments = {"input_ids": tensor} if is_first else {"inputs_embeds": tensor}
                result = model(**arguments, use_cache=False).logits if is_last else decoder(**arguments, use_cache=False).last_hidden_state
                outputs.append(result[0].float().numpy())
    finally:
        for module in patched:
            del module.forward
        if multiplier is not None:
            decoder.embedding_multiplier = multiplier
    return outputs


def _pass_through(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def run_shard(xml: Path, inputs: Arrays) -> Arrays:
    """One shard over every text, in float32; arguments and result as in `run_reference`."""
    settings = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(xml, "CPU", settings)
    outputs = []
    for values in inputs:
        request = compiled.create_infer_request()  # its own state
        num_prefill = max(1, len(values) - _NUM_DECODED)
        pieces = [(0, num_prefill), *((start, start + 1) for start in range(num_prefill, len(values)))]
        outputs.append(np.concatenate([_infer(request, values, start, end) for start, end in pieces]))
    return outputs


def _infer(request: Any, values: NDArray[Any], start: int, end: int) -> NDArray[Any]:
    request.start_async(
        {
            0: values[None, start:end],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    request.wait()  # start_async and wait: the synchronous form swallows exceptions with one thread
    result: NDArray[Any] = request.get_output_tensor(0).data[0].copy()
    return result


def compare(ids: Arrays, before: Arrays, after: Arrays) -> Verification:
    """The figures that the manifest keeps; `before` and `after` are logits of the model and of the shards."""
    agreed = np.concatenate([left.argmax(-1) == right.argmax(-1) for left, right in zip(before, after, strict=True)])
    return Verification(
        num_texts=len(ids),
        num_tokens=len(agreed),
        max_logit_difference=max(_largest(left - right) for left, right in zip(before, after, strict=True)),
        largest_logit=max(_largest(logits) for logits in before),
        token_agreement=float(agreed.mean()),
        perplexity_before=_perplexity(ids, before),
        perplexity_after=_perplexity(ids, after),
    )


def check(verification: Verification, modes: WeightModes, *, name: str) -> None:
    """Refuse shards that do not compute what the model of this name computes.

    Raises:
        VerificationError: with the figure and its limit.
    """
    if not np.isfinite(verification.max_logit_difference):
        raise VerificationError(f"the shards of {name} give infinite or undefined logits on plain text: nothing was published")
    relative = verification.max_logit_difference / verification.largest_logit
    stored = {modes.layers, modes.embedding, modes.head}
    limit = max(_LIMITS[mode] for mode in stored) if stored <= set(_LIMITS) else None
    if limit is not None and relative > limit:
        raise VerificationError(
            f"the shards of {name} differ from it: largest logit difference {verification.max_logit_difference:.3g}, {relative:.2g} of the"
            f" largest logit, at most {limit:g} is expected of {modes.layers.value}: nothing was published. This is a defect of the"
            " exporter or of its support for this model; please report it. --no-verify publishes all the same"
        )


def _largest(values: NDArray[Any]) -> float:
    return float(np.abs(values).max())


def _perplexity(ids: Sequence[NDArray[Any]], logits: Arrays) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each text."""
    losses = []
    for tokens, rows in zip(ids, logits, strict=True):
        used = rows[:-1].astype(np.float64)
        peak = used.max(-1, keepdims=True)
        log_sum = np.log(np.exp(used - peak).sum(-1)) + peak[:, 0]
        losses.append(log_sum - used[np.arange(len(used)), tokens[1:]])
    return float(np.exp(np.concatenate(losses).mean()))
