"""One model to one bundle: identify, cut, make the shards (`shards`), publish; and a draft model beside it (`draft`)."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from export_tools import budget, genai
from export_tools.awq import check as check_scalable
from export_tools.compress import WeightModes, activation_group_size
from export_tools.costs import PartBytes, measure_costs, spans_to_measure
from export_tools.draft import check_same_tokens, cut_draft, draft_entry
from export_tools.plan import balanced_spans, check_num_stages, spans_from_counts
from export_tools.progress import Progress, SilentProgress
from export_tools.shards import Cut, make_shards
from export_tools.source import Source, TextParts, identify, load_text_parts, open_weights
from export_tools.stage_module import cut_stage
from export_tools.unfinished import Unfinished, export_key, kept_costs, open_unfinished, remove_stale
from export_tools.weights import WeightReader, WeightSizes
from export_tools.write import check_target, recover_target
from langchain_pshard.core.bundle import (
    FORMAT_VERSION,
    TOKENIZER_DIR,
    DraftEntry,
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
from langchain_pshard.core.errors import InvalidOptionError

_SHAPED_BY = ("langchain-pshard", "openvino", "torch", "transformers")


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
    awq: bool = False,
    draft: str | None = None,
    draft_weights: WeightMode | None = None,
    overwrite: bool = False,
    measure: bool = False,
    verify_shards: bool = True,
    for_genai: bool = False,
    trusts_code: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export a model into a bundle that appears at `out` whole or not at all.

    One shard is in memory at a time: at most twice its float32 weights and 1.5 GiB. An interrupted export leaves its finished shards in a
    hidden folder beside `out`; the same call continues there.

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
        awq: scale the layers before int4, so that groups lose less; a layer keeps the same bytes whatever the split.
        draft: a small model with the same tokenizer, named like `source`, that guesses tokens for this one to verify; it becomes one more
            shard of the bundle, uncut.
        draft_weights: how its layers' weights are stored; None is like `weights`.
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
    modes = WeightModes.of(weights, embedding=embedding, head=head, group_size=group_size, awq=awq)
    draft_modes = _draft_modes(draft, draft_weights, modes)
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
    text = load_text_parts(found, progress)
    draft_cut = None if draft is None else _draft_cut(draft, draft_modes, found, text, progress, trusts_code=trusts_code)
    reader = open_weights(found, progress)
    if modes.awq:
        check_scalable(reader.empty_layers, origin=found.location, architecture=shape.architecture)
    sizes = reader.sizes()
    stored = part_bytes(sizes, modes)
    key = export_key(
        {
            "model": _model_parts(found, reader, modes),
            "draft": None if draft_cut is None else _model_parts(draft_cut.source, draft_cut.weights, draft_cut.modes),
            "cut": layers if layers is not None else num_stages or 1,
            "options": [measure, verify_shards, for_genai],
            "versions": _versions(),
            "exporter": _exporter_digest(),
        }
    )
    given = None if layers is None else spans_from_counts(layers, shape.num_layers, num_stages)
    num_spans = len(given) if given else num_stages or 1
    disk_bytes = 0
    if draft_cut is not None:
        disk_bytes = _check_memory(draft_cut.sizes, draft_cut.spans, draft_cut.modes, is_draft=True).disk
    if measure:  # which takes a while: what no cut could help is refused before
        _check_memory(sizes, given or lightest_spans(sizes, num_spans), modes)
    costs = kept_costs(out, key) or _measured(found, reader, sizes, stored, modes, num_spans, progress) if measure else None
    spans = given or balanced_spans(*cutting_costs(costs, stored), num_spans)
    disk_bytes += _check_memory(sizes, spans, modes).disk
    cut = Cut(
        source=found,
        weights=reader,
        sizes=sizes,
        text=text,
        spans=spans,
        folders=tuple(stage_dir(idx) for idx in range(len(spans))),
        modes=modes,
        for_genai=for_genai,
    )
    if out.parent.is_dir():
        freed = remove_stale(out, key)
        if freed:
            progress.note(f"removed an unfinished export to {out} with other options or another source ({budget.gib(freed)})")
    with open_unfinished(out, key) as unfinished:
        written = sum(path.stat().st_size for path in unfinished.bundle.rglob("*") if path.is_file())
        budget.check_disk(disk_bytes, shutil.disk_usage(unfinished.folder).free, written_bytes=written, folder=str(out.parent))
        if costs is not None:
            unfinished.keep_costs(costs)
        stages, verification = make_shards(cut, unfinished, progress, verifies=verify_shards)
        entry = None
        if draft_cut is not None:
            (shard,), draft_verification = make_shards(draft_cut, unfinished, progress, verifies=verify_shards)
            entry = draft_entry(draft_cut, shard, draft_verification)
        manifest = _manifest(cut, costs, stages, _write_tokenizer(unfinished, text), verification, entry)
        with progress.task("flushing to the disk"):
            unfinished.publish(manifest)
    return manifest


def _draft_modes(draft: str | None, draft_weights: WeightMode | None, modes: WeightModes) -> WeightModes:
    if draft is None and draft_weights is not None:
        raise InvalidOptionError(f"--draft-weights {draft_weights.value} says how a draft model is stored: name one with --draft")
    return WeightModes.of(draft_weights or modes.layers, embedding=None, head=None, group_size=modes.group_size)


def _draft_cut(name: str, modes: WeightModes, target: Source, target_text: TextParts, progress: Progress, *, trusts_code: bool) -> Cut:
    """The draft model, which speaks in the same tokens as `target`: nothing but tokenizers is read before that is known."""
    source = identify(name, progress, trusts_code=trusts_code)
    text = load_text_parts(source, progress)
    check_same_tokens(target, target_text.tokenizer, source, text.tokenizer)
    return cut_draft(source, text, modes, progress)


def _model_parts(source: Source, reader: WeightReader, modes: WeightModes) -> dict[str, Any]:
    """What an interrupted export must agree in to be continued, of one model."""
    return {
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in reader.files],
        "config": source.config.to_dict(),
        "modes": str(modes),
    }


def _write_tokenizer(unfinished: Unfinished, text: TextParts) -> tuple[FileEntry, ...]:
    folder = unfinished.bundle / TOKENIZER_DIR
    if folder.exists():
        shutil.rmtree(folder)
    text.tokenizer.save_pretrained(folder)
    text.generation_config.to_json_file(folder / "generation_config.json")
    return tuple(describe_file(unfinished.bundle, path) for path in sorted(folder.rglob("*")) if path.is_file())


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


def _check_memory(sizes: WeightSizes, spans: tuple[LayerSpan, ...], modes: WeightModes, *, is_draft: bool = False) -> budget.Needs:
    """What a cut needs; raises UsageError where memory will not hold it."""
    needed = budget.needs(sizes, spans, modes)
    shard = "the draft" if is_draft else f"stage {needed.heaviest_stage} of {len(spans)}"
    remedy = "cut the model into more stages" if len(spans) < len(sizes.layers) else "use a machine with more memory"
    remedy = "choose a smaller draft model" if is_draft else remedy
    budget.check_memory(needed, psutil.virtual_memory().available, shard=shard, remedy=remedy)
    return needed


def _measured(
    source: Source, reader: WeightReader, sizes: WeightSizes, stored: PartBytes, modes: WeightModes, num_stages: int, progress: Progress
) -> ModelCosts:
    """Time a few short spans, each read by itself."""
    kinds = reader.layer_kinds()
    samples = spans_to_measure(kinds, stored.layers, num_stages)
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
    cut: Cut,
    costs: ModelCosts | None,
    stages: tuple[StageEntry, ...],
    tokenizer_files: tuple[FileEntry, ...],
    verification: Verification | None,
    draft: DraftEntry | None,
) -> Manifest:
    shape, modes, text = cut.source.shape, cut.modes, cut.text
    if costs is not None:
        stages = tuple(msgspec.structs.replace(stage, cost=costs.stage(stage.span)) for stage in stages)
    return Manifest(
        format_version=FORMAT_VERSION,
        model_name=cut.source.name,
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
        activation_group_size=activation_group_size(cut.sizes.channel_counts, modes),
        stages=stages,
        tokenizer_files=tokenizer_files,
        exported_with=_versions(),
        runners=shape.runners,
        costs=costs,
        verification=verification,
        draft=draft,
        awq=modes.awq,
    ).sealed()


def _exporter_digest() -> str:
    """Over this package's source: what another version of it left unfinished is not continued."""
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
