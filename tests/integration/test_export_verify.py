"""What an export says of itself: figures against the unsplit model, and modes of embedding and head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import transformers

import export_tools.verify
from export_tools.export import export_bundle
from export_tools.verify import TEXTS
from langchain_pshard.core.bundle import MODEL_XML, WeightMode, load_manifest, stage_dir
from langchain_pshard.core.errors import InvalidOptionError, VerificationError
from tests.support.chain import StatefulChain, reference_logits
from tests.support.models import build_tiny
from workers.shard import Settings, make_runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Granite: the only one whose decoder scales what comes in, which a reference run span by span must not do twice."""
    return build_tiny("granite", tmp_path_factory.mktemp("models") / "tiny-granite", initializer_range=0.02)


def test_figures_are_those_of_the_unsplit_model(model: Path, tmp_path: Path) -> None:
    found = export_bundle(str(model), tmp_path / "bundle", layers=(1, 3), weights=WeightMode.INT4).verification
    assert found is not None
    assert load_manifest(tmp_path / "bundle").verification == found
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    chains, references = [], []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"][:48]
        chains.append(StatefulChain(tmp_path / "bundle").step(ids))
        references.append(reference_logits(model, ids))
    difference = max(np.abs(ours - theirs).max() for ours, theirs in zip(chains, references, strict=True))
    agreement = np.mean(np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(chains, references, strict=True)]))
    assert found.max_logit_difference == pytest.approx(difference, rel=1e-3)
    assert found.token_agreement == pytest.approx(agreement, abs=0.02)
    assert found.largest_logit == pytest.approx(max(np.abs(logits).max() for logits in references), rel=1e-4)
    assert found.num_tokens == 3 * 48


def test_shards_that_compute_something_else_are_not_published(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_tools.verify, "run_shard", lambda *_: [values + 1.0 for values in zeros])
    zeros = [np.zeros((48, 264), np.float32)] * 3
    with pytest.raises(VerificationError, match=r"largest logit difference .* at most 0.0001 is expected of fp32: nothing was published"):
        export_bundle(str(model), tmp_path / "bundle", weights=WeightMode.FP32)
    assert not (tmp_path / "bundle").exists()
    export_bundle(str(model), tmp_path / "bundle", weights=WeightMode.FP32, verify_shards=False)
    manifest = load_manifest(tmp_path / "bundle")
    assert manifest.verification is None
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]  # what other options left unfinished is gone


@pytest.mark.parametrize(
    ("weights", "embedding", "head", "expected"),
    [
        ("int4", "int4", "int8", (ov.Type.i4, ov.Type.i4, ov.Type.u8)),
        ("int4", "int8", "int4", (ov.Type.i4, ov.Type.u8, ov.Type.i4)),
        ("int4", "fp16", "fp16", (ov.Type.i4, ov.Type.f16, ov.Type.f16)),
        ("int8", "fp16", "int4", (ov.Type.u8, ov.Type.f16, ov.Type.i4)),
        ("fp32", "int8", "fp16", (ov.Type.f32, ov.Type.u8, ov.Type.f16)),
        ("fp16", "int8", None, (ov.Type.f16, ov.Type.u8, ov.Type.f16)),
    ],
)
def test_embedding_and_head_have_modes_of_their_own(
    model: Path, tmp_path: Path, weights: str, embedding: str, head: str | None, expected: tuple[ov.Type, ...]
) -> None:
    manifest = export_bundle(
        str(model),
        tmp_path / "bundle",
        weights=WeightMode(weights),
        embedding=WeightMode(embedding),
        head=None if head is None else WeightMode(head),
    )
    assert (manifest.weight_mode.value, manifest.embedding_mode.value, manifest.head_mode.value) == (weights, embedding, head or weights)
    graph = ov.Core().read_model(tmp_path / "bundle" / stage_dir(0) / MODEL_XML)
    found = []
    for marker in ("layers.1.mlp.down_proj", "embed_tokens", "lm_head"):
        large = [node for node in graph.get_ops() if node.get_type_name() == "Constant" and np.prod(node.get_output_shape(0)) >= 64 * 128]
        found.append({node.get_element_type() for node in large if marker in node.get_friendly_name()})
    assert found == [{kind} for kind in expected]


def test_fp32_ends_beside_smaller_layers_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="--head fp32 goes with --weights fp32 only, not with int4"):
        export_bundle(str(model), tmp_path / "bundle", head=WeightMode.FP32)


def test_capped_attention_runs_stateful_only(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    manifest = export_bundle(str(build_tiny("gemma2", tmp_path / "model")), bundle, verify_shards=False)
    assert manifest.runners == ("stateful",)
    with pytest.raises(InvalidOptionError, match=r"paged runner cannot run model \(gemma2\).*--runner stateful"):
        make_runner(bundle, manifest, 0, Settings(runner="paged"))
    make_runner(bundle, manifest, 0, Settings(runner="stateful", kv_memory_bytes=8 << 20, threads=1)).close()
