"""The decoder layers of one span as a traceable module, for any supported architecture.

Nothing of a model is rewritten: the layers of transformers run as they are, with three things put in their hands. An attention
function (registered under `ATTENTION_NAME`) made of operations that OpenVINO fuses; a cache object that joins explicit past tensors
with the new ones; and a mask and rotary embeddings computed from `attention_mask` and `position_ids`, so that a graph needs no
notion of how many tokens it has seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from export_tools.architectures import ModelShape
from langchain_pshard.core.bundle import LayerSpan

ATTENTION_NAME = "pshard"
MASKED = -65504.0
"""Added to the scores of invisible slots: the lowest float16, so that it survives --weights fp16; finite, so that a row that sees nothing
(padding) gives no NaN. exp() of it is exactly 0."""

_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")  # the names transformers 5.24, 5.x and 4.x use


def _attend(
    module: Any,
    query: torch.Tensor,  # [batch, heads, tokens, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, slots, head_dim]
    value: torch.Tensor,  # [batch, kv_heads, slots, head_dim]
    attention_mask: torch.Tensor,  # [batch, 1, tokens, slots], float, added to the scores
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,  # dropout (0 here) and sliding_window (already in the mask)
) -> tuple[torch.Tensor, None]:
    """Attention in the form the CPU plugin fuses: grouped heads by unsqueeze, expand and reshape (repeat does not fuse)."""
    num_heads = query.shape[1]
    if key.shape[1] != num_heads:
        key, value = _expand_heads(key, num_heads), _expand_heads(value, num_heads)
    if softcap is None:
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        # Gemma2 bounds the scores with tanh before the mask; scaled_dot_product_attention has no place for it.
        factor = module.head_dim**-0.5 if scaling is None else scaling
        scores = torch.tanh(query @ key.transpose(2, 3) * factor / softcap) * softcap
        mixed = torch.softmax(scores + attention_mask, dim=-1) @ value
    return mixed.transpose(1, 2), None  # [batch, tokens, heads, head_dim]


def _expand_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    batch, kv_heads, slots, head_dim = states.shape
    grouped = states[:, :, None].expand(batch, kv_heads, num_heads // kv_heads, slots, head_dim)
    return grouped.reshape(batch, num_heads, slots, head_dim)


def _run_experts(
    module: Any,
    hidden: torch.Tensor,  # [tokens, hidden]
    expert_ids: torch.Tensor,  # [tokens, chosen]
    expert_weights: torch.Tensor,  # [tokens, chosen]
) -> torch.Tensor:
    """A mixture of experts in the form that the CPU plugin turns into products with the chosen experts alone.

    As written, every expert sees every token and the routing weights of those not chosen are zero: tile, three batched products, a
    scatter of the weights, a sum. `_split_experts` has parted the fused gate and up projections.
    """
    num_experts = module.gate_proj.shape[0]
    tiled = hidden.repeat(num_experts, 1).view(num_experts, -1, hidden.shape[-1])  # [experts, tokens, hidden]
    gated = module.act_fn(torch.bmm(tiled, module.gate_proj.transpose(1, 2))) * torch.bmm(tiled, module.up_proj.transpose(1, 2))
    outputs = torch.bmm(gated, module.down_proj.transpose(1, 2)).view(num_experts, 1, -1, hidden.shape[-1])
    routing = torch.zeros(hidden.shape[0], num_experts, dtype=hidden.dtype).scatter(1, expert_ids, expert_weights.to(hidden.dtype))
    routing = routing.transpose(0, 1).view(num_experts, 1, -1).unsqueeze(-1)  # [experts, 1, tokens, 1]
    return (outputs * routing).sum(dim=0).view(-1, hidden.shape[-1])


def _split_experts(model: Any) -> None:
    """Part gate and up projections that transformers keeps as one tensor, so that each is a constant of the graph that can be compressed.

    Module by module, so that only one copy of one layer's experts is extra at a time; experts without data are left alone.
    """
    for module in model.modules():
        fused = getattr(module, "gate_up_proj", None)
        if isinstance(fused, nn.Parameter) and fused.dim() == 3 and not fused.is_meta:
            gate, up = fused.detach().chunk(2, dim=1)
            module.gate_proj, module.up_proj = (nn.Parameter(part.contiguous(), requires_grad=False) for part in (gate, up))
            del module.gate_up_proj


class _PastTensors:
    """Stands in for a transformers cache: joins the past it was given with what the layers bring."""

    def __init__(self, first_layer: int, past: Sequence[torch.Tensor]) -> None:
        self._first_layer = first_layer
        self._past = past  # key, value, key, value, ..: [batch, kv_heads, past, head_dim]
        self.present: list[torch.Tensor] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        at = 2 * (layer_idx - self._first_layer)
        joined = torch.cat([self._past[at], key], dim=2), torch.cat([self._past[at + 1], value], dim=2)
        self.present.extend(joined)
        return joined


def attention_bias(attention_mask: torch.Tensor, position_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """What is added to the scores, [batch, 1, tokens, slots].

    The logical position of a slot is the number of unmasked slots before it, so rejected tokens may stay in the cache, masked, and
    causality and windows still hold. A slot is visible to a query at position q when it is unmasked, its position is at most q and,
    with a window, greater than q - window.

    Args:
        attention_mask: [batch, slots], 1 where a slot counts.
        position_ids: [batch, tokens], logical positions of the queries.
        window: positions a query sees, itself included; None for all.
    """
    slot_positions = (attention_mask.cumsum(-1) - 1)[:, None, None, :]
    query_positions = position_ids[:, None, :, None]
    visible = (attention_mask[:, None, None, :] != 0) & (slot_positions <= query_positions)
    if window is not None:
        visible = visible & (slot_positions > query_positions - window)
    return torch.where(visible, 0.0, MASKED)


class StageModule(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
    """Decoder layers [span.start, span.end) with the embedding before the first and the norm and head after the last.

    Layers keep their index in the whole model as their name, so the nodes of a layer are called the same whatever the split.
    """

    def __init__(self, model: Any, shape: ModelShape, span: LayerSpan) -> None:
        super().__init__()
        decoder = model.model
        self.span = span
        self.is_first = span.start == 0
        self.is_last = span.end == shape.num_layers
        self.layers = nn.ModuleDict({str(idx): decoder.layers[idx] for idx in range(span.start, span.end)})
        self.rotary_emb = decoder.rotary_emb
        if self.is_first:
            self.embed_tokens = decoder.embed_tokens
        if self.is_last:
            self.norm = decoder.norm
            self.lm_head = model.lm_head
        config = model.config
        self._windows = shape.attention_windows
        self._kinds = _layer_kinds(config, shape.num_layers)
        self._rope_takes_kind = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
        self._cache_argument = _cache_argument(decoder.layers[span.start])
        self._embedding_multiplier = getattr(config, "embedding_multiplier", None)  # Granite; Gemma's scale is in its embedding
        self._logits_scaling = getattr(config, "logits_scaling", None)  # Granite divides
        self._logits_softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3

    def forward(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the span.

        Args:
            tokens: ids [batch, tokens] in the first stage, hidden states [batch, tokens, hidden] in the others.
            attention_mask: [batch, past + tokens].
            position_ids: [batch, tokens].
            past: per layer a key and a value, [batch, kv_heads, past, head_dim].

        Returns:
            Logits (last stage) or hidden states, then per layer the grown key and value.
        """
        hidden = self._embed(tokens) if self.is_first else tokens
        cache = _PastTensors(self.span.start, past)
        indices = range(self.span.start, self.span.end)
        biases = {window: attention_bias(attention_mask, position_ids, window) for window in {self._windows[idx] for idx in indices}}
        ropes = {kind: self._rope(hidden, position_ids, kind) for kind in sorted({self._kinds[idx] for idx in indices})}
        for idx in indices:
            hidden = self._run_layer(
                self.layers[str(idx)],
                hidden,
                attention_mask=biases[self._windows[idx]],
                position_embeddings=ropes[self._kinds[idx]],
                position_ids=position_ids,
                **{self._cache_argument: cache},
            )
        output = self._logits(hidden) if self.is_last else hidden
        return (output, *cache.present)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_tokens(input_ids)
        return embedded if self._embedding_multiplier is None else embedded * self._embedding_multiplier

    def _rope(self, hidden: torch.Tensor, position_ids: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (kind,) if self._rope_takes_kind else ()
        cos, sin = self.rotary_emb(hidden, position_ids, *arguments)
        return cos, sin

    @staticmethod
    def _run_layer(layer: Any, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        result = layer(hidden, **arguments)
        return result[0] if isinstance(result, tuple) else result

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.norm(hidden))
        if self._logits_scaling is not None:
            logits = logits / self._logits_scaling
        if self._logits_softcap is not None:
            logits = torch.tanh(logits / self._logits_softcap) * self._logits_softcap
        return logits


def _layer_kinds(config: Any, num_layers: int) -> tuple[str, ...]:
    """Which rotary embedding a layer takes; one kind for all where the config does not tell layers apart."""
    kinds = getattr(config, "layer_types", None)
    return tuple(kinds[:num_layers]) if kinds else ("full_attention",) * num_layers


def _cache_argument(layer: Any) -> str:
    parameters = inspect.signature(layer.forward).parameters
    for name in _CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise AssertionError(f"{type(layer).__name__} takes no cache under any known name: {', '.join(parameters)}")


def cut_stage(model: Any, shape: ModelShape, span: LayerSpan) -> StageModule:
    """The layers `span` of a loaded causal language model, sharing its weights; `model` runs our attention from here on."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION_NAME, _run_experts)
    model.config._attn_implementation = ATTENTION_NAME
    model.config._experts_implementation = ATTENTION_NAME
    _split_experts(model)
    stage = StageModule(model, shape, span)
    stage.eval()
    return stage
