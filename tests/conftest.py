"""The harness around every test: environment, markers, leak check. The time limit and warnings-as-errors stand in pyproject.toml."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

# Before any library that reads them is imported, and inherited by the workers that tests start: CI has two cores, and several processes
# share them, so a pool of threads in each only gets in the others' way. Nothing in a test may reach for a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import export_tools  # noqa: F401  # before any test imports openvino: it keeps openvino's usage reports, and their processes, away
from tests.support.leaks import start_lasting_parts, take_snapshot, wait_for_none

pytest_plugins = ["tests.support.bundles", "tests.support.fleets"]

REAL_MODEL_TIMEOUT_S = 600  # the first such test on a machine exports the model within its own time


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts this in the background has it ignore SIGINT, and with it every program that a test starts to interrupt it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "real_model: runs Gemma 3 270M; the first run on a machine exports it, which takes a minute")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("real_model") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_MODEL_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def lasting_parts() -> None:
    start_lasting_parts()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a file or a socket behind.

    Session fixtures named in a test's arguments are set up before this one and so are not the test's; ask for them by argument,
    not through `request.getfixturevalue`.
    """
    before = take_snapshot()
    yield
    leaks = wait_for_none(before)
    if leaks:
        pytest.fail(f"the test left behind:\n{leaks}", pytrace=False)
