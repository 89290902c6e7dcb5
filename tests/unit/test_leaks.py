"""The leak check sees each kind of leak, and nothing once it is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.leaks import compare, take_snapshot, wait_for_none


def test_a_thread_is_seen_until_it_ends() -> None:
    before = take_snapshot()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-behind", daemon=True)
    thread.start()
    assert compare(before, take_snapshot()).items == ("thread left-behind (daemon=True)",)
    release.set()
    thread.join()
    assert not wait_for_none(before)


def test_a_process_is_seen_until_it_is_waited_for() -> None:
    before = take_snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = compare(before, take_snapshot()).items
        assert any(item.startswith(f"process {child.pid} (") for item in found)
    assert not wait_for_none(before)


def test_a_file_and_a_socket_are_seen_until_closed(tmp_path: Path) -> None:
    before = take_snapshot()
    path = tmp_path / "held"
    with path.open("w", encoding="utf-8"), socket.create_server(("127.0.0.1", 0)):
        found = compare(before, take_snapshot()).items
        assert len(found) == 2
        assert any(str(path) in item for item in found)
        assert any("socket" in item for item in found)
    assert not wait_for_none(before)


def test_a_leak_that_stays_is_reported_after_the_settling_time() -> None:
    before = take_snapshot()
    with socket.create_server(("127.0.0.1", 0)):
        assert len(wait_for_none(before, settle_s=0.05).items) == 1
