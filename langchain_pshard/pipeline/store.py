"""The manifest and tokenizer of the model that a fleet serves: fetched from a worker by hash, checked, and kept for the next time.

```
CACHE/<fingerprint>/manifest.json
CACHE/<fingerprint>/tokenizer/...
```
A folder appears whole or not at all. A cache that cannot be written is no error: the files then live in a temporary folder for as long as
they are read.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from langchain_pshard.core.bundle import MANIFEST_NAME, TOKENIZER_DIR, FileEntry, Fingerprint, Manifest, load_manifest, verify_files
from langchain_pshard.core.errors import BundleError, ProtocolError
from langchain_pshard.core.messages import Fetched

MAX_FETCH_BYTES = 256 << 20
_log = logging.getLogger(__name__)

FetchPiece = Callable[[str, int], Fetched]
"""(hash, offset) -> a piece of the content with this hash."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A bundle without its shards."""

    manifest: Manifest
    tokenizer: Path


def default_cache_dir() -> Path:
    """The user's cache folder for PShard's models."""
    return Path(platformdirs.user_cache_dir("pshard", appauthor=False)) / "models"


@contextmanager
def model_files(fingerprint: Fingerprint, fetch_piece: FetchPiece, cache_dir: Path) -> Iterator[ModelFiles]:
    """The files, from the cache or the fleet. Use them inside the `with` only.

    Raises:
        BundleError, ProtocolError: what the worker sent is not what its hash says.
    """
    target = cache_dir / fingerprint
    cached = _cached(target)
    if cached is not None:
        yield cached
        return
    manifest = _fetch_manifest(fingerprint, fetch_piece)
    contents = {entry: _fetch_file(entry, fetch_piece) for entry in manifest.tokenizer_files}
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache_dir))
    except OSError as error:
        _log.warning("the cache folder %s cannot be used (%s): going on without it", cache_dir, error)
        work = Path(tempfile.mkdtemp(prefix="pshard-"))
    try:
        files = _write(work, manifest, contents)
        if work.parent == cache_dir and _publish(work, target):
            files = ModelFiles(manifest, target / TOKENIZER_DIR)
        yield files
    finally:
        shutil.rmtree(work, ignore_errors=True)  # after a publication there is nothing left of it


def _cached(target: Path) -> ModelFiles | None:
    if not target.is_dir():
        return None
    try:
        manifest = load_manifest(target)
        verify_files(target, manifest.tokenizer_files)
    except BundleError as error:
        _log.warning("fetching a damaged cache entry again: %s", error)
        return None
    return ModelFiles(manifest, target / TOKENIZER_DIR)


def _fetch_manifest(fingerprint: Fingerprint, fetch_piece: FetchPiece) -> Manifest:
    manifest = Manifest.from_json(_fetch(fingerprint, fetch_piece), origin="the manifest a worker sent")
    if manifest.fingerprint != fingerprint:
        raise BundleError(f"a worker sent the manifest {manifest.fingerprint} where {fingerprint} was asked for")
    return manifest


def _fetch_file(entry: FileEntry, fetch_piece: FetchPiece) -> bytes:
    data = _fetch(entry.sha256, fetch_piece)
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise BundleError(f"a worker sent a damaged {entry.path}: expected sha256 {entry.sha256}, found {found}")
    return data


def _fetch(sha256: str, fetch_piece: FetchPiece) -> bytes:
    data = bytearray()
    while True:
        piece = fetch_piece(sha256, len(data))
        data += piece.data
        if piece.num_bytes > MAX_FETCH_BYTES or len(data) > piece.num_bytes or (not piece.data and len(data) < piece.num_bytes):
            raise ProtocolError(
                f"a worker announced {piece.num_bytes} bytes for {sha256} and sent {len(data)}; at most {MAX_FETCH_BYTES} are allowed"
            )
        if len(data) == piece.num_bytes:
            return bytes(data)


def _write(folder: Path, manifest: Manifest, contents: dict[FileEntry, bytes]) -> ModelFiles:
    (folder / TOKENIZER_DIR).mkdir()
    for entry, data in contents.items():
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return ModelFiles(manifest, folder / TOKENIZER_DIR)


def _publish(work: Path, target: Path) -> bool:
    """Put the folder in its place; False when that fails, which costs only the next fetch."""
    try:
        if target.exists() and _cached(target) is None:
            shutil.rmtree(target)  # damaged
        work.rename(target)
    except OSError as error:
        if _cached(target) is not None:
            return True  # another process was quicker
        _log.warning("cannot keep %s (%s): going on without it", target, error)
        return False
    return True
