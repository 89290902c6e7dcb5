"""Activation-aware scaling before int4, without data: what goes into a down projection is scaled so that its columns are alike.

The idea is AWQ's (Lin et al. 2023, arXiv 2306.00978); without activations to look at, the mean magnitude of a column stands in for its
importance, as in NNCF's data-free form. A column of the down projection is divided by its mean magnitude, so that a group of int4 weights
shares its scale among numbers of one size; the row of the up projection that feeds it is multiplied by the same number. That changes
nothing but rounding, because `down @ (gate * up)` is linear in each row of `up`.

It looks at one layer alone, so a layer still gets the same bytes whatever the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from langchain_pshard.core.errors import UnsupportedModelError

_SMALLEST = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Tensors of one feed-forward block, or of all experts of one."""

    up: torch.Tensor
    """[.., inner, hidden]."""
    up_bias: torch.Tensor | None
    """[.., inner]."""
    down: torch.Tensor
    """[.., hidden, inner]."""


def check(layers: Any, *, origin: str, architecture: str) -> None:
    """Refuse a model without the products that this is about, from its shapes alone.

    Args:
        layers: decoder layers; their weights may be on the meta device.
        origin: names the model in the error.
        architecture: of the model.

    Raises:
        UnsupportedModelError: some layer has no up and down projection with a gate between them.
    """
    for idx, layer in enumerate(layers):
        if not list(_pairs(layer)):
            raise UnsupportedModelError(
                f"--awq cannot scale {origin} ({architecture}): layer {idx} has no up projection that a gate multiplies before a down"
                " projection, and without that a scale would have to be computed for every token; leave --awq out"
            )


def rescale(layers: Any) -> None:
    """Scale the layers of a stage, in place."""
    with torch.no_grad():
        for layer in layers:
            for pair in _pairs(layer):
                sizes = pair.down.abs().mean(dim=-2).clamp_min(_SMALLEST)  # [.., inner]
                pair.down.div_(sizes.unsqueeze(-2))
                pair.up.mul_(sizes.unsqueeze(-1))
                if pair.up_bias is not None:
                    pair.up_bias.mul_(sizes)


def _pairs(layer: Any) -> Iterator[_Pair]:
    """Up and down projections as transformers names them: apart, or with the gate in one tensor, as Phi 3 and fused experts have it."""
    for module in layer.modules():
        down = _weight(getattr(module, "down_proj", None))
        if down is None:
            continue
        up, fused = getattr(module, "up_proj", None), getattr(module, "gate_up_proj", None)
        if up is not None and hasattr(module, "gate_proj"):
            yield _Pair(up=_weight(up), up_bias=getattr(up, "bias", None), down=down)
        elif fused is not None:
            weight, bias = _weight(fused), getattr(fused, "bias", None)
            yield _Pair(up=weight.chunk(2, dim=-2)[1], up_bias=None if bias is None else bias.chunk(2, dim=-1)[1], down=down)


def _weight(part: Any) -> Any:
    """The tensor of a linear layer, or of merged experts, which have no layer of their own."""
    return part if isinstance(part, torch.Tensor) else getattr(part, "weight", None)
