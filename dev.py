#!/usr/bin/env python3
"""Every developer command of PShard: set-up, demo, tests, benchmarks, lint.

This file runs on a bare Python 3.11+, on Linux, macOS and Windows, before anything is installed: the standard library only. It makes
`.venv` when that is missing or out of date, then runs the command with the Python in there.

One rule for interrupts: the command has cleaned up and ended, or its process tree has been killed, before this program ends with code 130.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"
STAMP = VENV / "pshard-setup.stamp"
SETUP_LOG = VENV / "setup.log"
IS_WINDOWS = sys.platform == "win32"
PYTHON = VENV / ("Scripts/python.exe" if IS_WINDOWS else "bin/python")

INTERRUPT_GRACE_S = 20.0
LOG_TAIL_LINES = 25
QUIET_HEARTBEAT_S = 30.0
EXIT_INTERRUPTED = 130

LINT_STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ruff check", ("-m", "ruff", "check", ".")),
    ("ruff format --check", ("-m", "ruff", "format", "--check", ".")),
    ("mypy", ("-m", "mypy")),
    ("lint-imports", ("-c", "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())")),
)


class SetupError(Exception):
    """The environment cannot be made; the message is for the person at the terminal."""


# --- running a command so that nothing outlives it -------------------------------------------------------------------


def _is_terminal_foreground() -> bool:
    """Whether a Ctrl-C at the terminal reaches our whole process group by itself."""
    if IS_WINDOWS:
        return True  # the console hands Ctrl-C to every process attached to it
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children before grandchildren; found through `ps`."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [(int(child), int(parent)) for child, parent in (line.split() for line in listing.splitlines())]
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in pairs if its_parent == parent]
    return found[1:]


def _kill_tree(child: subprocess.Popen[Any], *, has_own_group: bool) -> None:
    if IS_WINDOWS:
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(child.pid)], capture_output=True, check=False)
        return
    with contextlib.suppress(ProcessLookupError):
        if has_own_group:
            os.killpg(child.pid, signal.SIGKILL)
            return
    try:
        below = _descendants(child.pid)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"dev.py: cannot list the processes below {child.pid} ({error}); killing it alone", file=sys.stderr)
        below = []
    for pid in (child.pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _running(command: Sequence[str | Path], **popen: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start `command`; on an interrupt wait for it to clean up, then kill what is left of its tree.

    At a terminal the child shares our process group and gets Ctrl-C from the terminal. Elsewhere (CI, a pipe, `kill -INT`) it leads a
    group of its own, to which we pass the signal on: either way each process gets it exactly once.
    """
    has_own_group = not _is_terminal_foreground()
    if has_own_group:
        popen["process_group"] = 0
    child = subprocess.Popen([str(part) for part in command], cwd=ROOT, **popen)
    try:
        yield child
    except BaseException as error:
        # A second Ctrl-C must not cut the waiting short: the child has it as well, and the wait is bounded.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if child.poll() is None and not IS_WINDOWS:
                with contextlib.suppress(ProcessLookupError):
                    if has_own_group:
                        os.killpg(child.pid, signal.SIGINT)
                    elif not isinstance(error, KeyboardInterrupt):  # SIGTERM came to us alone
                        child.send_signal(signal.SIGINT)
            try:
                child.wait(INTERRUPT_GRACE_S)
            except subprocess.TimeoutExpired:
                print(f"dev.py: the command did not end within {INTERRUPT_GRACE_S:.0f} s and is killed", file=sys.stderr)
                _kill_tree(child, has_own_group=has_own_group)
                child.wait()
        finally:
            signal.signal(signal.SIGINT, previous)
        raise


def run(command: Sequence[str | Path]) -> int:
    """Run `command` in the repository's root with our own standard streams and return its exit code."""
    with _running(command) as child:
        if IS_WINDOWS:  # an endless wait there is deaf to Ctrl-C
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
        code = child.wait()
    return EXIT_INTERRUPTED if code == -signal.SIGINT else code


# --- set-up ----------------------------------------------------------------------------------------------------------


