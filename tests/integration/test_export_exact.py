"""Shards against the unsplit transformers model, and what the worker's runners need of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino._offline_transformations import paged_attention_transformation

from export_tools.export import export_bundle
from langchain_pshard.core.bundle import MODEL_BIN, MODEL_XML, WeightMode, load_manifest, stage_dir, verify_files
from tests.support.chain import StatefulChain, reference_logits
from tests.support.models import ARCHITECTURES, WINDOW, build_tiny

NUM_PREFILL, NUM_DECODE = 24, 24
TOKEN_IDS = np.random.default_rng(0).integers(8, 264, NUM_PREFILL + NUM_DECODE).tolist()
assert NUM_PREFILL > WINDOW, "the prefill itself must cross the window"


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Makes (model folder, bundle) of an architecture, once per combination."""
    root = tmp_path_factory.mktemp("tiny bundles é")  # names with spaces and non-ASCII letters work everywhere
    made: dict[str, tuple[Path, Path]] = {}

    def make(architecture: str, *, num_stages: int, weights: WeightMode = WeightMode.FP32, **overrides: object) -> tuple[Path, Path]:
        variant = "-".join(f"{name}" for name in overrides)
        key = f"{architecture}-{weights.value}-{num_stages}-{variant}"
        if key not in made:
            # transformers' own float32 is up to 9e-7 of the scale away from its float64 (Gemma 3); milder weights keep both closer.
            model = build_tiny(architecture, root / f"model-{key}", **{"initializer_range": 0.02, **overrides})
            export_bundle(str(model), root / f"bundle-{key}", num_stages=num_stages, weights=weights, verify_shards=False)
            made[key] = model, root / f"bundle-{key}"
        return made[key]

    return make


def assert_logits_equal(model: Path, bundle: Path, *, tolerance: float) -> None:
    expected = reference_logits(model, TOKEN_IDS)
    chain = StatefulChain(bundle)
    steps = [chain.step(TOKEN_IDS[:NUM_PREFILL]), *(chain.step([token]) for token in TOKEN_IDS[NUM_PREFILL:])]
    difference = np.abs(np.concatenate(steps) - expected).max() / np.abs(expected).max()
    assert difference < tolerance


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_two_f32_stages_equal_transformers(architecture: str, exported: Callable[..., tuple[Path, Path]]) -> None:
    model, bundle = exported(architecture, num_stages=2)
    assert_logits_equal(model, bundle, tolerance=1e-6)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
        ("gemma3_text", {"final_logit_softcapping": 2.0}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("phi3", {"sliding_window": WINDOW}),
    ],
    ids=["rope scaling", "half the layers slide", "soft-capped logits", "no head groups, tied head", "all layers slide"],
)
def test_variants_equal_transformers(architecture: str, overrides: dict[str, object], exported: Callable[..., tuple[Path, Path]]) -> None:
    model, bundle = exported(architecture, num_stages=2, **overrides)
    assert_logits_equal(model, bundle, tolerance=1e-6)


def test_fp16_weights_stay_close_at_late_positions(exported: Callable[..., tuple[Path, Path]]) -> None:
    """Rotary frequencies in float16 would show as a drift that grows with the position."""
    model, bundle = exported("llama", num_stages=2, weights=WeightMode.FP16)
    token_ids = np.random.default_rng(1).integers(8, 264, 1500).tolist()
    difference = np.abs(StatefulChain(bundle).step(token_ids) - reference_logits(model, token_ids)).max(axis=-1)
    assert difference[-200:].max() < 3 * difference[:200].max() < 0.05


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_attention_of_every_layer_fuses(architecture: str, exported: Callable[..., tuple[Path, Path]]) -> None:
    _, bundle = exported(architecture, num_stages=2)
    for compiled in StatefulChain(bundle).compiled:
        kinds = Counter(node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops())
        assert (kinds["ScaledDotProductAttention"], kinds["Softmax"]) == (2, 0)


def test_ports_of_first_middle_and_last_stage(exported: Callable[..., tuple[Path, Path]]) -> None:
    _, bundle = exported("llama", num_stages=3)
    models = [ov.Core().read_model(bundle / stage_dir(idx) / MODEL_XML) for idx in range(3)]
    tokens = [(model.input(0).get_names(), str(model.input(0).get_partial_shape()), model.input(0).get_element_type()) for model in models]
    assert tokens == [
        ({"input_ids"}, "[?,?]", ov.Type.i64),
        ({"inputs_embeds", "hidden_states"}, "[?,?,64]", ov.Type.f32),
        ({"inputs_embeds", "hidden_states"}, "[?,?,64]", ov.Type.f32),
    ]
    for model in models:
        others = [(port.get_any_name(), str(port.get_partial_shape()), port.get_element_type()) for port in model.inputs[1:]]
        assert others == [
            ("attention_mask", "[?,?]", ov.Type.i64),
            ("position_ids", "[?,?]", ov.Type.i64),
            ("beam_idx", "[?]", ov.Type.i32),
        ]
    outputs = [[port.get_names() for port in model.outputs] for model in models]
    assert outputs == [[{"last_hidden_state"}], [{"last_hidden_state"}], [{"logits"}]]


@pytest.mark.parametrize("weights", [WeightMode.FP32, WeightMode.INT4])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_every_stage_becomes_a_paged_graph(architecture: str, weights: WeightMode, exported: Callable[..., tuple[Path, Path]]) -> None:
    _, bundle = exported(architecture, num_stages=3, weights=weights)
    for stage_idx, stage in enumerate(load_manifest(bundle).stages):
        core = ov.Core()
        model = core.read_model(bundle / stage_dir(stage_idx) / MODEL_XML)
        assert model.get_parameters()[0].get_friendly_name() == ("inputs_embeds" if stage_idx else "input_ids")
        paged_attention_transformation(model)
        assert model.input(0).get_partial_shape().rank.get_length() == (2 if stage_idx else 1)
        if stage_idx:
            model.get_parameters()[0].set_partial_shape(ov.PartialShape([-1, 64]))
        model.validate_nodes_and_infer_types()
        compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 2})
        names = {name for port in compiled.inputs for name in port.get_names()}
        caches = {f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in range(stage.span.num_layers)}
        assert names >= caches | {
            "position_ids",
            "past_lens",
            "subsequence_begins",
            "block_indices",
            "block_indices_begins",
            "max_context_len",
        }


def test_manifest_describes_the_bundle(exported: Callable[..., tuple[Path, Path]]) -> None:
    _, bundle = exported("gemma3_text", num_stages=3, weights=WeightMode.INT4)
    manifest = load_manifest(bundle)
    assert (manifest.architecture, manifest.num_layers, manifest.hidden_size, manifest.vocab_size) == ("gemma3_text", 4, 64, 264)
    assert (manifest.num_kv_heads, manifest.head_dim, manifest.context_length) == (2, 16, 2048)
    assert manifest.attention_windows == (WINDOW, WINDOW, None, WINDOW)
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, (2, 4))
    assert (manifest.weight_mode, manifest.embedding_mode, manifest.head_mode, manifest.group_size) == (
        WeightMode.INT4,
        WeightMode.INT8,
        WeightMode.INT8,
        128,
    )
    names = [Path(file.path).name for file in manifest.tokenizer_files]
    assert names == ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for stage_idx, stage in enumerate(manifest.stages):
        assert [file.path for file in stage.files] == [f"{stage_dir(stage_idx)}/{name}" for name in (MODEL_XML, MODEL_BIN)]
        verify_files(bundle, stage.files)
    verify_files(bundle, manifest.tokenizer_files)
