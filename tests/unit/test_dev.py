"""dev.py: its help, its pins, and that an interrupt leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
DEV = ROOT / "dev.py"

# dev.py with a command of the test's in place of the demo and a short patience; everything else is the real thing.
RUN_IN_PLACE_OF_DEMO = """
import sys
sys.path.insert(0, sys.argv[1])
import dev
dev.INTERRUPT_GRACE_S = float(sys.argv[2])
command, sys.argv[1:] = sys.argv[3], ["demo"]
dev.demo = lambda _: dev.run([sys.executable, "-c", command])
sys.exit(dev.main())
"""

CLEANS_UP = """
import time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)  # a second interrupt would end this with a traceback instead
    print("cleaned up", flush=True)
"""

IGNORES_INTERRUPTS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""


def test_without_a_command_it_prints_help() -> None:
    done = subprocess.run([sys.executable, str(DEV)], capture_output=True, text=True, check=True)
    for verb in ("setup", "demo", "test", "bench", "lint"):
        assert re.search(rf"^ +{verb} ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("verb", ["setup", "demo", "test", "bench", "lint"])
def test_each_command_has_help(verb: str) -> None:
    done = subprocess.run([sys.executable, str(DEV), verb, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: dev.py {verb}")


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = [requirement for group in project["project"]["optional-dependencies"].values() for requirement in group]
    wanted = [*project["project"]["dependencies"], *extras, *project["dependency-groups"]["dev"]]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-") for requirement in wanted} - {"langchain-pshard"}
    pins = re.findall(r"(?m)^([A-Za-z0-9_.-]+)==\S+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert names - {pin.lower().replace("_", "-") for pin in pins} == set()


def _interrupted(command: str, signum: signal.Signals, *, grace_s: float) -> tuple[int, str, list[psutil.Process]]:
    """Run `command` under dev.py away from a terminal, signal dev.py alone once it is up; exit code, output, what was below it."""
    arguments = [sys.executable, "-c", RUN_IN_PLACE_OF_DEMO, str(ROOT), str(grace_s), command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as dev:
        assert dev.stdout is not None
        first_line = dev.stdout.readline()
        assert first_line == b"up\n", first_line + dev.stdout.read()
        below = psutil.Process(dev.pid).children(recursive=True)
        dev.send_signal(signum)
        output = dev.stdout.read().decode()
    return dev.returncode, output, below


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE  # an orphan that init has not collected yet
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send Ctrl-C to one process without a console of its own")
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_reaches_the_command_once_and_waits_for_it(signum: signal.Signals, exit_code: int) -> None:
    code, output, below = _interrupted(CLEANS_UP, signum, grace_s=20)
    assert code == exit_code
    assert output.splitlines()[0] == "cleaned up"
    assert all(_is_gone(process) for process in below)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send Ctrl-C to one process without a console of its own")
def test_a_command_that_will_not_end_is_killed_with_what_it_started() -> None:
    started = time.monotonic()
    code, output, below = _interrupted(IGNORES_INTERRUPTS, signal.SIGINT, grace_s=0.5)
    assert code == 130
    assert "is killed" in output
    assert len(below) == 2
    assert all(_is_gone(process) for process in below)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("names", "is_refused"), [(["torch", "sympy"], False), (["torch", "nvidia-cudnn-cu13", "triton"], True), ([], False)]
)
def test_a_torch_that_brings_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, names: list[str], is_refused: bool) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delenv("PSHARD_ALLOW_CUDA", raising=False)
    import dev

    report = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
    pip = [sys.executable, "-c", f"print({report!r})"]
    if is_refused:
        with pytest.raises(dev.SetupError, match=r"nvidia-cudnn-cu13 .*PIP_EXTRA_INDEX_URL"):
            dev._check_torch(pip)
        monkeypatch.setenv("PSHARD_ALLOW_CUDA", "1")
    dev._check_torch(pip)
    with pytest.raises(dev.SetupError, match="no such index"):
        dev._check_torch([sys.executable, "-c", "raise SystemExit('no such index')"])