class ProgressLine:
    """One line for one step: a spinner with seconds and the log's last line at a terminal, a line now and then elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._started = time.monotonic()
        self._next_heartbeat_s = QUIET_HEARTBEAT_S
        self._num_ticks = 0
        self._is_live = sys.stdout.isatty()
        if not self._is_live:
            print(f"{title} ...", flush=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def tick(self, activity: str) -> None:
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            mark = "|/-\\"[self._num_ticks % 4]
            line = f"{mark} {self.title} {self.elapsed_s:4.0f} s  {activity}"[:width]
            print("\r" + line.ljust(width), end="", flush=True)
            self._num_ticks += 1
        elif self.elapsed_s >= self._next_heartbeat_s:
            print(f"  {self.elapsed_s:.0f} s", flush=True)
            self._next_heartbeat_s += QUIET_HEARTBEAT_S

    def close(self, outcome: str) -> None:
        line = f"{self.title}: {outcome}, {self.elapsed_s:.1f} s"
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            line = "\r" + line.ljust(width)
        print(line, flush=True)


def _log_tail(log: Path, num_lines: int) -> list[str]:
    with log.open("rb") as file:  # the end only: a tick reads it five times a second
        file.seek(max(0, log.stat().st_size - 16384))
        return file.read().decode("utf-8", "replace").splitlines()[-num_lines:]


def _logged_step(title: str, command: Sequence[str | Path], log: Path) -> None:
    """Run one set-up command with its output in `log` and a line of progress on the screen."""
    progress = ProgressLine(title)
    with log.open("ab") as output:
        output.write(f"\n=== {' '.join(map(str, command))}\n\n".encode())
        output.flush()
        try:
            with _running(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as child:
                while child.poll() is None:
                    progress.tick((_log_tail(log, 1) or [""])[0].strip())
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.2)
        except BaseException:
            progress.close("interrupted (run the command again to go on from here)")
            raise
    if child.returncode != 0:
        progress.close("FAILED")
        tail = "\n".join(_log_tail(log, LOG_TAIL_LINES))
        raise SetupError(f"{tail}\n\n{title} failed with exit code {child.returncode}; the whole log is in {log}")
    progress.close("done")


def _wanted_stamp() -> str:
    """What the environment must have been made from: both files and the Python that runs it."""
    digest = hashlib.sha256(repr((sys.version_info[:3], sys.platform)).encode())
    for path in (CONSTRAINTS, PYPROJECT):
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def _is_current() -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") == _wanted_stamp()


def _can_reuse_venv() -> bool:
    """Whether `.venv` runs this Python version and has pip: an interrupted `venv` has neither or only the first."""
    if not PYTHON.exists():
        return False
    probe = [str(PYTHON), "-c", "import sys, pip; print(*sys.version_info[:2])"]
    answer = subprocess.run(probe, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.split() == [str(part) for part in sys.version_info[:2]]


def _drop_half_installed() -> None:
    """Forget packages whose installation was cut short, so that pip installs them again.

    pip writes RECORD last; a package with METADATA but no RECORD would pass for installed.
    """
    for dist_info in [*VENV.glob("lib/python*/site-packages/*.dist-info"), *VENV.glob("Lib/site-packages/*.dist-info")]:
        if not (dist_info / "RECORD").exists():
            shutil.rmtree(dist_info)


def _pin(name: str) -> str:
    match = re.search(rf"(?m)^{re.escape(name)}==\S+$", CONSTRAINTS.read_text(encoding="utf-8"))
    if match is None:
        raise SetupError(f"{CONSTRAINTS} has no line {name}==VERSION")
    return match.group()


def _install_steps() -> list[tuple[str, list[str]]]:
    import tomllib  # here, so that an older Python reaches the message that says it is too old

    dev = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["dependency-groups"]["dev"]
    return [
        # torch first and alone: every later resolution then finds it there, and none can trade it for another build.
        ("installing torch", [_pin("torch")]),
        ("installing build tools", [_pin("setuptools")]),
        # Without build isolation: the project is built with the setuptools pinned above, not with the newest of the day.
        ("installing PShard, its extras and the dev tools", ["--no-build-isolation", "--editable", ".[all]", *dev]),
    ]


def _check_torch(pip: Sequence[str | Path]) -> None:
    """Stop before gigabytes: where pip is offered no CPU build, the pinned torch comes with CUDA.

    Raises:
        SetupError: it does; the message says what to do.
    """
    command = [*map(str, pip), "--dry-run", "--quiet", "--report", "-", _pin("torch")]
    progress = ProgressLine("asking which torch pip would take")
    asked = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    progress.close("FAILED" if asked.returncode else "done")
    if asked.returncode:
        raise SetupError(f"{asked.stderr[-2000:]}\npip finds no {_pin('torch')}")
    names = [str(item["metadata"]["name"]) for item in json.loads(asked.stdout)["install"]]
    cuda = [name for name in names if name.startswith(("nvidia-", "cuda-"))]
    if cuda and not os.environ.get("PSHARD_ALLOW_CUDA"):
        raise SetupError(
            f"{_pin('torch')} would bring {', '.join(cuda[:3])} and {len(names)} packages in all: gigabytes of CUDA, of no use to PShard."
            " Offer pip the CPU build: set PIP_EXTRA_INDEX_URL to the index that PyTorch's installation page names for CPU, or"
            " PIP_FIND_LINKS to a folder with its wheel. To take CUDA all the same, set PSHARD_ALLOW_CUDA=1."
        )


def ensure_environment() -> None:
    """Make or bring up to date `.venv`; returns at once when it is current. The stamp is written last, so an interrupt is resumed.

    Raises:
        SetupError: a step failed; the message holds the end of the log.
    """
    if _is_current():
        return
    if _can_reuse_venv():
        STAMP.unlink(missing_ok=True)
        _drop_half_installed()
    else:
        if VENV.exists():
            shutil.rmtree(VENV)
        VENV.mkdir()
        _logged_step("making .venv", [sys.executable, "-m", "venv", VENV], SETUP_LOG)
    pip: list[str | Path] = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "-c",
        CONSTRAINTS,
    ]
    _check_torch(pip)
    for title, requirements in _install_steps():
        _logged_step(title, [*pip, *requirements], SETUP_LOG)
    STAMP.write_text(_wanted_stamp(), encoding="utf-8")


# --- verbs -----------------------------------------------------------------------------------------------------------


def _lint() -> list[str]:
    """Run every static check, each under its heading; return the names of those that failed."""
    failed = []
    for title, arguments in LINT_STEPS:
        print(f"\n--- {title}", flush=True)
        started = time.monotonic()
        code = run([PYTHON, *arguments])
        outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
        print(f"--- {title}: {outcome}, {time.monotonic() - started:.1f} s", flush=True)
        if code != 0:
            failed.append(title)
    return failed


def setup(_: argparse.Namespace) -> int:
    ensure_environment()
    print(f"ready: {PYTHON}")
    return 0


def lint(_: argparse.Namespace) -> int:
    ensure_environment()
    failed = _lint()
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def test(options: argparse.Namespace) -> int:
    """All checks run even when an early one fails. pytest comes last, so that its closing line is ours (CI reads it)."""
    ensure_environment()
    failed = _lint()
    if failed:
        print(f"\nfailed so far: {', '.join(failed)}; the tests run all the same", flush=True)
    print("\n--- pytest", flush=True)
    code = run([PYTHON, "-m", "pytest", *options.pytest_args])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return code or (1 if failed else 0)


def demo(_: argparse.Namespace) -> int:
    ensure_environment()
    return run([PYTHON, "-m", "examples.demo"])


def bench(options: argparse.Namespace) -> int:
    ensure_environment()
    into = ["--json", options.json.resolve()] if options.json else []  # the command runs in the root, the path is the caller's
    return run([PYTHON, "-m", "benchmarks", options.name, *into])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dev.py", description="Developer commands of PShard. Each makes .venv first when it has to.")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")

    def verb(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(function=function)
        return added

    verb("setup", setup, "Make .venv and install the project with everything it needs, pinned (about 4 minutes the first time).")
    verb("demo", demo, "Export Gemma 3 270M into two shards, start two workers, and stream the answer of a LangChain chain.")
    tests = verb("test", test, "Run ruff, mypy, the import contracts and pytest.")
    tests.add_argument("pytest_args", nargs=argparse.REMAINDER, metavar="...", help="handed to pytest, for example: tests/unit -k bundle")
    benches = verb("bench", bench, "Run one benchmark; exit code 1 when it misses its target.")
    benches.add_argument("name", metavar="NAME", help="the benchmark, for example `split`; `list` names them all")
    benches.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    verb("lint", lint, "Run ruff, mypy and the import contracts.")
    return parser


def _on_terminate(_signum: int, _frame: object) -> NoReturn:
    raise SystemExit(143)


def main() -> int:
    """Parse the command line and run one verb; returns the process's exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file meets whatever Python the machine has
        print(f"error: PShard needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable})", file=sys.stderr)
        return 1
    parser = _parser()
    options = parser.parse_args()
    if "function" not in options:
        parser.print_help()
        return 0
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        code: int = options.function(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
