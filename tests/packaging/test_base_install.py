"""The base distribution in a clean environment: what a user of a fleet installs on a laptop.

No torch, transformers, nncf or openvino there; the workers it talks to run from the development environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import running_worker
from tests.support.bundles import TinyBundle

ROOT = Path(__file__).resolve().parents[2]
HEAVY_PACKAGES = ("torch", "transformers", "nncf", "openvino")
pytestmark = pytest.mark.timeout(600)  # the first test builds the environment: half a minute here, a slow line takes longer
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "langchain_pshard", "workers", "export_tools")

ASK_THE_FLEET = """
import json, sys
from langchain_pshard import ChatPShard

model = ChatPShard(workers=sys.argv[1:], max_tokens=12, temperature=0.0)
answer = model.invoke("What is a shard?")
print(json.dumps({"text": answer.text, "output_tokens": answer.usage_metadata["output_tokens"]}))
"""

LOOK_AROUND = """
import importlib.util, json, sys
import langchain_pshard
from langchain_pshard import ChatPShard, PipelineClient

names = sys.argv[1:]
print(json.dumps({
    "importable": [name for name in names if importlib.util.find_spec(name)],
    "file": langchain_pshard.__file__,
    "classes": [ChatPShard.__name__, PipelineClient.__name__],
}))
"""


def _environment() -> dict[str, str]:
    """Ours without what would let the development checkout shine through."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}


def _run(command: Sequence[str | Path], *, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=_environment(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds the built wheel and its base dependencies, at the pinned versions."""
    folder = tmp_path_factory.mktemp("base install")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:  # a copy: setuptools builds in place and would also pack what an earlier build left there
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(origin, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source], cwd=folder)
    (wheel,) = folder.glob("langchain_pshard-*.whl")
    environment = folder / "env"
    _run([sys.executable, "-m", "venv", "--without-pip", environment], cwd=folder)
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    _run([*pip, "--python", python, "install", "--no-input", "--no-compile", "-c", ROOT / "constraints.txt", wheel], cwd=folder)
    return python


def _ask(python: Path, script: str, arguments: Sequence[str], *, cwd: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(_run([python, "-W", "error", "-c", script, *arguments], cwd=cwd))
    return answer


def test_it_imports_without_any_heavy_package(base_python: Path, tmp_path: Path) -> None:
    found = _ask(base_python, LOOK_AROUND, HEAVY_PACKAGES, cwd=tmp_path)
    assert found["importable"] == []
    assert found["classes"] == ["ChatPShard", "PipelineClient"]
    assert Path(found["file"]).is_relative_to(base_python.parents[1])


def test_it_talks_to_two_workers(base_python: Path, tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = tiny_bundle("llama", num_stages=2)
    with running_worker(bundle, 0) as first, running_worker(bundle, 1) as second:
        addresses = [second.address, first.address]  # any order
        from_base = _ask(base_python, ASK_THE_FLEET, addresses, cwd=tmp_path)
        from_here = _ask(Path(sys.executable), ASK_THE_FLEET, addresses, cwd=ROOT)
    assert 1 <= from_base["output_tokens"] <= 12
    assert from_base == from_here
