"""The profile of a model that is not exported yet: shapes from its config, on torch's meta device; no weights are read."""

from __future__ import annotations

import torch
import transformers

from export_tools.compress import WeightModes
from export_tools.export import part_bytes
from export_tools.placement import ModelProfile
from export_tools.profile import estimated_profile, passed_windows
from export_tools.progress import SilentProgress
from export_tools.source import identify
from export_tools.weights import sizes_of
from langchain_pshard.core.bundle import WeightMode


def profile_of_source(source: str, weights: WeightMode) -> ModelProfile:
    """Estimate a profile; `source` is whatever can be exported.

    Raises:
        SourceError: nothing usable under that name.
        UnsupportedModelError: a model that cannot be cut.
    """
    found = identify(source, SilentProgress())
    with torch.device("meta"):
        model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(found.config)](found.config)
    modes = WeightModes.of(weights, embedding=None, head=None, group_size=128)
    stored = part_bytes(sizes_of(model), modes)
    return estimated_profile(
        name=found.name,
        layer_bytes=stored.layers,
        embedding_bytes=stored.embedding,
        head_bytes=stored.head,
        weights=weights,
        ends=modes.head,
        hidden_size=found.shape.hidden_size,
        kv_values=2 * found.shape.num_kv_heads * found.shape.head_dim,
        vocab_size=found.shape.vocab_size,
        windows=passed_windows(found.shape.attention_windows, found.shape.runners),
    )
