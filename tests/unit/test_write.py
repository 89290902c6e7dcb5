"""A bundle appears whole or not at all, and what is unfinished of it survives an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_tools.unfinished import ShardRecord, export_key, kept_costs, open_unfinished, remove_stale
from export_tools.write import check_target, recover_target
from langchain_pshard.core.bundle import (
    LayerSpan,
    MachineSpeed,
    Manifest,
    ModelCosts,
    PartCost,
    StageEntry,
    WeightMode,
    describe_file,
    load_manifest,
    stage_dir,
)
from langchain_pshard.core.errors import InvalidOptionError, UsageError

KEY = "0123456789abcdef"


def manifest_of(stages: tuple[StageEntry, ...], name: str) -> Manifest:
    return Manifest(
        format_version=1,
        model_name=name,
        architecture="llama",
        num_layers=len(stages),
        hidden_size=1,
        vocab_size=1,
        context_length=1,
        num_kv_heads=1,
        head_dim=1,
        attention_windows=(None,) * len(stages),
        bos_token_id=None,
        eos_token_ids=(),
        weight_mode=WeightMode.FP32,
        embedding_mode=WeightMode.FP32,
        head_mode=WeightMode.FP32,
        group_size=None,
        activation_group_size=0,
        stages=stages,
        tokenizer_files=(),
        exported_with={},
    ).sealed()


def make_stage(unfinished: Any, stage_idx: int, name: str) -> StageEntry:
    with unfinished.writing(stage_dir(stage_idx)) as folder:
        (folder / "weights.bin").write_bytes(name.encode())
    path = unfinished.bundle / f"stage-{stage_idx}" / "weights.bin"
    entry = StageEntry(span=LayerSpan(stage_idx, stage_idx + 1), files=(describe_file(unfinished.bundle, path),))
    unfinished.record(stage_dir(stage_idx), ShardRecord(entry=entry), {"hidden": np.arange(stage_idx + 3)})
    return entry


def publish(target: Path, name: str) -> None:
    with open_unfinished(target, KEY) as unfinished:
        unfinished.publish(manifest_of((make_stage(unfinished, 0, name),), name))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_is_at_the_target_before_publication(tmp_path: Path) -> None:
    target = tmp_path / "new parent" / "bündel [1]"
    with open_unfinished(target, KEY) as unfinished:
        manifest = manifest_of((make_stage(unfinished, 0, "first"),), "first")
        assert not target.exists()
        unfinished.publish(manifest)
    assert load_manifest(target) == manifest
    assert [path.name for path in target.parent.iterdir()] == ["bündel [1]"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_before_the_first_stage_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    publish(tmp_path / "bundle", "first")
    before = contents(tmp_path)

    def fail() -> None:
        with open_unfinished(tmp_path / "bundle", KEY) as unfinished, unfinished.writing(stage_dir(0)) as folder:
            (folder / "half").write_bytes(b"x")
            raise error

    with pytest.raises(error):
        fail()
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_finished_stages_are_found_again_and_others_are_not(tmp_path: Path) -> None:
    target = tmp_path / "bundle"

    def interrupted() -> None:
        with open_unfinished(target, KEY) as unfinished:
            for stage_idx in (0, 1):
                make_stage(unfinished, stage_idx, f"stage {stage_idx}")
            with unfinished.writing(stage_dir(2)) as folder:
                (folder / "half").write_bytes(b"x")
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not target.exists()
    with open_unfinished(target, KEY) as unfinished:
        found = unfinished.finished(stage_dir(0), LayerSpan(0, 1))
        assert found is not None
        assert found[0].entry.span == LayerSpan(0, 1)
        assert unfinished.finished(stage_dir(0), LayerSpan(0, 2)) is None  # of another cut
        assert found[1]["hidden"].tolist() == [0, 1, 2]
        (unfinished.bundle / "stage-1" / "weights.bin").write_bytes(b"stage 2")  # damaged since
        assert unfinished.finished(stage_dir(1), LayerSpan(1, 2)) is None
        assert unfinished.finished(stage_dir(2), LayerSpan(2, 3)) is None
        entries = (found[0].entry, make_stage(unfinished, 1, "again"), make_stage(unfinished, 2, "new"))
        unfinished.publish(manifest_of(entries, "whole"))
    assert contents(target).keys() == {"manifest.json", *(f"stage-{idx}/weights.bin" for idx in range(3))}
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_an_unfinished_bundle_in_use_is_neither_entered_nor_removed(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with open_unfinished(target, KEY) as unfinished:
        make_stage(unfinished, 0, "mine")
        with pytest.raises(UsageError, match="another export"), open_unfinished(target, KEY):
            pass
        assert remove_stale(target, "another key") == 0
        assert unfinished.finished(stage_dir(0), LayerSpan(0, 1)) is not None


def test_stale_ones_of_this_target_alone_are_removed(tmp_path: Path) -> None:
    for name in ("bundle", "bundle-2"):
        with open_unfinished(tmp_path / name, KEY) as unfinished:
            make_stage(unfinished, 0, "left")
    assert remove_stale(tmp_path / "bundle", KEY) == 0
    assert remove_stale(tmp_path / "bundle", "another key") > 0
    assert [path.name for path in tmp_path.iterdir()] == [f".bundle-2.unfinished-{KEY}"]


def test_the_key_depends_on_every_part() -> None:
    keys = {export_key(parts) for parts in ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}, {})}
    assert len(keys) == 4
    assert export_key({"b": 2, "a": 1}) == export_key({"a": 1, "b": 2})


def test_measured_costs_outlive_an_interruption(tmp_path: Path) -> None:
    """Measured anew they would differ, and could move the cut of the stages that are there."""
    part = PartCost(decode_ms=0.1, prefill_ms=0.01, num_bytes=7)
    speed = MachineSpeed(decode=1.0, prefill=0.5)
    costs = ModelCosts(layers=(part, part), embedding=part, head=part, step_ms=0.3, machine=speed, cpu="a processor")
    target = tmp_path / "bundle"
    assert kept_costs(target, KEY) is None
    with open_unfinished(target, KEY) as unfinished:
        unfinished.keep_costs(costs)
        make_stage(unfinished, 0, "first")
    assert kept_costs(target, KEY) == costs
    assert kept_costs(target, "another key") is None
    next(tmp_path.glob(f".bundle.unfinished-{KEY}/costs.json")).write_bytes(b"{")
    assert kept_costs(target, KEY) is None  # damaged: measured again


def test_publication_replaces_a_bundle(tmp_path: Path) -> None:
    publish(tmp_path / "bundle", "first")
    publish(tmp_path / "bundle", "second")
    assert load_manifest(tmp_path / "bundle").model_name == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_the_old_bundle_comes_back_when_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "bundle", "first")
    before = contents(tmp_path / "bundle")
    rename = Path.rename

    def full_disk(source: Path, target: Path) -> Path:
        if source.name == "bundle" and ".unfinished-" in source.parent.name:
            raise OSError(28, "No space left on device", str(target))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        publish(tmp_path / "bundle", "second")
    assert contents(tmp_path / "bundle") == before


@pytest.mark.parametrize("has_new", [False, True])
def test_a_kill_between_the_two_renames_is_undone(tmp_path: Path, has_new: bool) -> None:
    target = tmp_path / "bundle"
    publish(target, "old")
    target.rename(tmp_path / ".bundle.replaced")
    if has_new:
        publish(target, "new")
    recover_target(target)
    assert load_manifest(target).model_name == ("new" if has_new else "old")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


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
