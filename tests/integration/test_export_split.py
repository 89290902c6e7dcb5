"""The split changes nothing: the same bytes for a layer, and the same logits, for any number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from export_tools.export import export_bundle
from langchain_pshard.core.bundle import WeightMode, load_manifest
from tests.support.bundles import DemoBundle, TinyBundle
from tests.support.graphs import stage_models, weight_constants
from tests.support.models import build_tiny
from tests.support.runners import running_chain
from workers.shard import Settings

COUNTS = (1, 2, 3, 4)
FAST_CASES = [
    ("llama", WeightMode.INT4),
    ("llama", WeightMode.INT8),
    ("gemma3_text", WeightMode.INT4),  # sliding and full layers, two rotary bases
    ("gemma3_text", WeightMode.INT8),
    ("qwen3_moe", WeightMode.INT4),
    ("gemma2", WeightMode.INT4),  # stateful only
]


@pytest.mark.parametrize(("architecture", "weights"), FAST_CASES)
def test_one_to_four_stages_have_the_same_bits_under_fast(tiny_bundle: TinyBundle, architecture: str, weights: WeightMode) -> None:
    text = np.random.default_rng(0).integers(8, 264, 40).tolist()
    found = []
    for num_stages in COUNTS:
        bundle = tiny_bundle(architecture, num_stages=num_stages, weights=weights)
        runner = "paged" if "paged" in load_manifest(bundle).runners else "stateful"
        with running_chain(bundle, Settings(runner=runner, threads=1, kv_memory_bytes=8 << 20)) as chain:
            assert len(chain.runners) == num_stages
            found.append(chain.generate(1, text, 40))
    tokens, logits = found[0]
    assert len(set(tokens)) > 5
    for cut_tokens, cut_logits in found[1:]:
        assert cut_tokens == tokens
        assert np.array_equal(cut_logits, logits)


@pytest.mark.parametrize(("architecture", "weights"), FAST_CASES)
def test_compressed_layers_do_not_depend_on_the_split(tiny_bundle: TinyBundle, architecture: str, weights: WeightMode) -> None:
    whole, *splits = (weight_constants(stage_models(tiny_bundle(architecture, num_stages=count, weights=weights))) for count in COUNTS)
    assert any(name.startswith("self.layers.3.self_attn.o_proj.weight") for name in whole)
    element_type = ov.Type.i4 if weights is WeightMode.INT4 else ov.Type.u8
    compressed = [name for name, constant in whole.items() if constant.element_type == element_type and "zero_point" not in name]
    products = 8 if architecture == "qwen3_moe" else 7  # of a layer; a mixture has a router, too
    assert len(compressed) == 4 * products + (0 if weights is WeightMode.INT4 else 2)  # the embedding and the head
    for split in splits:
        assert whole.items() <= split.items()


def test_scaled_layers_do_not_depend_on_the_split_either(tmp_path: Path) -> None:
    model = build_tiny("qwen2_moe", tmp_path / "model")  # a dense layer between sparse ones
    options: dict[str, Any] = {"weights": WeightMode.INT4, "group_size": 32, "verify_shards": False}
    found = []
    for num_stages in COUNTS:
        manifest = export_bundle(str(model), tmp_path / str(num_stages), num_stages=num_stages, awq=True, **options)
        assert load_manifest(tmp_path / str(num_stages)).awq is manifest.awq is True
        found.append(weight_constants(stage_models(tmp_path / str(num_stages))))
    for split in found[1:]:
        assert found[0].items() <= split.items()
    export_bundle(str(model), tmp_path / "plain", **options)
    plain = weight_constants(stage_models(tmp_path / "plain"))
    changed = {name for name, constant in plain.items() if found[0][name] != constant}
    assert changed
    assert all("up_proj" in name or "down_proj" in name for name in changed)


@pytest.mark.real_model
def test_layers_of_the_real_model_do_not_depend_on_the_split(demo_bundle: DemoBundle) -> None:
    whole, *splits = (weight_constants(stage_models(demo_bundle(layers=layers))) for layers in ((18,), (16, 2), (6, 6, 6)))
    assert sum(constant.element_type == ov.Type.i4 for constant in whole.values()) == 18 * 7
    for split in splits:
        assert whole.items() <= split.items()
