"""An export that is killed: nothing half made ever loads, the target is what it was, and the same command goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from export_tools.cli import main
from langchain_pshard.core.bundle import MANIFEST_NAME, WeightMode, load_manifest, verify_files
from tests.support.models import build_tiny

_DIES_AT = """
import os, sys
from export_tools.cli import main

steps_left = int(sys.argv[1])

def dying(plain):
    def step(*arguments, **options):
        global steps_left
        if steps_left == 0:
            os.kill(os.getpid(), 9)
        steps_left -= 1
        return plain(*arguments, **options)
    return step

for name in ("rename", "replace"):
    setattr(os, name, dying(getattr(os, name)))
main(sys.argv[2:])
"""
"""The exporter, which dies by signal 9 before it renames for the nth time. Only by renaming does anything become visible."""

_STEPS = ("stage-0", "stage-0.npz", "stage-0.json", "stage-1", "stage-1.npz", "stage-1.json", "manifest", "old bundle aside", "new bundle")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an export that nobody interrupts writes."""
    bundle = tmp_path_factory.mktemp("whole") / "bundle"
    assert run(model, bundle).exit_code == 0
    return contents(bundle)


def options(model: Path, bundle: Path) -> list[str]:
    return [str(model), "-o", str(bundle), "--layers", "3,1", "--no-measure", "--overwrite"]


def run(model: Path, bundle: Path, *more: str) -> Result:
    return CliRunner().invoke(main, [*options(model, bundle), *more], prog_name="pshard-export")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_whole(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    verify_files(bundle, [file for stage in manifest.stages for file in stage.files])
    verify_files(bundle, manifest.tokenizer_files)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("step", ["stage-0", "stage-0.json", "stage-1.npz", "manifest", "old bundle aside", "new bundle"])
def test_killed_before(model: Path, whole: dict[str, bytes], tmp_path: Path, step: str) -> None:
    bundle = tmp_path / "my bundle"
    assert run(model, bundle, "--weights", WeightMode.FP32.value).exit_code == 0
    old = contents(bundle)
    command = [sys.executable, "-c", _DIES_AT, str(_STEPS.index(step)), *options(model, bundle)]
    died = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert died.returncode not in (0, 1, 2), died.stderr.decode(errors="replace")
    found = sorted(path.parent for path in tmp_path.rglob(MANIFEST_NAME))
    for folder in found:
        assert_whole(folder)  # nothing half made loads, wherever it lies
    is_aside = step == "new bundle"
    assert contents(tmp_path / ".my bundle.replaced" if is_aside else bundle) == old
    if step not in ("old bundle aside", "new bundle"):  # from the manifest on, the new one is complete and waits for its name
        assert found == [bundle]
    result = run(model, bundle)
    assert result.exit_code == 0
    kept = [idx for idx in (0, 1) if f"stage {idx} of 2" in result.stderr and f"layers {'0-2' if idx == 0 else '3'}: kept" in result.stderr]
    assert kept == {"stage-0": [], "stage-0.json": [], "stage-1.npz": [0]}.get(step, [0, 1])
    assert contents(bundle) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["my bundle"]
