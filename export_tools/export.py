"""One model to one bundle: identify, cut, convert, compress, verify, publish; stage by stage, with one stage in memory."""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from export_tools import budget, genai, verify
from export_tools.compress import WeightModes, activation_group_size, compress_stage, save_stage
from export_tools.convert import convert_stage
from export_tools.costs import PartBytes, measure_costs, spans_to_measure
from export_tools.draft import Draft, StageRecord, draft_key, kept_costs, open_draft, remove_stale_drafts
from export_tools.plan import balanced_spans, check_num_stages, spans_from_counts
from export_tools.progress import Progress, SilentProgress
from export_tools.source import Source, TextParts, identify, load_text_parts, open_weights
from export_tools.stage_module import cut_stage
from export_tools.stateful import make_stateful
from export_tools.weights import WeightReader, WeightSizes
from export_tools.write import check_target, recover_target
from langchain_pshard.core.bundle import (
    FORMAT_VERSION,
    MODEL_XML,
    TOKENIZER_DIR,
    FileEntry,
    LayerSpan,
    Manifest,
    ModelCosts,
    StageEntry,
    Verification,
    WeightMode,
    describe_file,
    stage_dir,
)

_SHAPED_BY = ("langchain-pshard", "openvino", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Everything that is decided before the first stage is read."""

    source: Source
    weights: WeightReader
    sizes: WeightSizes
    text: TextParts
    spans: tuple[LayerSpan, ...]
    modes: WeightModes
    costs: ModelCosts | None
    key: str
    """What an interrupted export must agree in to be continued."""
    verifies: bool
    for_genai: bool
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    """What verification hands from one stage to the next: hidden states of the unsplit model and of the shards, text by text."""

    before: verify.Arrays
    after: verify.Arrays
    verification: Verification | None = None
    """Known behind the last stage."""


def export_bundle(
    source: str,
    out: Path,
    *,
    num_stages: int | None = None,
    layers: Sequence[int] | None = None,
    weights: WeightMode = WeightMode.INT4,
    embedding: WeightMode | None = None,
    head: WeightMode | None = None,
    group_size: int = 128,
    overwrite: bool = False,
    measure: bool = False,
    verify_shards: bool = True,
    for_genai: bool = False,
    trusts_code: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export a model into a bundle that appears at `out` whole or not at all.

    One stage is in memory at a time: at most twice its float32 weights and 1.5 GiB; measuring holds a few short samples, which may be more
    where stages have few layers. An interrupted export leaves its finished stages in a hidden folder beside `out`; the same call continues
    there.

    Args:
        source: a model folder, a .gguf file, a hub id, or "demo".
        out: the bundle's folder; its parents are made.
        num_stages: number of stages; None means as many as `layers` has, or 1.
        layers: layers per stage, in order; None cuts so that the slowest stage is as fast as possible: by measured cost, or by weight
            bytes where nothing was measured (a decoded token costs the bytes it reads).
        weights: how the decoder layers' weights are stored.
        embedding: how the embedding is stored; None is int8 where the layers are int4, else like the layers.
        head: the same for the output head.
        group_size: int4 weights per scale; smaller where it does not divide a channel count.
        overwrite: replace a bundle that is already there.
        measure: measure what the model's parts cost on this machine and keep it in the manifest. Two measurements differ in their last
            digits, and so do the fingerprints of two exports, possibly their cuts.
        verify_shards: compare the shards with the unsplit model over a few short texts; the figures go into the manifest.
        for_genai: add what openvino_genai needs to run the stage folder of a 1-stage bundle by itself.
        trusts_code: run Python code that the model brings along where its config asks for it.
        progress: shows what takes long; None shows nothing.

    Returns:
        The manifest as written.

    Raises:
        InvalidOptionError: options that contradict one another, the model or the target.
        SourceError: the model is missing or damaged.
        UnsupportedModelError: the model cannot be cut.
        VerificationError: the shards do not compute what the model computes.
        UsageError: the bundle cannot be written, or memory or disk would not hold it.
    """
    progress = progress or SilentProgress()
    modes = WeightModes.of(weights, embedding=embedding, head=head, group_size=group_size)
    recover_target(out)
    check_target(out, overwrite=overwrite)
    found = identify(source, progress, trusts_code=trusts_code)
    shape = found.shape
    if layers is None:
        check_num_stages(num_stages or 1, shape.num_layers)
    else:
        spans_from_counts(layers, shape.num_layers, num_stages)  # a bad cut is refused before the weights are looked at
    if for_genai:
        genai.check(len(layers) if layers is not None else num_stages or 1)
    reader = open_weights(found, progress)
    sizes = reader.sizes()
    stored = part_bytes(sizes, modes)
    key = draft_key(
        {
            "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in reader.files],
            "config": found.config.to_dict(),
            "cut": layers if layers is not None else num_stages or 1,
            "modes": str(modes),
            "options": [measure, verify_shards, for_genai],
            "versions": _versions(),
            "exporter": _exporter_digest(),
        }
    )
    given = None if layers is None else spans_from_counts(layers, shape.num_layers, num_stages)
    if measure:  # which takes a while: what no cut could help is refused before
        _check_memory(sizes, given or lightest_spans(sizes, num_stages or 1), modes)
    costs = kept_costs(out, key) or _measured(found, reader, sizes, stored, modes, progress) if measure else None
    spans = given or balanced_spans(*cutting_costs(costs, stored), num_stages or 1)
    needed = _check_memory(sizes, spans, modes)
    job = _Job(
        source=found,
        weights=reader,
        sizes=sizes,
        text=load_text_parts(found, progress),
        spans=spans,
        modes=modes,
        costs=costs,
        key=key,
        verifies=verify_shards,
        for_genai=for_genai,
        progress=progress,
    )
    return _run(job, out, needed)


def _run(job: _Job, out: Path, needed: budget.Needs) -> Manifest:
    key = job.key
    if out.parent.is_dir():
        freed = remove_stale_drafts(out, key)
        if freed:
            job.progress.note(f"removed an unfinished export to {out} with other options or another source ({budget.gib(freed)})")
    with open_draft(out, key) as draft:
        written = sum(path.stat().st_size for path in draft.bundle.rglob("*") if path.is_file())
        budget.check_disk(needed, shutil.disk_usage(draft.folder).free, written_bytes=written, folder=str(out.parent))
        if job.costs is not None:
            draft.keep_costs(job.costs)
        stages, verification = _make_stages(job, draft)
        if verification is not None:
            verify.check(verification, job.modes)
        tokenizer_files = _write_tokenizer(draft, job.text)
        manifest = _manifest(job, stages, tokenizer_files, verification)
        with job.progress.task("flushing to the disk"):
            draft.publish(manifest)
    return manifest


def _make_stages(job: _Job, draft: Draft) -> tuple[tuple[StageEntry, ...], Verification | None]:
    """All stages in order, those of an interrupted export as they are."""
    ids = verify.text_ids(job.text.tokenizer, job.source.shape) if job.verifies else []
    carried = _Carried(before=ids, after=ids)
    entries = []
    with job.progress.task("export", total=sum(job.weights.stored_bytes(span) for span in job.spans)) as advance:
        for stage_idx, span in enumerate(job.spans):
            finished = draft.finished(stage_idx, span)
            if finished is not None:
                record, carried = finished[0], _unpacked(*finished)
                job.progress.note(f"stage {stage_idx} of {len(job.spans)}, layers {span}: kept from the interrupted export")
            else:
                record, carried = _make_stage(job, draft, stage_idx, carried)
            entries.append(record.entry)
            advance(job.weights.stored_bytes(span))
    return tuple(entries), carried.verification


def _make_stage(job: _Job, draft: Draft, stage_idx: int, carried: _Carried) -> tuple[StageRecord, _Carried]:
    """Read, convert, compress, write, verify and record one stage; nothing of it stays in memory."""
    span, shape, progress = job.spans[stage_idx], job.source.shape, job.progress
    title = f"stage {stage_idx} of {len(job.spans)}, layers {span}"
    with draft.writing_stage(stage_idx) as folder:
        before = _write_stage(job, span, folder, carried.before, title)
        gc.collect()  # modules and graphs hold one another
        after: verify.Arrays = []
        if job.verifies:
            with progress.task(f"{title}: verifying"):
                after = verify.run_shard(folder / MODEL_XML, carried.after)
        if job.for_genai:
            with progress.task(f"{title}: adding tokenizer models for openvino_genai"):
                genai.add_models(folder, job.source, job.text)
    is_last = span.end == shape.num_layers
    if is_last and job.verifies:
        ids = verify.text_ids(job.text.tokenizer, shape)
        carried = _Carried(before=[], after=[], verification=verify.compare(ids, before, after))
    else:
        carried = _Carried(before=before, after=after)
    with progress.task(f"{title}: hashing"):
        written = sorted((draft.bundle / stage_dir(stage_idx)).iterdir(), key=_graph_first)
        entry = StageEntry(span=span, files=tuple(describe_file(draft.bundle, path) for path in written))
    record = StageRecord(entry=entry, verification=carried.verification)
    draft.record(stage_idx, record, _packed(carried))
    return record, carried


def _write_stage(job: _Job, span: LayerSpan, folder: Path, inputs: verify.Arrays, title: str) -> verify.Arrays:
    """Write the graph of one span; returns what the unsplit model makes of the inputs. A function, so that all it loaded goes with it."""
    shape, progress = job.source.shape, job.progress
    with progress.task(f"{title}: reading", total=job.weights.stored_bytes(span)) as advance:
        model = job.weights.read(span, advance)
    outputs: verify.Arrays = []
    if job.verifies:
        with progress.task(f"{title}: running the unsplit model's layers"):
            outputs = verify.run_reference(model, shape, span, inputs)
    with progress.task(f"{title}: converting"):
        graph = convert_stage(cut_stage(model, shape, span), shape)
        make_stateful(graph, shape, span)
    with progress.task(f"{title}: compressing to {job.modes.layers.value}"):
        compress_stage(graph, job.modes)
    with progress.task(f"{title}: writing"):
        save_stage(graph, folder / MODEL_XML, job.modes)
    return outputs


def _graph_first(path: Path) -> tuple[bool, str, bool]:
    """The order of a stage's files in the manifest: the graph, its weights, the rest by name."""
    return path.stem != Path(MODEL_XML).stem, path.stem, path.suffix != ".xml"


def _packed(carried: _Carried) -> dict[str, Any]:
    pairs = enumerate(zip(carried.before, carried.after, strict=True))
    return {f"{side}-{idx}": values for idx, pair in pairs for side, values in zip(("before", "after"), pair, strict=True)}


def _unpacked(record: StageRecord, arrays: dict[str, Any]) -> _Carried:
    before, after = ([arrays[f"{side}-{idx}"] for idx in range(len(arrays) // 2)] for side in ("before", "after"))
    return _Carried(before=before, after=after, verification=record.verification)


def _write_tokenizer(draft: Draft, text: TextParts) -> tuple[FileEntry, ...]:
    folder = draft.bundle / TOKENIZER_DIR
    if folder.exists():
        shutil.rmtree(folder)
    text.tokenizer.save_pretrained(folder)
    text.generation_config.to_json_file(folder / "generation_config.json")
    return tuple(describe_file(draft.bundle, path) for path in sorted(folder.rglob("*")) if path.is_file())


def part_bytes(sizes: WeightSizes, modes: WeightModes) -> PartBytes:
    """Stored bytes of a model's layers, embedding and head. Pure."""
    return PartBytes(
        layers=tuple(round(modes.part_bytes(numbers, modes.layers)) for numbers in sizes.layers),
        embedding=round(modes.part_bytes(sizes.embedding, modes.embedding)),
        head=round(modes.part_bytes(sizes.head, modes.head)),
    )


def cutting_costs(costs: ModelCosts | None, stored: PartBytes) -> tuple[list[float], float]:
    """What decides the cut: cost of each layer (the first with the embedding) and of the head, for one decoded token. Pure.

    Without measured costs the bytes stand in for them; the embedding is one row of many then, nothing.
    """
    if costs is None:
        return [float(size) for size in stored.layers], float(stored.head)
    layers = [part.decode_ms for part in costs.layers]
    return [layers[0] + costs.embedding.decode_ms, *layers[1:]], costs.head.decode_ms


def lightest_spans(sizes: WeightSizes, num_stages: int) -> tuple[LayerSpan, ...]:
    """The cut whose largest stage takes least memory. Pure."""
    return balanced_spans([sizes.layers[0] + sizes.embedding, *sizes.layers[1:]], sizes.head, num_stages)


def _check_memory(sizes: WeightSizes, spans: tuple[LayerSpan, ...], modes: WeightModes) -> budget.Needs:
    """What a cut needs; raises UsageError where memory will not hold it."""
    needed = budget.needs(sizes, spans, modes)
    budget.check_memory(needed, psutil.virtual_memory().available, num_stages=len(spans), num_layers=len(sizes.layers))
    return needed


def _measured(
    source: Source, reader: WeightReader, sizes: WeightSizes, stored: PartBytes, modes: WeightModes, progress: Progress
) -> ModelCosts:
    """Time a few short spans, each read by itself."""
    kinds = reader.layer_kinds()
    samples = spans_to_measure(kinds, stored.layers)
    budget.check_measuring(sizes, samples, modes, psutil.virtual_memory().available)
    return measure_costs(
        lambda span: cut_stage(reader.read(span), source.shape, span),
        source.shape,
        samples,
        kinds,
        stored,
        modes=modes,
        activation_group_size=activation_group_size(sizes.channel_counts, modes),
        progress=progress,
    )


def _manifest(
    job: _Job, stages: tuple[StageEntry, ...], tokenizer_files: tuple[FileEntry, ...], verification: Verification | None
) -> Manifest:
    shape, modes, text, costs = job.source.shape, job.modes, job.text, job.costs
    if costs is not None:
        stages = tuple(msgspec.structs.replace(stage, cost=costs.stage(stage.span)) for stage in stages)
    return Manifest(
        format_version=FORMAT_VERSION,
        model_name=job.source.name,
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        attention_windows=shape.attention_windows,
        bos_token_id=text.bos_token_id,
        eos_token_ids=text.eos_token_ids,
        weight_mode=modes.layers,
        embedding_mode=modes.embedding,
        head_mode=modes.head,
        group_size=modes.group_size if modes.has_int4 else None,
        activation_group_size=activation_group_size(job.sizes.channel_counts, modes),
        stages=stages,
        tokenizer_files=tokenizer_files,
        exported_with=_versions(),
        runners=shape.runners,
        costs=costs,
        verification=verification,
    ).sealed()


def _exporter_digest() -> str:
    """Over this package's source: a draft of another version of it is not continued."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    return {package: _version(package) for package in _SHAPED_BY}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # only our own can be missing: run from a checkout that is not installed
        return "not installed"
