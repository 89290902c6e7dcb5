"""A draft model beside the stages: what the bundle says of it, and which models cannot be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from export_tools.export import export_bundle
from langchain_pshard.core.bundle import DRAFT_DIR, BundleError, LayerSpan, Manifest, WeightMode, load_manifest, verify_files
from langchain_pshard.core.errors import InvalidOptionError
from tests.support.models import VOCAB_SIZE, WINDOW, build_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture, another size, the same tokenizer."""
    return build_tiny("mistral", tmp_path_factory.mktemp("models") / "tiny-mistral", num_hidden_layers=2, hidden_size=32)


def test_the_draft_is_one_more_shard(model: Path, small: Path, tmp_path: Path) -> None:
    with_draft = export_bundle(str(model), tmp_path / "with", num_stages=2, draft=str(small), draft_weights=WeightMode.FP32)
    draft = with_draft.draft
    assert draft is not None
    assert load_manifest(tmp_path / "with") == with_draft
    assert (draft.model_name, draft.architecture, draft.span) == ("tiny-mistral", "mistral", LayerSpan(0, 2))
    assert (draft.hidden_size, draft.vocab_size, draft.attention_windows) == (32, VOCAB_SIZE, (WINDOW, WINDOW))
    assert (draft.weight_mode, draft.head_mode, with_draft.weight_mode) == (WeightMode.FP32, WeightMode.FP32, WeightMode.INT4)
    assert draft.activation_group_size == 0
    assert [file.path for file in draft.files] == [f"{DRAFT_DIR}/openvino_model.xml", f"{DRAFT_DIR}/openvino_model.bin"]
    verify_files(tmp_path / "with", draft.files)
    assert draft.verification is not None
    assert draft.verification.max_logit_difference < 1e-4 * draft.verification.largest_logit
    assert [path.name for path in tmp_path.iterdir()] == ["with"]

    without = export_bundle(str(model), tmp_path / "without", num_stages=2)
    assert without.draft is None
    assert without.stages == with_draft.stages
    assert b'"draft"' not in without.to_json()  # a bundle without one has the fingerprint that it always had
    assert without.fingerprint != with_draft.fingerprint
    assert msgspec.structs.replace(with_draft, draft=None, fingerprint="").computed_fingerprint == without.fingerprint

    edited = json.loads(with_draft.to_json())
    edited["draft"]["num_kv_heads"] += 1
    with pytest.raises(BundleError, match="was edited"):
        Manifest.from_json(json.dumps(edited).encode(), origin="here")
    edited["draft"]["span"]["end"] = 3
    with pytest.raises(BundleError, match="not a whole model"):
        Manifest.from_json(json.dumps(edited).encode(), origin="here")


def test_modes_follow_the_bundle(model: Path, small: Path, tmp_path: Path) -> None:
    draft = export_bundle(str(model), tmp_path / "bundle", weights=WeightMode.INT8, draft=str(small), verify_shards=False).draft
    assert draft is not None
    assert (draft.weight_mode, draft.embedding_mode, draft.group_size) == (WeightMode.INT8, WeightMode.INT8, None)
    assert draft.verification is None


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def other_token(folder: Path) -> None:
    def change(document: Any) -> None:
        vocabulary = document["model"]["vocab"]
        a, b = (next(token for token, idx in vocabulary.items() if idx == wanted) for wanted in (40, 41))
        vocabulary[a], vocabulary[b] = 41, 40

    edit(folder / "tokenizer.json", change)


def more_tokens(folder: Path) -> None:
    edit(folder / "tokenizer.json", lambda document: document["model"]["vocab"].update({"more": VOCAB_SIZE}))


def other_end(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda document: document.update({"eos_token": "<|im_end|>"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_token, r"token 40 \(the first of 2 differences between vocabularies of 264 and 264 tokens\) is '.' in .* and '.' in small"),
        (more_tokens, r"token 264 \(the first of 1 differences .* 264 and 265 tokens\) is missing in .* and 'more' in small"),
        (other_end, r"the special token eos_token is '</s>' in tiny-llama and '<\|im_end\|>' in small: choose"),
    ],
)
def test_a_model_of_other_tokens_is_refused_before_weights_are_opened(model: Path, tmp_path: Path, change: Any, words: str) -> None:
    small = build_tiny("llama", tmp_path / "small", num_hidden_layers=1)
    change(small)
    for weights in small.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(InvalidOptionError, match=words):
        export_bundle(str(model), tmp_path / "bundle", draft=str(small))
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_weight_mode_without_a_draft_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"--draft-weights int8.*name one with --draft"):
        export_bundle(str(model), tmp_path / "bundle", draft_weights=WeightMode.INT8)


def test_an_interrupted_export_goes_on_at_the_draft(model: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import export_tools.shards

    save = export_tools.shards.save_stage
    saved: list[str] = []

    def saving(stage: object, xml: Path, modes: Any) -> None:
        if xml.parent.name.startswith(DRAFT_DIR) and not saved.count("again"):
            raise KeyboardInterrupt
        saved.append(xml.parent.name)
        save(stage, xml, modes)

    monkeypatch.setattr(export_tools.shards, "save_stage", saving)
    options: dict[str, Any] = {"num_stages": 2, "draft": str(small), "verify_shards": False}
    with pytest.raises(KeyboardInterrupt):
        export_bundle(str(model), tmp_path / "bundle", **options)
    assert len(saved) == 2
    saved.append("again")
    export_bundle(str(model), tmp_path / "bundle", **options)
    assert [name.split(".")[0] for name in saved[3:]] == [DRAFT_DIR]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
