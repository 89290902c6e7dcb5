"""One model to one bundle: identify, cut, convert, compress, publish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from export_tools.architectures import ModelShape
from export_tools.compress import activation_group_size, compress_stage, embedding_and_head_mode, save_stage
from export_tools.convert import convert_stage
from export_tools.costs import PartBytes, layer_kinds, measure_costs
from export_tools.plan import balanced_spans, check_num_stages, spans_from_counts
from export_tools.profile import BITS
from export_tools.progress import Progress, SilentProgress
from export_tools.source import LoadedModel, Source, identify, load
from export_tools.stage_module import cut_stage
from export_tools.stateful import make_stateful
from export_tools.write import BundleDraft, check_space, check_target, drafting
from langchain_pshard.core.bundle import (
    FORMAT_VERSION,
    MODEL_BIN,
    MODEL_XML,
    TOKENIZER_DIR,
    FileEntry,
    LayerSpan,
    Manifest,
    ModelCosts,
    StageEntry,
    WeightMode,
    describe_file,
    stage_dir,
)
from langchain_pshard.core.errors import InvalidOptionError

_SHAPED_BY = ("langchain-pshard", "nncf", "openvino", "torch", "transformers")


def export_bundle(
    source: str,
    out: Path,
    *,
    num_stages: int | None = None,
    layers: Sequence[int] | None = None,
    weights: WeightMode = WeightMode.INT4,
    group_size: int = 128,
    overwrite: bool = False,
    measure: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export a model into a bundle that appears at `out` whole or not at all.

    Args:
        source: a model folder, a .gguf file, a hub id, or "demo".
        out: the bundle's folder; its parents are made.
        num_stages: number of stages; None means as many as `layers` has, or 1.
        layers: layers per stage, in order; None cuts so that the slowest stage is as fast as possible: by measured cost, or by weight
            bytes where nothing was measured (a decoded token costs the bytes it reads).
        weights: how the decoder layers' weights are stored; int4 keeps embedding and head in int8.
        group_size: int4 weights per scale; smaller where it does not divide a channel count.
        overwrite: replace a bundle that is already there.
        measure: measure what the model's parts cost on this machine and keep it in the manifest. Two measurements differ in their last
            digits, and so do the fingerprints of two exports, possibly their cuts.
        progress: shows what takes long; None shows nothing.

    Returns:
        The manifest as written.

    Raises:
        InvalidOptionError: options that contradict one another, the model or the target.
        SourceError: the model is missing or damaged.
        UnsupportedModelError: the model cannot be cut.
        UsageError: the bundle cannot be written, or the disk has no room for it.
    """
    progress = progress or SilentProgress()
    if group_size < 16 or group_size & (group_size - 1):
        raise InvalidOptionError(f"group size {group_size} is not usable: choose a power of two from 16, such as 32, 64 or 128")
    check_target(out, overwrite=overwrite)
    found = identify(source, progress)
    if layers is None:
        check_num_stages(num_stages or 1, found.shape.num_layers)
    else:
        spans_from_counts(layers, found.shape.num_layers, num_stages)  # a bad cut is refused before the weights are read
    loaded = load(found, progress)
    stored = part_bytes(loaded.model, weights)
    costs = _measured(loaded, found.shape, stored, weights, group_size, progress) if measure else None
    if layers is None:
        spans = balanced_spans(*cutting_costs(costs, stored), num_stages or 1)
    else:
        spans = spans_from_counts(layers, found.shape.num_layers, num_stages)
    check_space(out, stored.num_bytes)
    with drafting(out) as draft:
        stages = tuple(_write_stages(draft, loaded, found.shape, spans, weights, group_size, progress))
        tokenizer_files = _write_tokenizer(draft, loaded)
        manifest = _manifest(found, loaded, stages, tokenizer_files, weights, group_size, costs)
        with progress.task("flushing to the disk"):
            draft.publish(manifest)
    return manifest


