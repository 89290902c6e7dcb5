"""Weights on huge pages (Linux): memory that an engine has filled moves into pages of 2 MiB.

An inference reads the weights of its stage from end to end. In pages of 4 KiB the processor stops at each to look up where it lies, in a
virtual machine twice over (`python dev.py bench huge-pages` measures what that costs).

Only what is in use already moves, and what lies scattered between it: an eighth in addition at most, and no KV that nobody has written yet.
Elsewhere than on Linux, before Linux 6.1, and where the administrator switched huge pages off, nothing happens: it is speed alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS = Path("/proc/self/maps")
_PAGEMAP = Path("/proc/self/pagemap")
_MADV_COLLAPSE = 25  # linux/mman.h; since Linux 6.1
_PRESENT = np.uint64(1 << 63)  # of an entry of the page map (Documentation/admin-guide/mm/pagemap.rst)
_LEAST_PRESENT = 7 / 8  # of a huge page's small ones: what would be taken in addition
logger = logging.getLogger("pshard.worker")


def move_to_huge_pages() -> int:
    """Move this process's filled memory to huge pages, once the engines are warm: about a second for each 500 MB.

    Returns:
        Bytes that lie on huge pages now; 0 where the system does not offer them.
    """
    if sys.platform != "linux" or not _is_offered():
        return 0
    num_filled = num_moved = 0
    try:
        huge_bytes = int(_SIZE.read_text("ascii"))
        with _PAGEMAP.open("rb") as pagemap:
            for start, end in _anonymous_ranges(_MAPS.read_text("utf-8"), huge_bytes):
                present = _present_pages(pagemap.fileno(), start, end)
                for first, last in filled_runs(present, huge_bytes // os.sysconf("SC_PAGE_SIZE")):
                    num_filled += (last - first) * huge_bytes
                    num_moved += _collapse(start + first * huge_bytes, last - first, huge_bytes)
    except OSError as error:  # a sandbox that hides /proc
        logger.info("weights stay on small pages: %s", error)
    if num_filled:
        logger.info("%d of %d MiB of filled memory lie on huge pages", num_moved >> 20, num_filled >> 20)
    return num_moved


def _is_offered() -> bool:
    try:
        return "[never]" not in _SETTING.read_text("ascii")
    except OSError:
        return False  # a kernel without them


def _anonymous_ranges(maps: str, huge_bytes: int) -> Iterator[tuple[int, int]]:
    """Address ranges of whole huge pages within private writable memory that no file backs."""
    for line in maps.splitlines():
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights != "rw-p" or (name and name[0] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // huge_bytes) * huge_bytes, end // huge_bytes * huge_bytes
        if start < end:
            yield start, end


def _present_pages(pagemap: int, start: int, end: int) -> npt.NDArray[np.bool_]:
    """Which small pages of a range are in memory."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    entries = os.pread(pagemap, 8 * ((end - start) // page_bytes), 8 * (start // page_bytes))
    present: npt.NDArray[np.bool_] = np.frombuffer(entries, dtype="<u8") >= _PRESENT  # the highest bit
    return present


def filled_runs(present: npt.NDArray[np.bool_], pages_per_huge: int) -> list[tuple[int, int]]:
    """Runs [first, last) of huge pages that are filled well enough to be moved. Pure.

    Args:
        present: whether each small page is in memory; a multiple of `pages_per_huge` of them.
        pages_per_huge: small pages of a huge one.
    """
    is_filled = present.reshape(-1, pages_per_huge).mean(axis=1) >= _LEAST_PRESENT
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_filled, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _collapse(address: int, num_pages: int, huge_bytes: int) -> int:
    """Bytes of a run of huge pages that the kernel moved, or had moved already. What it cannot move now (a page is pinned, no huge one is
    free) stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(address, num_pages * huge_bytes, _MADV_COLLAPSE) == 0:
        return num_pages * huge_bytes
    # One that stays makes the whole call fail, though it went on to the others: only each alone tells.
    pages = range(address, address + num_pages * huge_bytes, huge_bytes)
    return huge_bytes * len([page for page in pages if madvise(page, huge_bytes, _MADV_COLLAPSE) == 0])
