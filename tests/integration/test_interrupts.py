"""Ctrl-C while a program still starts: one line, exit code 130, no traceback, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")

NOBODY = ["--workers", "tcp://127.0.0.1:1"]
EXPORT = ["-c", "from export_tools.__main__ import main; main()", "nowhere", "-o", "nothing"]  # what the installed scripts run
WORKER = ["-c", "from workers.__main__ import main; main()", "nowhere", "--stage", "0"]


def interrupted_at(mark: str, arguments: list[str], folder: Path) -> tuple[int, list[str]]:
    """Exit code and lines of standard error of a program that gets SIGINT as soon as a line there holds `mark`.

    Python itself tells of every module that it has imported, so that no delay has to be guessed.
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-X", "importtime", *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stderr is not None
        read = []
        for line in program.stderr:
            read.append(line.rstrip())
            if mark in line:
                os.killpg(program.pid, signal.SIGINT)
                break
        else:
            pytest.fail(f"no line with {mark!r}")
        read += program.stderr.read().splitlines()
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, 0)
    return program.returncode, [line for line in read if not line.startswith("import time:")]


@pytest.mark.parametrize(
    ("arguments", "mark"),
    [
        (["-m", "examples.demo"], " platformdirs\n"),
        (["-m", "examples.demo"], " langchain_core.load.serializable\n"),
        (["-m", "examples.demo"], " rich.console\n"),
        (["-m", "examples.chat", *NOBODY], " pydantic\n"),
        (["-m", "examples.agent", *NOBODY], " langchain_core.messages.ai\n"),
        (["-m", "benchmarks", "list"], " rich.console\n"),
        (EXPORT, " click.core\n"),
        (WORKER, " click.core\n"),
        (WORKER, " numpy\n"),
    ],
)
def test_while_modules_are_imported(arguments: list[str], mark: str, tmp_path: Path) -> None:
    assert interrupted_at(mark, arguments, tmp_path) == (130, ["interrupted"])


def test_an_export_that_loads_torch_says_what_is_left(tmp_path: Path) -> None:
    code, told = interrupted_at(" torch.types", EXPORT, tmp_path)
    assert code == 130
    assert told[-1] == "interrupted; nothing is as it was. The same command goes on where it stopped."
    assert not any("Traceback" in line for line in told)


def test_the_demo_ends_with_the_export_that_it_started(tmp_path: Path) -> None:
    code, told = interrupted_at("exporting", ["-m", "examples.demo"], tmp_path)
    assert code == 130
    assert told[-1] == "interrupted"
    assert not any("Traceback" in line for line in told)
