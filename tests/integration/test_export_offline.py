"""Files that are here are read here: no socket is opened for them, and a hub id is served from the ordinary cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_pshard.core.bundle import load_manifest
from tests.support.models import build_tiny

_WITHOUT_SOCKETS = """
import socket, sys

def refuse(*_, **__):
    print("reached for the network", file=sys.stderr)
    raise OSError("no network in this test")

socket.getaddrinfo = refuse
socket.socket.connect = refuse
socket.socket.connect_ex = refuse
from export_tools.cli import main
main(sys.argv[1:])
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def export(source: str | Path, bundle: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With the environment of a user, who has not said that he is offline."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    command = [sys.executable, "-c", _WITHOUT_SOCKETS, str(source), "-o", str(bundle), "--no-measure", "--no-verify", "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=inherited | environment, encoding="utf-8")


def test_a_model_folder_needs_no_network(model: Path, tmp_path: Path) -> None:
    done = export(model, tmp_path / "bundle", HF_HOME=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stdout
    assert "reached for the network" not in done.stderr
    assert load_manifest(tmp_path / "bundle").model_name == "tiny-llama"


def test_a_hub_id_is_served_from_the_cache_when_offline(model: Path, tmp_path: Path) -> None:
    cached = tmp_path / "home" / "hub" / "models--owner--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    shutil.copytree(model, cached / "snapshots" / COMMIT)
    done = export("owner/tiny", tmp_path / "bundle", HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout
    assert "reached for the network" not in done.stderr
    assert load_manifest(tmp_path / "bundle").model_name == "owner/tiny"


def test_a_hub_id_that_was_never_downloaded_says_so(tmp_path: Path) -> None:
    done = export("owner/absent", tmp_path / "bundle", HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "reached for the network" not in done.stderr
    for words in ("hub model owner/absent cannot be loaded", "check the name", "HF_HUB_OFFLINE=1"):
        assert words in done.stdout
    assert not (tmp_path / "bundle").exists()
