"""Scaling before int4 changes nothing but rounding, and is refused where it cannot be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from export_tools.awq import check, rescale
from export_tools.compress import WeightModes
from export_tools.quantize import to_int4
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError, UnsupportedModelError

HIDDEN, INNER, GROUP = 64, 128, 64


class Gated(nn.Module):
    """As Llama has it."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Fused(nn.Module):
    """As Phi 3 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(HIDDEN, 2 * INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Experts(nn.Module):
    """Merged experts, apart as the stage module parts them; every expert runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(3, INNER, HIDDEN)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.randn(3, HIDDEN, INNER))

    def forward(self, hidden: torch.Tensor) -> Any:
        gate, up = (torch.einsum("th,eih->eti", hidden, weight) for weight in (self.gate_proj, self.up_proj))
        return torch.einsum("eti,ehi->eth", nn.functional.silu(gate) * up, self.down_proj)


@pytest.mark.parametrize("make", [Gated, lambda: Gated(bias=True), Fused, Experts], ids=["gated", "with bias", "fused", "experts"])
def test_a_layer_computes_what_it_computed_and_its_columns_are_alike(make: Any) -> None:
    torch.manual_seed(0)
    layer, hidden = make(), torch.randn(5, HIDDEN)
    down = layer.down_proj if isinstance(layer.down_proj, torch.Tensor) else layer.down_proj.weight
    with torch.no_grad():
        down.mul_(torch.logspace(-2, 2, INNER))  # columns of very different sizes
        expected = layer(hidden)
        rescale([layer])
        assert torch.allclose(layer(hidden), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert torch.allclose(down.abs().mean(dim=-2), torch.ones(down.shape[-1]), rtol=1e-5)


def test_rounding_costs_less() -> None:
    torch.manual_seed(0)
    layer = Gated()
    hidden = torch.randn(50, HIDDEN)
    with torch.no_grad():
        layer.down_proj.weight.mul_(torch.logspace(-2, 2, INNER)[torch.randperm(INNER)])
        layer.up_proj.weight.mul_(torch.rand(INNER, 1) + 0.5)
        expected = layer(hidden)
        errors = []
        for scales in (False, True):
            if scales:
                rescale([layer])
            inner = nn.functional.silu(layer.gate_proj(hidden)) * layer.up_proj(hidden)
            errors.append(float((inner @ rounded(layer.down_proj.weight).T - expected).norm()))
    assert errors[1] < 0.9 * errors[0]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    int4 = to_int4(weight.numpy(), GROUP)
    nibbles = torch.from_numpy(int4.packed)
    values = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).flatten(-2).to(torch.float32)
    values = torch.where(values > 7, values - 16, values)
    return values * torch.from_numpy(int4.scales).float().repeat_interleave(GROUP, dim=-1)


def test_a_layer_without_a_gate_is_refused_by_name() -> None:
    plain = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
    check([Gated(), Fused()], origin="some-model", architecture="llama")
    with pytest.raises(UnsupportedModelError, match=r"--awq cannot scale some-model \(starcoder2\): layer 1 has no up projection"):
        check([Gated(), plain], origin="some-model", architecture="starcoder2")


@pytest.mark.parametrize("mode", [WeightMode.INT8, WeightMode.FP16, WeightMode.FP32])
def test_only_int4_is_scaled(mode: WeightMode) -> None:
    with pytest.raises(InvalidOptionError, match=rf"--awq goes with --weights int4 only, not with {mode.value}"):
        WeightModes.of(mode, embedding=None, head=None, group_size=128, awq=True)
