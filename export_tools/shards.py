"""One model into its shards: read, convert, compress, verify and record, span by span, with one span in memory.

What is cut and how is decided before (`export`, `draft`); where the files lie, and what an interrupted export left, is in `unfinished`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_tools import awq, genai, verify
from export_tools.compress import WeightModes, compress_stage, save_stage
from export_tools.convert import convert_stage
from export_tools.progress import Progress
from export_tools.source import Source, TextParts
from export_tools.stage_module import cut_stage
from export_tools.stateful import make_stateful
from export_tools.unfinished import ShardRecord, Unfinished
from export_tools.weights import WeightReader, WeightSizes
from langchain_pshard.core.bundle import MODEL_XML, LayerSpan, StageEntry, Verification, describe_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model and the shards that it becomes."""

    source: Source
    weights: WeightReader
    sizes: WeightSizes
    text: TextParts
    spans: tuple[LayerSpan, ...]
    """From the first layer to the last."""
    folders: tuple[str, ...]
    """Of each shard, inside the bundle."""
    modes: WeightModes
    is_draft: bool = False
    for_genai: bool = False

    @property
    def num_bytes(self) -> int:
        """To read, over all shards."""
        return sum(self.weights.stored_bytes(span) for span in self.spans)

    def title(self, idx: int) -> str:
        """A shard's name for people."""
        return f"{'draft' if self.is_draft else f'stage {idx} of {len(self.spans)}'}, layers {self.spans[idx]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    """What verification hands from one shard to the next: hidden states of the unsplit model and of the shards, text by text."""

    before: verify.Arrays
    after: verify.Arrays
    verification: Verification | None = None
    """Known behind the last shard."""


def make_shards(
    cut: Cut, unfinished: Unfinished, progress: Progress, *, verifies: bool
) -> tuple[tuple[StageEntry, ...], Verification | None]:
    """All shards of a model in order, those of an interrupted export as they are; and how they compare with the unsplit model.

    Raises:
        VerificationError: they do not compute what the model computes.
    """
    ids = verify.text_ids(cut.text.tokenizer, cut.source.shape) if verifies else []
    carried = _Carried(before=ids, after=ids)
    entries = []
    with progress.task("export of the draft" if cut.is_draft else "export", total=cut.num_bytes) as advance:
        for idx, span in enumerate(cut.spans):
            finished = unfinished.finished(cut.folders[idx], span)
            if finished is not None:
                record, carried = finished[0], _unpacked(*finished)
                progress.note(f"{cut.title(idx)}: kept from the interrupted export")
            else:
                record, carried = _make_shard(cut, unfinished, progress, idx, carried, verifies=verifies)
            entries.append(record.entry)
            advance(cut.weights.stored_bytes(span))
    if carried.verification is not None:
        verify.check(carried.verification, cut.modes, name=cut.source.name)
    return tuple(entries), carried.verification


def _make_shard(
    cut: Cut, unfinished: Unfinished, progress: Progress, idx: int, carried: _Carried, *, verifies: bool
) -> tuple[ShardRecord, _Carried]:
    """Read, convert, compress, write, verify and record one shard; nothing of it stays in memory."""
    span, shape, name, title = cut.spans[idx], cut.source.shape, cut.folders[idx], cut.title(idx)
    with unfinished.writing(name) as folder:
        before = _write_shard(cut, progress, span, folder, carried.before if verifies else None, title)
        gc.collect()  # modules and graphs hold one another
        after: verify.Arrays = []
        if verifies:
            with progress.task(f"{title}: verifying"):
                after = verify.run_shard(folder / MODEL_XML, carried.after)
        if cut.for_genai:
            with progress.task(f"{title}: adding tokenizer models for openvino_genai"):
                genai.add_models(folder, cut.source, cut.text)
    is_last = span.end == shape.num_layers
    if is_last and verifies:
        ids = verify.text_ids(cut.text.tokenizer, shape)
        carried = _Carried(before=[], after=[], verification=verify.compare(ids, before, after))
    else:
        carried = _Carried(before=before, after=after)
    with progress.task(f"{title}: hashing"):
        written = sorted((unfinished.bundle / name).iterdir(), key=_graph_first)
        entry = StageEntry(span=span, files=tuple(describe_file(unfinished.bundle, path) for path in written))
    record = ShardRecord(entry=entry, verification=carried.verification)
    unfinished.record(name, record, _packed(carried))
    return record, carried


def _write_shard(cut: Cut, progress: Progress, span: LayerSpan, folder: Path, inputs: verify.Arrays | None, title: str) -> verify.Arrays:
    """Write the graph of one span; returns what the unsplit model makes of the inputs. A function, so that all it loaded goes with it."""
    shape = cut.source.shape
    with progress.task(f"{title}: reading", total=cut.weights.stored_bytes(span)) as advance:
        model = cut.weights.read(span, advance)
    outputs: verify.Arrays = []
    if inputs is not None:
        with progress.task(f"{title}: running the unsplit model's layers"):
            outputs = verify.run_reference(model, shape, span, inputs)
    with progress.task(f"{title}: converting"):
        stage = cut_stage(model, shape, span)
        if cut.modes.awq:
            awq.rescale(stage.layers.values())  # after the unsplit model has run: these are its weights
        graph = convert_stage(stage, shape)
        make_stateful(graph, shape, span)
    with progress.task(f"{title}: compressing to {cut.modes.layers.value}"):
        compress_stage(graph, cut.modes)
    with progress.task(f"{title}: writing"):
        save_stage(graph, folder / MODEL_XML, cut.modes)
    return outputs


def _graph_first(path: Path) -> tuple[bool, str, bool]:
    """The order of a shard's files in the manifest: the graph, its weights, the rest by name."""
    return path.stem != Path(MODEL_XML).stem, path.stem, path.suffix != ".xml"


def _packed(carried: _Carried) -> dict[str, Any]:
    pairs = enumerate(zip(carried.before, carried.after, strict=True))
    return {f"{side}-{idx}": values for idx, pair in pairs for side, values in zip(("before", "after"), pair, strict=True)}


def _unpacked(record: ShardRecord, arrays: dict[str, Any]) -> _Carried:
    before, after = ([arrays[f"{side}-{idx}"] for idx in range(len(arrays) // 2)] for side in ("before", "after"))
    return _Carried(before=before, after=after, verification=record.verification)
