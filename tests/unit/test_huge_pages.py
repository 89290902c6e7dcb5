"""Huge pages: what moves, and that nothing else changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from workers.huge_pages import filled_runs, move_to_huge_pages

_OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_runs_of_filled_pages() -> None:
    filled, empty, holes = [True] * 8, [False] * 8, [True] * 6 + [False] * 2
    nearly = [True] * 7 + [False]
    assert filled_runs(np.array(filled + empty + nearly + filled + holes), 8) == [(0, 1), (2, 4)]
    assert filled_runs(np.array(empty), 8) == []
    assert filled_runs(np.array(filled * 3), 8) == [(0, 3)]


def _on_huge_pages(address: int, num_bytes: int) -> int:
    """Bytes on huge pages of the mappings that hold a range."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(span[1], 16) < address + num_bytes and int(span[2], 16) > address
        elif is_inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux" or not _OFFER.exists() or "[never]" in _OFFER.read_text(), reason="no huge pages here")
def test_filled_memory_moves_and_keeps_what_it_holds() -> None:
    # Far more than a huge page, so that some lie within it whole; numpy takes it from the system and gives it back.
    filled = np.arange(4 << 20, dtype=np.uint64)  # 32 MiB
    untouched = np.zeros(32 << 20, dtype=np.uint8)
    resident = psutil.Process().memory_info().rss
    moved = move_to_huge_pages()
    if not moved:
        pytest.skip("this kernel moves nothing on demand, or has no huge page free")
    assert moved >= filled.nbytes - (4 << 20)
    assert _on_huge_pages(filled.ctypes.data, filled.nbytes) >= filled.nbytes - (4 << 20)
    assert (filled == np.arange(4 << 20, dtype=np.uint64)).all()
    # What nobody has written is not taken: at most an eighth of what moved comes in addition.
    assert psutil.Process().memory_info().rss - resident <= moved / 8 + (8 << 20)
    assert not untouched.any()


def test_nothing_happens_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n", "ascii")
    monkeypatch.setattr("workers.huge_pages._SETTING", setting)
    assert move_to_huge_pages() == 0
    monkeypatch.setattr("workers.huge_pages._SETTING", tmp_path / "none")
    assert move_to_huge_pages() == 0


@pytest.mark.skipif(sys.platform != "linux" or not _OFFER.exists() or "[never]" in _OFFER.read_text(), reason="no huge pages here")
def test_a_sandbox_that_hides_proc_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("workers.huge_pages._PAGEMAP", tmp_path / "none")
    with caplog.at_level("INFO", logger="pshard.worker"):
        assert move_to_huge_pages() == 0
    assert "weights stay on small pages" in caplog.text
