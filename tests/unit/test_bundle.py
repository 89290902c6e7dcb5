"""The bundle format: fingerprints, spans, and damaged files named with both hashes."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from langchain_pshard.core.bundle import (
    FORMAT_VERSION,
    FileEntry,
    LayerSpan,
    Manifest,
    StageCost,
    StageEntry,
    WeightMode,
    describe_file,
    load_manifest,
    verify_files,
)
from langchain_pshard.core.errors import BundleError, InvalidOptionError


def a_manifest(*edges: int, model_name: str = "tiny") -> Manifest:
    bounds = edges or (0, 2, 4)
    return Manifest(
        format_version=FORMAT_VERSION,
        model_name=model_name,
        architecture="LlamaForCausalLM",
        num_layers=4,
        hidden_size=64,
        vocab_size=256,
        context_length=2048,
        num_kv_heads=2,
        head_dim=16,
        attention_windows=(None, 16, None, 16),
        bos_token_id=1,
        eos_token_ids=(2,),
        weight_mode=WeightMode.INT4,
        embedding_mode=WeightMode.INT8,
        head_mode=WeightMode.INT8,
        group_size=128,
        activation_group_size=128,
        stages=tuple(
            StageEntry(
                span=LayerSpan(start, end),
                files=(FileEntry(path=f"stage-{i}/openvino_model.xml", num_bytes=3, sha256="00"),),
                cost=StageCost(decode_ms=1.5, prefill_ms=0.1),
            )
            for i, (start, end) in enumerate(itertools.pairwise(bounds))
        ),
        tokenizer_files=(),
        exported_with={"openvino": "2026.4.1"},
    )


def test_sealed_manifest_survives_the_file(tmp_path: Path) -> None:
    manifest = a_manifest().sealed()
    (tmp_path / "manifest.json").write_bytes(manifest.to_json())
    assert load_manifest(tmp_path) == manifest
    assert manifest.fingerprint == a_manifest().computed_fingerprint
    assert manifest.num_stages == 2
    assert manifest.stages[1].span.num_layers == 2


def test_fingerprint_covers_everything() -> None:
    assert a_manifest().computed_fingerprint != a_manifest(model_name="tinier").computed_fingerprint
    assert a_manifest().computed_fingerprint != a_manifest(0, 1, 4).computed_fingerprint


@pytest.mark.parametrize("edges", [(0, 2), (0, 2, 5), (1, 4), (0, 1, 2, 3)])
def test_spans_that_do_not_cover_the_layers_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(BundleError, match="do not cover layers 0-3"):
        a_manifest(*edges)


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1), (-1, 2)])
def test_empty_span_is_refused(start: int, end: int) -> None:
    with pytest.raises(InvalidOptionError, match="layer span"):
        LayerSpan(start, end)


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "", "C:\\x", "c:/x"])
def test_manifest_cannot_name_files_outside(path: str) -> None:
    with pytest.raises(BundleError, match="outside the bundle"):
        FileEntry(path=path, num_bytes=0, sha256="")


def test_missing_unfinished_edited_and_foreign_manifests_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such folder"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="unfinished export"):
        load_manifest(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(a_manifest().to_json())
    with pytest.raises(BundleError, match="no fingerprint"):
        load_manifest(tmp_path)
    path.write_bytes(a_manifest().sealed().to_json().replace(b"tiny", b"tony"))
    with pytest.raises(BundleError, match="does not match its contents"):
        load_manifest(tmp_path)
    path.write_bytes(b'{"a": 1}')
    with pytest.raises(BundleError, match="not a PShard manifest"):
        load_manifest(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="not a PShard manifest"):
        load_manifest(tmp_path)
    newer = msgspec.json.decode(a_manifest().sealed().to_json()) | {"format_version": 99, "unheard_of": []}
    path.write_bytes(msgspec.json.encode(newer))
    with pytest.raises(BundleError, match=r"format version 99 .* install the version"):
        load_manifest(tmp_path)


def test_damaged_files_are_named_with_both_hashes(tmp_path: Path) -> None:
    path = tmp_path / "stage-0" / "openvino_model.bin"
    path.parent.mkdir()
    path.write_bytes(b"weights" * 1_000)
    entry = describe_file(tmp_path, path)
    heard: list[int] = []
    verify_files(tmp_path, (entry,), heard.append)
    assert sum(heard) == entry.num_bytes == 7_000
    path.write_bytes(b"weights" * 999)
    with pytest.raises(BundleError) as caught:
        verify_files(tmp_path, (entry,))
    damaged = describe_file(tmp_path, path)
    for part in ("openvino_model.bin", entry.sha256, damaged.sha256, "7000", "6993"):
        assert part in str(caught.value)
    path.unlink()
    with pytest.raises(BundleError, match=f"missing.*{entry.sha256}"):
        verify_files(tmp_path, (entry,))
