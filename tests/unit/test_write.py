"""A bundle appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from export_tools.write import check_space, check_target, drafting
from langchain_pshard.core.bundle import LayerSpan, Manifest, StageEntry, WeightMode, describe_file, load_manifest
from langchain_pshard.core.errors import InvalidOptionError, UsageError


def manifest_of(folder: Path, name: str) -> Manifest:
    (folder / "weights.bin").write_bytes(name.encode())
    return Manifest(
        format_version=1,
        model_name=name,
        architecture="llama",
        num_layers=1,
        hidden_size=1,
        vocab_size=1,
        context_length=1,
        num_kv_heads=1,
        head_dim=1,
        attention_windows=(None,),
        bos_token_id=None,
        eos_token_ids=(),
        weight_mode=WeightMode.FP32,
        embedding_mode=WeightMode.FP32,
        head_mode=WeightMode.FP32,
        group_size=None,
        activation_group_size=0,
        stages=(StageEntry(span=LayerSpan(0, 1), files=(describe_file(folder, folder / "weights.bin"),)),),
        tokenizer_files=(),
        exported_with={},
    ).sealed()


def publish(target: Path, name: str) -> None:
    with drafting(target) as draft:
        draft.publish(manifest_of(draft.folder, name))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_is_at_the_target_before_publication(tmp_path: Path) -> None:
    target = tmp_path / "new parent" / "bündel"
    with drafting(target) as draft:
        manifest = manifest_of(draft.folder, "first")
        assert not target.exists()
        draft.publish(manifest)
    assert load_manifest(target) == manifest
    assert [path.name for path in target.parent.iterdir()] == ["bündel"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_in_the_middle_leaves_the_target_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    publish(tmp_path / "bundle", "first")
    before = contents(tmp_path)

    def fail() -> None:
        with drafting(tmp_path / "bundle") as draft:
            (draft.folder / "half").write_bytes(b"x")
            raise error

    with pytest.raises(error):
        fail()
    assert contents(tmp_path) == before


def test_publication_replaces_a_bundle(tmp_path: Path) -> None:
    publish(tmp_path / "bundle", "first")
    publish(tmp_path / "bundle", "second")
    assert load_manifest(tmp_path / "bundle").model_name == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_the_old_bundle_comes_back_when_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "bundle", "first")
    before = contents(tmp_path)
    rename = Path.rename

    def full_disk(source: Path, target: Path) -> Path:
        if ".draft-" in source.name:
            raise OSError(28, "No space left on device", str(target))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        publish(tmp_path / "bundle", "second")
    assert contents(tmp_path) == before


def test_targets_that_must_not_be_replaced(tmp_path: Path) -> None:
    check_target(tmp_path / "free", overwrite=False)
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", overwrite=False)
    publish(tmp_path / "bundle", "first")
    check_target(tmp_path / "bundle", overwrite=True)
    with pytest.raises(InvalidOptionError, match=r"already holds a bundle.*--overwrite"):
        check_target(tmp_path / "bundle", overwrite=False)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    for precious in (tmp_path / "photos", tmp_path / "photos" / "cat.jpg"):
        with pytest.raises(InvalidOptionError, match="is not a bundle"):
            check_target(precious, overwrite=True)


def test_what_cannot_be_written_is_found_before_any_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UsageError, match=f"cannot write the bundle .*{file.name}"):
        check_target(file / "deep" / "bundle", overwrite=False)
    check_target(tmp_path / "not" / "yet" / "there", overwrite=False)
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_is_told_with_both_figures(tmp_path: Path) -> None:
    check_space(tmp_path / "new" / "bundle", 1 << 10)
    with pytest.raises(UsageError, match=r"takes about 1099511627776 MiB, and \d+ MiB are free at"):
        check_space(tmp_path / "new" / "bundle", 1 << 60)
