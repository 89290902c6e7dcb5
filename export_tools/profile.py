"""What a plan needs to know of a model: read from a bundle's manifest, or estimated from a config before any export.

Measured costs are brought to the reference machine of the yardstick. Where nothing was measured, bytes stand in for time: a decoded
token costs the bytes it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from export_tools.placement import ModelProfile
from langchain_pshard.core.bundle import Manifest, ModelCosts, PartCost, WeightMode
from langchain_pshard.core.yardstick import REFERENCE_DECODE_MS, REFERENCE_PREFILL_MS, YARDSTICK_BYTES, YARDSTICK_PARAMETERS

_HIDDEN_VALUE_BYTES = 4  # float32 on the wire
_KV_VALUE_BYTES = 2  # f16 under `fast`
_SAMPLING_BYTES = 2048
"""For each word: the tokenizer by which a last stage enforces grammars takes 1.4 KiB (Gemma's, 262,144 words), logits 4 bytes a row."""


def profile_of_manifest(manifest: Manifest) -> ModelProfile:
    """The profile of an exported model. Pure."""
    costs = manifest.costs
    if costs is None:
        layers, embedding, head = _bytes_of_manifest(manifest)
        return estimated_profile(
            name=manifest.model_name,
            layer_bytes=layers,
            embedding_bytes=embedding,
            head_bytes=head,
            weights=manifest.weight_mode,
            ends=manifest.head_mode,
            hidden_size=manifest.hidden_size,
            kv_values=2 * manifest.num_kv_heads * manifest.head_dim,
            vocab_size=manifest.vocab_size,
            windows=passed_windows(manifest.attention_windows, manifest.runners),
        )
    return ModelProfile(
        name=manifest.model_name,
        layers=tuple(_at_reference(part, costs) for part in costs.layers),
        embedding=_at_reference(costs.embedding, costs),
        head=_at_reference(costs.head, costs),
        step_ms=costs.step_ms * costs.machine.decode,
        hidden_bytes=manifest.hidden_size * _HIDDEN_VALUE_BYTES,
        kv_layer_bytes=2 * manifest.num_kv_heads * manifest.head_dim * _KV_VALUE_BYTES,
        sampling_bytes=manifest.vocab_size * _SAMPLING_BYTES,
        windows=passed_windows(manifest.attention_windows, manifest.runners),
        is_measured=True,
    )


def passed_windows(windows: Sequence[int | None], runners: Sequence[str]) -> tuple[int | None, ...]:
    """The windows by which a stage gives KV back, one for each layer: none unless it is served paged. Pure."""
    return tuple(windows) if "paged" in runners else (None,) * len(windows)


def estimated_profile(
    *,
    name: str,
    layer_bytes: Sequence[int],
    embedding_bytes: int,
    head_bytes: int,
    weights: WeightMode,
    ends: WeightMode,
    hidden_size: int,
    kv_values: int,
    vocab_size: int,
    windows: Sequence[int | None],
) -> ModelProfile:
    """A profile from stored bytes alone. Pure.

    Args:
        name: of the model.
        layer_bytes, embedding_bytes, head_bytes: stored bytes.
        weights, ends: modes of the layers and of embedding and head.
        hidden_size: values of a hidden state.
        kv_values: values of KV that one position takes in one layer.
        vocab_size: words of the vocabulary.
        windows: of each layer, from `passed_windows`.
    """
    return ModelProfile(
        name=name,
        layers=tuple(_estimated(num_bytes, weights) for num_bytes in layer_bytes),
        embedding=PartCost(decode_ms=0.0, prefill_ms=0.0, num_bytes=embedding_bytes),  # one row of it is read
        head=PartCost(decode_ms=_estimated(head_bytes, ends).decode_ms, prefill_ms=0.0, num_bytes=head_bytes),  # one row of a chunk
        step_ms=0.0,
        hidden_bytes=hidden_size * _HIDDEN_VALUE_BYTES,
        kv_layer_bytes=kv_values * _KV_VALUE_BYTES,
        sampling_bytes=vocab_size * _SAMPLING_BYTES,
        windows=tuple(windows),
        is_measured=False,
    )


def _estimated(num_bytes: int, mode: WeightMode) -> PartCost:
    parameters = num_bytes * 8 / mode.bits
    return PartCost(
        decode_ms=num_bytes / YARDSTICK_BYTES * REFERENCE_DECODE_MS,
        prefill_ms=parameters / YARDSTICK_PARAMETERS * REFERENCE_PREFILL_MS,
        num_bytes=num_bytes,
    )


def _at_reference(part: PartCost, costs: ModelCosts) -> PartCost:
    return PartCost(
        decode_ms=part.decode_ms * costs.machine.decode, prefill_ms=part.prefill_ms * costs.machine.prefill, num_bytes=part.num_bytes
    )


def _bytes_of_manifest(manifest: Manifest) -> tuple[list[int], int, int]:
    """Stored bytes of the parts, where the manifest names only those of whole stages: what the ends do not explain is spread evenly."""
    matrix = manifest.vocab_size * manifest.hidden_size
    embedding = matrix * manifest.embedding_mode.bits // 8
    head = matrix * manifest.head_mode.bits // 8
    weights = sum(file.num_bytes for stage in manifest.stages for file in stage.files if file.path.endswith(".bin"))
    layer = max(1, (weights - embedding - head) // manifest.num_layers)
    return [layer] * manifest.num_layers, embedding, head
