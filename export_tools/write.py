"""How files and folders come to the disk: whole, flushed, and in one rename.

Until a new bundle is renamed onto the target, the target is what it was. The folder it grows in is `unfinished.py`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from langchain_pshard.core.bundle import MANIFEST_NAME
from langchain_pshard.core.errors import InvalidOptionError, UsageError

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC, errno.EFBIG)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that must not or cannot be written, before any work is done. Leaves nothing behind.

    Raises:
        InvalidOptionError: something is there and `overwrite` is not set, or what is there is no bundle.
        UsageError: nothing can be written there.
    """
    _check_replaceable(target, overwrite=overwrite)
    with disk_errors(target):  # by doing it: permissions say little to root, and nothing of mounts
        probe = _existing_parent(target) / f".{secrets.token_hex(4)}.probe"
        probe.mkdir()
        probe.rmdir()


def _existing_parent(target: Path) -> Path:
    return next(folder for folder in target.absolute().parents if folder.exists())


def _check_replaceable(target: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    is_empty = target.is_dir() and not any(target.iterdir())
    if is_empty:
        return
    if not (target / MANIFEST_NAME).is_file():
        raise InvalidOptionError(
            f"{target} exists and is not a bundle (it has no {MANIFEST_NAME}); it is left as it is: choose another path"
        )
    if not overwrite:
        raise InvalidOptionError(f"{target} already holds a bundle: choose another path, or replace it with --overwrite")


def recover_target(target: Path) -> None:
    """Undo what a kill between the two renames of `replace_folder` left.

    The old bundle steps back, or is removed where the new one is there.
    """
    aside = _aside(target)
    if not aside.is_dir():
        return
    with disk_errors(target):
        if os.path.lexists(target):
            shutil.rmtree(aside)
        else:
            aside.rename(target)


def replace_folder(source: Path, target: Path) -> None:
    """Rename a folder onto another. No system replaces a folder that holds files, so the old one steps aside and comes back on failure."""
    if not target.exists():
        source.rename(target)
        flush(target.parent)
        return
    aside = _aside(target)
    target.rename(aside)
    try:
        source.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    flush(target.parent)
    shutil.rmtree(aside)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


def write_flushed(path: Path, data: bytes) -> None:
    """Make a file appear whole: written and flushed under another name, then renamed."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    flush(path.parent)


def flush_tree(folder: Path) -> None:
    """Force a folder and all in it to the disk."""
    for path in sorted(folder.rglob("*")):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Force a file or folder to the disk. Windows has no handle for a folder and needs a writable one for a file."""
    if os.name == "nt":
        if path.is_dir():
            return
        flags = os.O_RDWR
    else:
        flags = os.O_RDONLY
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn a full or read-only disk into our error.

    Raises:
        UsageError: the system refused to write.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is None:  # raised by a library about something else than a file
            raise
        remedy = "free some space there, or choose another path" if error.errno in _NO_ROOM else "choose another path, or make it writable"
        where = error.filename or target
        raise UsageError(f"cannot write the bundle {target}: {error.strerror or error} ({where}): {remedy}") from error
