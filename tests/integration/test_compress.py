"""Our compression against NNCF's: the same bytes for the unsplit model, in the same graph."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from benchmarks.perplexity import text_tokens, token_losses
from export_tools.compress import WeightModes, compress_stage
from export_tools.convert import convert_stage
from export_tools.progress import SilentProgress
from export_tools.quantize import to_int4, to_int8
from export_tools.source import identify, open_weights
from export_tools.stage_module import cut_stage
from export_tools.stateful import make_stateful
from export_tools.verify import run_shard
from langchain_pshard.core.bundle import MODEL_XML, LayerSpan, WeightMode, load_manifest, stage_dir
from tests.support.bundles import DemoBundle
from tests.support.graphs import stage_models, weight_constants
from tests.support.models import build_tiny


def nncf_compressed(model: ov.Model, **options: Any) -> ov.Model:
    """As anybody would call it, but for its tables and bars on standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        return nncf.compress_weights(model, **options)


def unsplit(model: Path | str) -> ov.Model:
    """The graph of a whole model, not compressed."""
    source = identify(str(model), SilentProgress())
    span = LayerSpan(0, source.shape.num_layers)
    graph = convert_stage(cut_stage(open_weights(source, SilentProgress()).read(span), source.shape, span), source.shape)
    make_stateful(graph, source.shape, span)
    return graph


def assert_same_graphs(ours: ov.Model, theirs: ov.Model) -> None:
    assert weight_constants([ours]) == weight_constants([theirs])
    kinds = [sorted(f"{node.get_type_name()} {node.get_output_partial_shape(0)}" for node in graph.get_ops()) for graph in (ours, theirs)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("architecture", "settings", "group_size"),
    [
        ("llama", {}, 32),
        ("llama", {"intermediate_size": 96}, 64),  # a group that does not divide every matrix
        ("llama", {"intermediate_size": 100}, 64),  # no group at all divides one: int8
        ("gemma3_text", {"tie_word_embeddings": True}, 128),
        ("qwen3_moe", {}, 32),
    ],
)
def test_int4_is_what_nncf_makes_of_the_unsplit_model(tmp_path: Path, architecture: str, settings: dict[str, Any], group_size: int) -> None:
    model = build_tiny(architecture, tmp_path / "model", **settings)
    ours, theirs = unsplit(model), unsplit(model)
    compress_stage(ours, WeightModes.of(WeightMode.INT4, embedding=None, head=None, group_size=group_size))
    theirs = nncf_compressed(
        theirs,
        mode=nncf.CompressWeightsMode.INT4_SYM,
        ratio=1.0,
        group_size=group_size,
        advanced_parameters=nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST),
    )
    assert_same_graphs(ours, theirs)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_int8_is_what_nncf_makes_of_the_unsplit_model(tmp_path: Path, architecture: str) -> None:
    model = build_tiny(architecture, tmp_path / "model")
    ours, theirs = unsplit(model), unsplit(model)
    compress_stage(ours, WeightModes.of(WeightMode.INT8, embedding=None, head=None, group_size=128))
    assert_same_graphs(ours, nncf_compressed(theirs, mode=nncf.CompressWeightsMode.INT8_ASYM))


def product(weights: np.ndarray, *, is_turned: bool = False) -> ov.Model:
    hidden = opset13.parameter([-1, weights.shape[1]], dtype=np.float32)
    constant = opset13.constant(np.ascontiguousarray(weights.T) if is_turned else weights)
    constant.set_friendly_name("weight")
    return ov.Model([opset13.matmul(hidden, constant, transpose_a=False, transpose_b=not is_turned)], [hidden])


def edge_cases(scale: float) -> np.ndarray:
    """Random rows, and rows of nothing, of one number, of one sign."""
    weights = np.random.default_rng(0).standard_normal((700, 640)).astype(np.float32)  # more than one piece
    weights[0], weights[1], weights[2], weights[3], weights[4] = 0, 5, -5, np.abs(weights[3]), -np.abs(weights[4])
    weights[5, :40] = 0
    return weights * np.float32(scale)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-3, 1e-6, 1e-9])
def test_single_matrices_of_all_magnitudes(scale: float) -> None:
    weights = edge_cases(scale)
    theirs = nncf_compressed(product(weights), mode=nncf.CompressWeightsMode.INT4_SYM, ratio=1.0, group_size=64, all_layers=True)
    data = {node.get_friendly_name(): node.get_data() for node in theirs.get_ops() if node.get_type_name() == "Constant"}
    int4 = to_int4(weights, 64)
    assert np.array_equal(int4.packed.ravel(), data["weight"].view(np.uint8).ravel())
    assert np.array_equal(int4.scales.ravel(), data["weight/scale"].ravel())
    theirs = nncf_compressed(product(weights), mode=nncf.CompressWeightsMode.INT8_ASYM)
    data = {node.get_friendly_name(): node.get_data() for node in theirs.get_ops() if node.get_type_name() == "Constant"}
    int8 = to_int8(weights)
    assert np.array_equal(int8.values, data["weight"])
    assert np.array_equal(int8.scales, data["weight/scale"])
    assert np.array_equal(int8.zero_points, data["weight/zero_point"])


@pytest.mark.parametrize("mode", [WeightMode.INT4, WeightMode.INT8, WeightMode.FP16])
def test_weights_the_other_way_round_are_stored_row_by_row(mode: WeightMode) -> None:
    """Layers of a model that brings its own code may multiply by [inputs, outputs]."""
    weights = np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)
    modes = WeightModes.of(mode, embedding=WeightMode.INT8, head=WeightMode.INT8, group_size=32)
    stored = []
    for is_turned in (False, True):
        graph = product(weights, is_turned=is_turned)
        graph.input(0).get_tensor().set_names({"inputs_embeds"})
        compress_stage(graph, modes)
        stored.append(weight_constants([graph]))
        compiled = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"})
        hidden = np.eye(64, dtype=np.float32)
        difference = np.abs(compiled(hidden)[0] - weights.T).max()
        assert difference < {WeightMode.INT4: 0.45, WeightMode.INT8: 0.02, WeightMode.FP16: 2e-3}[mode]
    assert stored[0] == stored[1]


@pytest.mark.real_model
def test_int4_of_the_real_model_costs_what_nncf_makes_it_cost(demo_bundle: DemoBundle, tmp_path: Path) -> None:
    """At most 6 % more perplexity was allowed; with the same bytes there is none."""
    bundle = demo_bundle(weights=WeightMode.INT4, layers=(18,))
    (ours,) = stage_models(bundle)
    theirs = nncf_compressed(unsplit("demo"), mode=nncf.CompressWeightsMode.INT4_SYM, ratio=1.0, group_size=128)
    assert weight_constants([ours]) == weight_constants([theirs])
    ov.save_model(theirs, tmp_path / MODEL_XML, compress_to_fp16=False)
    del ours, theirs
    tokens = text_tokens(bundle, load_manifest(bundle).bos_token_id)[:256]
    pieces = [np.array(tokens[start : start + 128], dtype=np.int64) for start in (0, 128)]
    perplexities = []
    for xml in (bundle / stage_dir(0) / MODEL_XML, tmp_path / MODEL_XML):
        logits = run_shard(xml, pieces)
        losses = [token_losses(rows[:-1], piece[1:].tolist()) for rows, piece in zip(logits, pieces, strict=True)]
        perplexities.append(float(np.exp(np.concatenate(losses).mean())))
    assert 10 < perplexities[1] < 1000  # a text, not noise
    assert perplexities[0] <= 1.06 * perplexities[1]
