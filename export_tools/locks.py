"""Locks on files, and whose turn it is to make a bundle that several processes want at once.

The system lets go of a lock when the last process that holds its file dies, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from export_tools.write import disk_errors
from langchain_pshard.core.errors import UsageError

LONGEST_WAIT_S = 1800.0
"""Longer than the export of any model that machines make for themselves; a process that holds the turn longer hangs."""
_POLL_S = 0.1


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; False when another process, or another handle, holds it."""
    if os.name == "nt":
        import msvcrt

        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def turn_to_make(bundle: Path, waiting: AbstractContextManager[object], *, longest_wait_s: float = LONGEST_WAIT_S) -> Iterator[int]:
    """Let one process at a time into the block: it looks whether the bundle is there, and makes it if not. The others wait.

    The lock is `.NAME.turn` beside the bundle. It stays there: whoever removed it could take it from under one who just opened it.

    Args:
        bundle: what the block makes; its parents are made.
        waiting: entered only when somebody else is at it, for as long as that takes; it tells the user.
        longest_wait_s: when to give up.

    Returns:
        A context manager whose value is the lock's descriptor. A child process that is handed it holds the turn too.

    Raises:
        UsageError: it took longer, or nothing can be written there.
    """
    path = bundle.parent / f".{bundle.name}.turn"
    with disk_errors(bundle):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        if not try_lock(file):
            with waiting:
                _wait(file, path, bundle, longest_wait_s)
        yield file.fileno()


def _wait(file: IO[bytes], path: Path, bundle: Path, longest_wait_s: float) -> None:
    deadline = time.monotonic() + longest_wait_s
    while not try_lock(file):
        if time.monotonic() >= deadline:
            raise UsageError(
                f"another process has been making {bundle} for more than {longest_wait_s:.0f} s:"
                f" wait for it, or end the process that has {path} open"
            )
        time.sleep(_POLL_S)
