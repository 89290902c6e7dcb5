"""The draft model on real workers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from export_tools.export import export_bundle
from langchain_pshard.core.bundle import WeightMode
from tests.support.bundles import TinyBundle
from tests.support.models import build_tiny


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, and the same model once more as its own draft: it guesses right wherever the model is greedy."""
    folder = tmp_path_factory.mktemp("drafted")
    model = build_tiny("llama", folder / "model")
    options = {"num_stages": 2, "weights": WeightMode.INT4, "draft": str(model), "verify_shards": False}
    export_bundle(str(model), folder / "bundle", **options)  # type: ignore[arg-type]
    return folder / "bundle"


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workers", *map(str, arguments), "--log-format", "json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_bundle_without_a_draft_cannot_serve_one(tiny_bundle: TinyBundle) -> None:
    refused = start(tiny_bundle("llama", num_stages=2), "--draft")
    event = json.loads(refused.stdout)
    assert (refused.returncode, event["code"]) == (1, "invalid-option")
    assert "holds no draft of llama-model; export it again with pshard-export --draft MODEL" in event["message"]


def test_a_worker_serves_something(bundle: Path) -> None:
    refused = start(bundle)
    assert refused.returncode == 2
    assert "nothing to serve: give --stage I, once or more, --draft, or both" in refused.stderr


def test_a_damaged_draft_is_found_at_the_start(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    weights = copy / "draft" / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    event = json.loads(start(copy, "--draft").stdout)
    assert event["code"] == "bundle"
    assert str(Path("draft") / "openvino_model.bin") in event["message"]
