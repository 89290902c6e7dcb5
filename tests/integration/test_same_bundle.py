"""Processes that need the same bundle at once: one makes it, the others wait, and one goes on in its place should it die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

import pytest

from export_tools.locks import turn_to_make
from langchain_pshard.core.bundle import load_manifest, verify_files
from langchain_pshard.core.errors import UsageError
from tests.support.models import build_tiny

DEMO = """
import sys
from examples import demo
demo.SOURCE = sys.argv[1]  # a tiny model; all else is the real thing
print(demo.demo_bundle())
"""
BENCH = """
import sys
from benchmarks import bundles
from langchain_pshard.core.bundle import WeightMode
bundles.SOURCE = sys.argv[1]
print(bundles.demo_bundle(weights=WeightMode.INT8, layers=(3, 1)))
"""
WAITS = "waiting for another process that makes"
is_posix = pytest.mark.skipif(sys.platform == "win32", reason="kills by signals, and a cache folder by XDG_CACHE_HOME")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@contextmanager
def started(script: str, model: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process group that makes the bundle in a cache of the test's own; killed as a whole at the end."""
    program = subprocess.Popen(
        [sys.executable, "-u", "-c", script, str(model)],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with program:
        try:
            yield program
        finally:
            kill_group(program)


@contextmanager
def first_and_waiting(model: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A demo that exports, and one that waits for it."""
    with started(DEMO, model, cache) as first:
        read_to("exporting", first.stderr)
        with started(DEMO, model, cache) as second:
            read_to(WAITS, second.stderr)
            yield first, second


def kill_group(program: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def read_to(mark: str, stream: IO[str] | None) -> str:
    assert stream is not None
    read = ""
    for line in stream:
        read += line
        if mark in line:
            return read
    pytest.fail(f"no line with {mark!r} in: {read}")


def bundle_of(program: subprocess.Popen[str]) -> tuple[Path, str]:
    """The bundle that it found or made, whole, and what it told after that which was read already."""
    out, err = program.communicate(timeout=100)
    assert program.returncode == 0, err
    bundle = Path(out.splitlines()[-1])
    manifest = load_manifest(bundle)
    verify_files(bundle, [*manifest.tokenizer_files, *(file for stage in manifest.stages for file in stage.files)])
    return bundle, err


@is_posix
@pytest.mark.parametrize("script", [DEMO, BENCH], ids=["demo", "bench"])
def test_two_at_once_make_it_once(script: str, model: Path, tmp_path: Path) -> None:
    with started(script, model, tmp_path) as one, started(script, model, tmp_path) as other:
        found = [bundle_of(one), bundle_of(other)]
    (bundle, _), (same, _) = found
    assert same == bundle
    told = "".join(err for _, err in found)
    assert WAITS in told
    if script == DEMO:
        assert told.count("exporting Gemma") == 1


@is_posix
def test_the_next_takes_over_when_the_first_dies(model: Path, tmp_path: Path) -> None:
    with first_and_waiting(model, tmp_path) as (first, second):
        kill_group(first)  # with its export
        _, told = bundle_of(second)
    assert "exporting" in told


@is_posix
def test_an_export_that_outlives_its_demo_is_waited_for(model: Path, tmp_path: Path) -> None:
    with first_and_waiting(model, tmp_path) as (first, second):
        first.kill()
        _, told = bundle_of(second)
    assert "exporting" not in told


def test_waiting_has_an_end(tmp_path: Path) -> None:
    bundle = tmp_path / "deep" / "bundle"
    with (
        turn_to_make(bundle, nullcontext()),
        pytest.raises(UsageError, match=r"more than 0 s: wait for it, or end the process that has .*\.bundle\.turn open"),
        turn_to_make(bundle, nullcontext(), longest_wait_s=0.3),
    ):
        pytest.fail("two have the turn")
    with turn_to_make(bundle, nullcontext(), longest_wait_s=0.0):
        pass


def test_a_turn_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot write the bundle"), turn_to_make(tmp_path / "file" / "bundle", nullcontext()):
        pytest.fail("a file became a folder")
