"""What a worker serves and how that goes: the offers of its Welcome, the figures of its Status."""

from __future__ import annotations

import msgspec

from langchain_pshard.core.bundle import LayerSpan


class StageOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One stage a worker serves."""

    stage_idx: int
    num_stages: int
    span: LayerSpan
    num_bytes: int
    """Size of the shard's weights on disk."""
    kv_capacity_tokens: int
    """KV positions the stage can hold, over all streams."""
    is_resumable: bool = True
    """Whether rejected positions can be rewound exactly under this worker's numerics class."""
    allows_logits: bool = False
    """Whether slices may ask for their logits: the last stage of a worker that was started for comparison."""
    kv_stream_tokens: int | None = None
    """Most KV positions of one stream, however long it is, where every layer has a window; None: as many as it has."""


class DraftOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model a worker serves beside its stages, or alone."""

    model_name: str
    num_bytes: int
    kv_capacity_tokens: int
    context_length: int


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Live figures of one engine."""

    num_streams: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    num_steps: int
    num_tokens: int
    compute_ms: float
    """Total time in inference since start."""


class StageStatus(EngineStatus, frozen=True, kw_only=True):
    """Live figures of one stage."""

    stage_idx: int
