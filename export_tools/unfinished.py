"""The folder in which a bundle grows, and from which an interrupted export goes on.

`.NAME.unfinished-KEY/` lies beside the target NAME; KEY is a hash over the sources and everything that shapes the bundle, so that only
the same export ever continues it. Inside:

```
bundle/     what becomes the target: stages, draft, tokenizer, at the very end the manifest
stage-0.json, stage-0.npz, ..    one record for each finished shard: its files with their hashes, and what verification carries on
costs.json  what the export has measured, where it has
lock        held by the running export; the system lets go of it when the process dies
```

A shard is written under another name, flushed, renamed, and only then recorded; the manifest is written when all are there, and the
rename onto the target comes last. So a kill at any time leaves either no record or a whole shard, and never something half made that loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from export_tools.locks import try_lock
from export_tools.write import disk_errors, flush_tree, replace_folder, write_flushed
from langchain_pshard.core.bundle import MANIFEST_NAME, LayerSpan, Manifest, ModelCosts, StageEntry, Verification, verify_files
from langchain_pshard.core.errors import BundleError, UsageError

_BUNDLE, _LOCK, _COSTS = "bundle", "lock", "costs.json"
_PARTIAL = ".partial"


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a finished shard."""

    entry: StageEntry
    verification: Verification | None = None
    """Of the whole model; known behind its last layer."""


def export_key(parts: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits over everything that shapes a bundle; `parts` must be JSON."""
    canonical = json.dumps(parts, sort_keys=True, default=str).encode()
    return hashlib.sha256(canonical).hexdigest()[:16]


class Unfinished:
    """A bundle that grows; from `open_unfinished`. Its shards go by the names of their folders."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self.bundle = folder / _BUNDLE
        self._target = target
        self.is_published = False

    def finished(self, name: str, span: LayerSpan) -> tuple[ShardRecord, dict[str, NDArray[Any]]] | None:
        """The record of a shard of this span that is there and whole; None when it has to be made."""
        path = self._record(name)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ShardRecord)
            if record.entry.span != span:
                return None  # costs that were lost and measured again may cut elsewhere; the key knows only what was asked for
            verify_files(self.bundle, record.entry.files)
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
                return record, dict(arrays)
        except (FileNotFoundError, BundleError, msgspec.DecodeError, ValueError):
            return None  # killed before it was whole, or damaged since: made again

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A folder for the files of a shard, which becomes the shard at the end of the block."""
        folder = self.bundle / name
        partial = folder.with_name(folder.name + _PARTIAL)
        for leftover in (folder, partial):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        yield partial
        flush_tree(partial)
        partial.rename(folder)

    def record(self, name: str, record: ShardRecord, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Note that a shard is finished; the arrays go with it."""
        path = self._record(name)
        partial = path.with_suffix(f".npz{_PARTIAL}")
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the names for its own options
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path.with_suffix(".npz"))
        write_flushed(path, msgspec.json.encode(record))

    def keep_costs(self, costs: ModelCosts) -> None:
        """Note what was measured, for `kept_costs`."""
        write_flushed(self.folder / _COSTS, msgspec.json.encode(costs))

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, flush everything, and put the bundle in the target's place."""
        for leftover in self.bundle.glob(f"*{_PARTIAL}"):
            shutil.rmtree(leftover)
        flush_tree(self.bundle)
        write_flushed(self.bundle / MANIFEST_NAME, manifest.to_json())
        replace_folder(self.bundle, self._target)
        self.is_published = True

    @property
    def has_finished_shards(self) -> bool:
        return any(path.name != _COSTS for path in self.folder.glob("*.json"))

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def kept_costs(target: Path, key: str) -> ModelCosts | None:
    """What an interrupted export has measured: measured again it would differ, and with it perhaps the cut and every stage."""
    try:
        return msgspec.json.decode((_folder(target, key) / _COSTS).read_bytes(), type=ModelCosts)
    except (FileNotFoundError, msgspec.DecodeError):
        return None  # never measured, or damaged since: measured again


@contextlib.contextmanager
def open_unfinished(target: Path, key: str) -> Iterator[Unfinished]:
    """The unfinished bundle of `target` under `key`, new or as an interrupted export left it.

    It is removed once published, and when the block ends before any shard was finished. Otherwise it stays, so that the same call goes on
    from there.

    Raises:
        UsageError: another export of the same bundle is running, the disk is full, or the target's folder cannot be written.
    """
    folder = _folder(target, key)
    unfinished = Unfinished(folder, target)
    with disk_errors(target):
        unfinished.bundle.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("ab") as lock:
            if not try_lock(lock):
                raise UsageError(f"another export to {target} with the same options is running: wait for it, or end it")
            for leftover in unfinished.bundle.glob(f"{MANIFEST_NAME}*"):  # killed before the last rename; the shards are checked again
                leftover.unlink()
            try:
                yield unfinished
            finally:
                keeps = not unfinished.is_published and unfinished.has_finished_shards
                lock.close()  # no system but POSIX removes a folder with an open file
                if not keeps:
                    shutil.rmtree(folder)


def remove_stale(target: Path, key: str) -> int:
    """Remove unfinished bundles of `target` that other options or another source left and no running export holds; returns their bytes."""
    num_bytes = 0
    for folder in target.parent.glob(f".{_escaped(target.name)}.unfinished-*"):
        if folder.name.endswith(key) or not folder.is_dir():
            continue
        with (folder / _LOCK).open("ab") as lock:
            is_free = try_lock(lock)
        if is_free:
            num_bytes += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
    return num_bytes


def _folder(target: Path, key: str) -> Path:
    return target.parent / f".{target.name}.unfinished-{key}"


def _escaped(name: str) -> str:
    """The name as a glob pattern that matches only itself."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
