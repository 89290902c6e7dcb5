"""Pure: what an export needs of memory and disk, and the refusal where there is less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from export_tools.compress import WeightModes
from export_tools.weights import FLOAT_BYTES, WeightSizes
from langchain_pshard.core.bundle import LayerSpan
from langchain_pshard.core.errors import UsageError

_WORKING_BYTES = 700 << 20
"""What torch, transformers and OpenVINO, tokenizer and graphs take beyond what is loaded already when the check is made."""
_WORKING_FACTOR = 1.5
"""Of a stage's float weights: the weights, and copies of a few matrices while they are compressed."""
_COMPILED_FACTOR = 2
"""Of a sample's stored weights: themselves, and as the compiled graph packs them anew."""
_SMALL_FILES_BYTES = 48 << 20  # tokenizer, graphs without weights, records


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that an export needs."""

    memory: int
    disk: int
    heaviest_stage: int


def needs(sizes: WeightSizes, spans: Sequence[LayerSpan], modes: WeightModes) -> Needs:
    """What an export of these spans needs."""
    heaviest_bytes, heaviest_stage = _heaviest(sizes, spans)
    parts = modes.part_bytes(sum(sizes.layers), modes.layers) + modes.part_bytes(sizes.embedding, modes.embedding)
    shares_end = sizes.is_tied and len(spans) == 1 and modes.embedding is modes.head
    parts += 0 if shares_end else modes.part_bytes(sizes.head, modes.head)
    return Needs(
        memory=int(heaviest_bytes * _WORKING_FACTOR) + _WORKING_BYTES,
        disk=int(parts * 1.02) + _SMALL_FILES_BYTES,
        heaviest_stage=heaviest_stage,
    )


def check_measuring(sizes: WeightSizes, samples: Sequence[LayerSpan], modes: WeightModes, available_bytes: int) -> None:
    """Refuse to measure `samples` where memory will not hold them: one in float32 while it is made, all of them compressed and compiled.

    Raises:
        UsageError: with needed and available figures.
    """
    compiled = _COMPILED_FACTOR * sum(_stored(sizes, span, modes) for span in samples)
    needed = int(_heaviest(sizes, samples)[0] * _WORKING_FACTOR + compiled) + _WORKING_BYTES
    if needed > available_bytes:
        raise UsageError(
            f"not enough memory to measure costs: it needs {gib(needed)}, {gib(available_bytes)} is available,"
            f" {gib(needed - available_bytes)} short: export with --no-measure, or close other programs"
        )


def check_memory(needed: Needs, available_bytes: int, *, shard: str, remedy: str) -> None:
    """Refuse before any work what memory will not hold; `shard` names the one that needs most.

    Raises:
        UsageError: with needed and available figures.
    """
    if needed.memory > available_bytes:
        raise UsageError(
            f"not enough memory: {shard} needs {gib(needed.memory)}, {gib(available_bytes)} is available,"
            f" {gib(needed.memory - available_bytes)} short: {remedy}, or close other programs"
        )


def check_disk(needed_bytes: int, free_bytes: int, *, written_bytes: int, folder: str) -> None:
    """Refuse before any work what the disk will not hold; `written_bytes` are there already from an interrupted export.

    Raises:
        UsageError: with needed and available figures.
    """
    wanted = needed_bytes - written_bytes
    if wanted > free_bytes:
        raise UsageError(
            f"not enough disk: the bundle needs {gib(wanted)} in {folder}, {gib(free_bytes)} is free, {gib(wanted - free_bytes)} short:"
            " free some space there or choose another path"
        )


def gib(num_bytes: float) -> str:
    """Bytes for a person."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _heaviest(sizes: WeightSizes, spans: Sequence[LayerSpan]) -> tuple[int, int]:
    """Float bytes of the largest stage, and which it is."""
    weights = [sizes.span_numbers(span) * FLOAT_BYTES for span in spans]
    return max(weights), weights.index(max(weights))


def _stored(sizes: WeightSizes, span: LayerSpan, modes: WeightModes) -> float:
    """Stored bytes of a stage of this span."""
    ends = modes.part_bytes(sizes.embedding, modes.embedding) * (span.start == 0)
    ends += modes.part_bytes(sizes.head, modes.head) * (span.end == len(sizes.layers))
    return modes.part_bytes(sum(sizes.layers[span.start : span.end]), modes.layers) + ends