def _write_stages(
    draft: BundleDraft,
    loaded: LoadedModel,
    shape: ModelShape,
    spans: Sequence[LayerSpan],
    weights: WeightMode,
    group_size: int,
    progress: Progress,
) -> Iterator[StageEntry]:
    for stage_idx, span in enumerate(spans):
        folder = draft.folder / stage_dir(stage_idx)
        folder.mkdir()
        title = f"stage {stage_idx} of {len(spans)}, layers {span}"
        with progress.task(f"{title}: converting"):
            model = convert_stage(cut_stage(loaded.model, shape, span), shape)
            make_stateful(model, shape, span)
        with progress.task(f"{title}: compressing to {weights.value}"):
            model = compress_stage(model, weights, group_size)
        with progress.task(f"{title}: writing"):
            save_stage(model, folder / MODEL_XML, weights)
            files = tuple(describe_file(draft.folder, folder / name) for name in (MODEL_XML, MODEL_BIN))
        yield StageEntry(span=span, files=files)


def _write_tokenizer(draft: BundleDraft, loaded: LoadedModel) -> tuple[FileEntry, ...]:
    folder = draft.folder / TOKENIZER_DIR
    loaded.tokenizer.save_pretrained(folder)
    loaded.model.generation_config.to_json_file(folder / "generation_config.json")
    return tuple(describe_file(draft.folder, path) for path in sorted(folder.rglob("*")) if path.is_file())


def part_bytes(model: Any, weights: WeightMode) -> PartBytes:
    """Stored bytes of a model's layers, embedding and head; its weights may be on the meta device."""
    end_bits = BITS[embedding_and_head_mode(weights)]
    return PartBytes(
        layers=tuple(sum(tensor.numel() for tensor in layer.parameters()) * BITS[weights] // 8 for layer in model.model.layers),
        embedding=model.model.embed_tokens.weight.numel() * end_bits // 8,
        head=model.lm_head.weight.numel() * end_bits // 8,
    )


def cutting_costs(costs: ModelCosts | None, stored: PartBytes) -> tuple[list[float], float]:
    """What decides the cut: cost of each layer (the first with the embedding) and of the head, for one decoded token. Pure.

    Without measured costs the bytes stand in for them; the embedding is one row of many then, nothing.
    """
    if costs is None:
        return [float(size) for size in stored.layers], float(stored.head)
    layers = [part.decode_ms for part in costs.layers]
    return [layers[0] + costs.embedding.decode_ms, *layers[1:]], costs.head.decode_ms


def _measured(
    loaded: LoadedModel, shape: ModelShape, stored: PartBytes, weights: WeightMode, group_size: int, progress: Progress
) -> ModelCosts:
    return measure_costs(
        lambda span: cut_stage(loaded.model, shape, span),
        shape,
        layer_kinds(loaded.model.model.layers),
        stored,
        weights=weights,
        group_size=group_size,
        activation_group_size=activation_group_size(_channel_counts(loaded.model), weights, group_size),
        progress=progress,
    )


def _channel_counts(model: Any) -> set[int]:
    """Input sizes of all the matrices of a model."""
    return {module.in_features for module in model.modules() if hasattr(module, "in_features")}


def _manifest(
    source: Source,
    loaded: LoadedModel,
    stages: tuple[StageEntry, ...],
    tokenizer_files: tuple[FileEntry, ...],
    weights: WeightMode,
    group_size: int,
    costs: ModelCosts | None,
) -> Manifest:
    shape = source.shape
    if costs is not None:
        stages = tuple(msgspec.structs.replace(stage, cost=costs.stage(stage.span)) for stage in stages)
    return Manifest(
        format_version=FORMAT_VERSION,
        model_name=source.name,
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        attention_windows=shape.attention_windows,
        bos_token_id=loaded.bos_token_id,
        eos_token_ids=loaded.eos_token_ids,
        weight_mode=weights,
        embedding_mode=embedding_and_head_mode(weights),
        head_mode=embedding_and_head_mode(weights),
        group_size=group_size if weights is WeightMode.INT4 else None,
        activation_group_size=activation_group_size(_channel_counts(loaded.model), weights, group_size),
        stages=stages,
        tokenizer_files=tokenizer_files,
        exported_with={package: _version(package) for package in _SHAPED_BY},
        costs=costs,
    ).sealed()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # only our own can be missing: run from a checkout that is not installed
        return "not installed"
