"""The bundle: a folder with a manifest, a tokenizer and one OpenVINO model per stage.

```
BUNDLE/manifest.json
BUNDLE/tokenizer/tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json
BUNDLE/stage-0/openvino_model.xml, openvino_model.bin
BUNDLE/stage-1/...
BUNDLE/draft/openvino_model.xml, openvino_model.bin    only where it was exported with a draft model
```

This module reads, checks and fingerprints; the exporter alone writes. The manifest is the last file of an export to appear, so a
folder without one is no bundle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import NewType

import msgspec

from langchain_pshard.core.errors import BundleError, InvalidOptionError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_DIR = "tokenizer"
DRAFT_DIR = "draft"
MODEL_XML = "openvino_model.xml"
MODEL_BIN = "openvino_model.bin"
_HASH_CHUNK_BYTES = 1 << 20

Fingerprint = NewType("Fingerprint", str)
"""Hexadecimal sha256 over the canonical manifest; two shards belong together exactly when theirs are equal."""


class WeightMode(Enum):
    """How matrix weights are stored. int4 is symmetric with one scale per group; int8 has one scale per channel."""

    INT4 = "int4"
    INT8 = "int8"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bits(self) -> int:
        """Of one weight, its scale not counted."""
        return {"int4": 4, "int8": 8, "fp16": 16, "fp32": 32}[self.value]


class LayerSpan(msgspec.Struct, frozen=True, order=True):
    """Half-open range [start, end) of decoder layers."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidOptionError(f"layer span [{self.start}, {self.end}) is empty or negative")

    @property
    def num_layers(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}-{self.end - 1}" if self.num_layers > 1 else str(self.start)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the bundle. `path` is relative to the bundle, with forward slashes."""

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in self.path or ":" in self.path:
            raise BundleError(f"manifest names a file outside the bundle: {self.path!r}")


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """Measured cost of a stage on the exporting machine, in milliseconds."""

    decode_ms: float
    """One token of one stream."""
    prefill_ms: float
    """One prompt token, inside a long chunk."""


class PartCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of a model (a layer, the embedding, the head) costs, whichever stage it is in."""

    decode_ms: float
    """One token of one stream."""
    prefill_ms: float
    """One prompt token, inside a long chunk."""
    num_bytes: int
    """Its weights as they are stored."""


class MachineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a machine is, as a multiple of the reference machine (`yardstick`)."""

    decode: float
    prefill: float


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a model cost, measured by the exporter on its machine with one inference thread under `fast`."""

    layers: tuple[PartCost, ...]
    embedding: PartCost
    head: PartCost
    step_ms: float
    """What an inference costs a stage beside its parts."""
    machine: MachineSpeed
    """The machine that measured, by the yardstick that `pshard-worker measure` uses too."""
    cpu: str
    """Its processor, for people."""

    def stage(self, span: LayerSpan) -> StageCost:
        """Cost of a stage that holds `span`: its layers, the embedding before the first, the head after the last."""
        parts = [*self.layers[span.start : span.end]]
        parts += [self.embedding] if span.start == 0 else []
        parts += [self.head] if span.end == len(self.layers) else []
        return StageCost(
            decode_ms=round(self.step_ms + sum(part.decode_ms for part in parts), 4),
            prefill_ms=round(sum(part.prefill_ms for part in parts), 4),
        )


class StageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: the decoder layers it holds and the files it is made of."""

    span: LayerSpan
    files: tuple[FileEntry, ...]
    cost: StageCost | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Shards against the unsplit model over a few short texts, in float32 on the exporting machine."""

    num_texts: int
    num_tokens: int
    max_logit_difference: float
    largest_logit: float
    """Of the unsplit model, in absolute value: the scale of the difference."""
    token_agreement: float
    """Share of positions at which both find the same token most likely."""
    perplexity_before: float
    perplexity_after: float


class DraftEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The draft model: small, unsplit, with the vocabulary of the bundle's model, whose next tokens it guesses. Fields as in `Manifest`."""

    model_name: str
    architecture: str
    span: LayerSpan
    """All of its layers."""
    hidden_size: int
    vocab_size: int
    """Rows of its head; they may be padded to another number than those of the bundle's model."""
    context_length: int
    num_kv_heads: int
    head_dim: int
    attention_windows: tuple[int | None, ...]
    weight_mode: WeightMode
    embedding_mode: WeightMode
    head_mode: WeightMode
    group_size: int | None
    activation_group_size: int
    files: tuple[FileEntry, ...]
    runners: tuple[str, ...] = ("paged", "stateful")
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if self.span.start != 0 or len(self.attention_windows) != self.span.num_layers:
            raise BundleError(
                f"manifest has a draft of layers {self.span} with {len(self.attention_windows)} attention windows: not a whole model"
            )

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a bundle says about itself. Fields at their default are not written, so that a new one changes no older fingerprint.

    Invariants, checked on construction: spans are contiguous from 0 to `num_layers`; `attention_windows` has one entry a
    layer; there is at least one stage; a stored fingerprint equals the computed one.
    """

    format_version: int
    model_name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    num_kv_heads: int
    head_dim: int
    attention_windows: tuple[int | None, ...]
    """Per layer: None for full attention, else the number of positions a query sees, itself included."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weight_mode: WeightMode
    embedding_mode: WeightMode
    head_mode: WeightMode
    group_size: int | None
    """int4 weights that share a scale, where it divides a matrix's channels; None in other modes."""
    activation_group_size: int
    """Values of an activation that share a scale under fast numerics: a power of two that divides the input of every matrix and every
    group of its weights. 0 when there is none, or when weights are not compressed: activations are not quantized then."""
    stages: tuple[StageEntry, ...]
    tokenizer_files: tuple[FileEntry, ...]
    exported_with: dict[str, str]
    """Package name to version, of everything that shaped the graphs."""
    fingerprint: Fingerprint = Fingerprint("")
    costs: ModelCosts | None = None
    """None where the exporter was told not to measure."""
    runners: tuple[str, ...] = ("paged", "stateful")
    """Engines that can run the graphs: attention with capped scores (Gemma 2) has no paged form."""
    verification: Verification | None = None
    """None: the export was told not to verify."""
    draft: DraftEntry | None = None
    """None: exported without a draft model."""
    awq: bool = False
    """Whether the layers were scaled before they became int4. Their graphs are like others'."""

    def __post_init__(self) -> None:
        _check_version(self.format_version)
        edges = [0, *(stage.span.end for stage in self.stages)]
        if (
            not self.stages
            or edges[-1] != self.num_layers
            or any(stage.span.start != start for stage, start in zip(self.stages, edges, strict=False))
        ):
            raise BundleError(
                f"manifest spans {[str(stage.span) for stage in self.stages]} do not cover layers 0-{self.num_layers - 1} in order"
            )
        if len(self.attention_windows) != self.num_layers:
            raise BundleError(f"manifest has {len(self.attention_windows)} attention windows for {self.num_layers} layers")
        if self.costs is not None and len(self.costs.layers) != self.num_layers:
            raise BundleError(f"manifest has costs of {len(self.costs.layers)} layers for {self.num_layers} layers")
        if self.fingerprint and self.fingerprint != self.computed_fingerprint:
            raise BundleError(
                f"manifest fingerprint {self.fingerprint} does not match its contents ({self.computed_fingerprint}): the file was edited;"
                " restore it or export again"
            )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def best_runner(self) -> str:
        """The engine to take where nobody asks for another: paged where the graphs allow it."""
        return "paged" if "paged" in self.runners else self.runners[0]

    @property
    def computed_fingerprint(self) -> Fingerprint:
        unsealed = msgspec.structs.replace(self, fingerprint="") if self.fingerprint else self
        canonical = msgspec.json.encode(unsealed, order="deterministic")
        return Fingerprint(hashlib.sha256(canonical).hexdigest())

    def sealed(self) -> Manifest:
        """The same manifest carrying its fingerprint."""
        return msgspec.structs.replace(self, fingerprint=self.computed_fingerprint)

    def to_json(self) -> bytes:
        """The bytes of manifest.json."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1)

    @classmethod
    def from_json(cls, data: bytes, *, origin: str) -> Manifest:
        """Parse and check manifest bytes; `origin` (a path or a peer) goes into the error.

        Raises:
            BundleError: the bytes are no manifest, or its parts contradict one another.
        """
        try:
            # First of all and alone: a manifest of another version has other fields, and that is not what is wrong with it.
            _check_version(msgspec.json.decode(data, type=_Version).format_version)
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BundleError(f"{origin} is not a PShard manifest: {error}") from error
        except BundleError as error:
            raise BundleError(f"{origin}: {error}") from error
        if not manifest.fingerprint:
            raise BundleError(f"{origin} carries no fingerprint: the export did not finish; export again")
        return manifest


class _Version(msgspec.Struct):
    """All that manifests of any version have in common."""

    format_version: int


def _check_version(format_version: int) -> None:
    if format_version != FORMAT_VERSION:
        remedy = "export the model again" if format_version < FORMAT_VERSION else "install the version of PShard that exported it, or newer"
        raise BundleError(f"bundle format version {format_version} cannot be read; this version of PShard reads {FORMAT_VERSION}: {remedy}")


def load_manifest(bundle: Path) -> Manifest:
    """Read `manifest.json` of a bundle folder.

    Raises:
        BundleError: no such folder, no manifest in it, or a manifest that cannot be used.
    """
    path = bundle / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "an unfinished export" if bundle.is_dir() else "no such folder"
        raise BundleError(f"{bundle} is not a bundle ({what}: {MANIFEST_NAME} is missing): make one with pshard-export") from error
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    return Manifest.from_json(data, origin=str(path))


def stage_dir(stage_idx: int) -> str:
    """Name of a stage's folder inside the bundle."""
    return f"stage-{stage_idx}"


def file_digest(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Hexadecimal sha256 of a file; `on_bytes` hears of every piece read, for a progress display."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def describe_file(bundle: Path, path: Path) -> FileEntry:
    """The manifest entry of a file that lies inside `bundle`."""
    return FileEntry(path=path.relative_to(bundle).as_posix(), num_bytes=path.stat().st_size, sha256=file_digest(path))


def verify_files(bundle: Path, files: tuple[FileEntry, ...], on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Check files against their manifest entries; `on_bytes` hears of every piece read.

    Raises:
        BundleError: a file is missing, or its size or hash differs; the message names the file with both values.
    """
    for entry in files:
        path = bundle / entry.path
        try:
            num_bytes = path.stat().st_size
            sha256 = file_digest(path, on_bytes)
        except FileNotFoundError as error:
            raise BundleError(f"{path} is missing from the bundle (expected sha256 {entry.sha256}): copy it again") from error
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        if sha256 != entry.sha256:
            raise BundleError(
                f"{path} is damaged or from another export: expected {entry.num_bytes} bytes with sha256 {entry.sha256},"
                f" found {num_bytes} bytes with sha256 {sha256}: copy it again"
            )
