"""A bundle appears whole or not at all.

Everything is written into a sibling folder of the target, the manifest last, flushed to the disk, and the folder is renamed onto the
target. Until then the target is what it was; after a failure the sibling is gone, after a kill it is a hidden folder that no
worker takes for a bundle.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from langchain_pshard.core.bundle import MANIFEST_NAME, Manifest
from langchain_pshard.core.errors import InvalidOptionError, UsageError


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that must not or cannot be written, before any work is done. Leaves nothing behind.

    Raises:
        InvalidOptionError: something is there and `overwrite` is not set, or what is there is no bundle.
        UsageError: nothing can be written there.
    """
    _check_replaceable(target, overwrite=overwrite)
    with _disk_errors(target):  # by doing it: permissions say little to root, and nothing of mounts
        probe = _existing_parent(target) / f".{secrets.token_hex(4)}.probe"
        probe.mkdir()
        probe.rmdir()


def check_space(target: Path, num_bytes: int) -> None:
    """Refuse a bundle of about `num_bytes` that the disk has no room for.

    Raises:
        UsageError: with needed and free MiB.
    """
    parent = _existing_parent(target)
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise UsageError(
            f"the bundle {target} takes about {num_bytes / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free at {parent}: make room,"
            " choose another disk, or smaller weights (--weights int4)"
        )


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


class BundleDraft:
    """The sibling folder in which a bundle grows; from `drafting`."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self._target = target

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, flush everything, and put the folder in the target's place.

        Raises:
            UsageError: the disk is full or the target's folder may not be changed.
        """
        (self.folder / MANIFEST_NAME).write_bytes(manifest.to_json())
        for path in sorted(self.folder.rglob("*")):
            _flush(path)
        _flush(self.folder)
        _replace_folder(self.folder, self._target)
        _flush(self._target.parent)


@contextlib.contextmanager
def drafting(target: Path) -> Iterator[BundleDraft]:
    """A draft for `target`, removed unless it was published.

    Raises:
        UsageError: the disk is full, or the folder of `target` cannot be written.
    """
    folder = _sibling(target, "draft")
    try:
        with _disk_errors(target):
            folder.mkdir(parents=True)
            yield BundleDraft(folder, target)
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def _sibling(target: Path, purpose: str) -> Path:
    return target.parent / f".{target.name}.{purpose}-{secrets.token_hex(4)}"


def _replace_folder(source: Path, target: Path) -> None:
    """Rename a folder onto another. No system replaces a folder that holds files, so the old one steps aside and comes back on failure."""
    if not target.exists():
        source.rename(target)
        return
    aside = _sibling(target, "replaced")
    target.rename(aside)
    try:
        source.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside)


def _flush(path: Path) -> None:
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
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is None:  # raised by a library about something else than a file
            raise
        raise UsageError(f"cannot write the bundle {target}: {error.strerror or error} ({error.filename or target})") from error
