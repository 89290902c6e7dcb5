"""The weights of a span of layers in memory, and of no other.

The model is built on the meta device, where tensors have shapes but no data; the tensors of one span are then read into it by transformers'
own loader, so that renamed, fused and merged weights arrive as `from_pretrained` would make them. A model from here is
complete where the span needs it and empty everywhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, convert_and_load_state_dict_in_model, rename_source_key
from transformers.modeling_utils import LoadStateDictConfig

from export_tools.architectures import ModelShape
from export_tools.checkpoint import Checkpoint
from export_tools.quiet import quiet_transformers
from langchain_pshard.core.bundle import LayerSpan
from langchain_pshard.core.errors import SourceError

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.", "lm_head.", "model.norm."
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Numbers in the parts of a model, from its shapes alone."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    """Equal to `embedding` where the two are tied; the last stage holds them once all the same."""
    is_tied: bool
    largest_tensor: int
    channel_counts: frozenset[int]
    """Input sizes of all matrices."""

    def span_numbers(self, span: LayerSpan) -> int:
        """Numbers that a stage of this span holds in memory."""
        is_first, is_last = span.start == 0, span.end == len(self.layers)
        ends = self.embedding * is_first + self.head * is_last
        if is_first and is_last and self.is_tied:
            ends = self.head
        return sum(self.layers[span.start : span.end]) + ends


class WeightReader:
    """Reads spans of one checkpoint."""

    def __init__(self, model_class: Any, config: Any, shape: ModelShape, checkpoint: Checkpoint, *, origin: str) -> None:
        """Match the checkpoint's names with the model's; no data is read.

        Raises:
            SourceError: the checkpoint lacks a tensor of the model, whichever span it is in.
        """
        self._class = model_class
        self._config = config
        self._shape = shape
        self._checkpoint = checkpoint
        self._origin = origin
        self._shapes = self.empty_model()  # to look at; a model that is read into is another one
        self._names = checkpoint.names(self._shapes)
        self._targets = self._match()
        self._check_complete()

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files."""
        return self._checkpoint.files

    def empty_model(self) -> Any:
        """A new model without any data."""
        with torch.device("meta"):
            return self._class(self._config).eval()

    def sizes(self) -> WeightSizes:
        """How large each part is."""
        return sizes_of(self._shapes, is_tied=self._is_tied())

    @property
    def empty_layers(self) -> Any:
        """The decoder layers, with shapes but no data."""
        return self._shapes.model.layers

    def layer_kinds(self) -> tuple[Hashable, ...]:
        """See `layer_kinds`."""
        return layer_kinds(self.empty_layers)

    def read(self, span: LayerSpan, on_bytes: Callable[[int], None] = lambda _: None) -> Any:
        """A float32 model that holds the layers of `span`, with the embedding for the first and norm and head for the last.

        Args:
            span: the layers.
            on_bytes: hears of every tensor read, in bytes on the disk (`stored_bytes` in all).

        Raises:
            SourceError: data that does not fit the model's shapes, or is not finite.
        """
        model = self.empty_model()
        wanted = self._wanted(span)
        stored = [name for name, target in self._targets.items() if _part(target) in wanted]
        options = LoadStateDictConfig(dtype=torch.float32, weight_mapping=get_model_conversion_mapping(model))
        with self._checkpoint.reading(stored, model, on_bytes) as tensors, quiet_transformers():
            report, _ = convert_and_load_state_dict_in_model(model, tensors, options)
        for key, found, expected in sorted(report.mismatched_keys):
            raise SourceError(
                f"{self._origin}: {key} has the shape {tuple(found)}, its config.json says {tuple(expected)}: one of them is of"
                " another model"
            )
        for key, error in sorted(report.conversion_errors.items()):
            raise SourceError(f"{self._origin}: the stored parts of {key} do not fit together ({error})")
        _fill_computed_buffers(model)
        if _EMBEDDING in wanted and _HEAD in wanted:
            model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
        self._check_span(model, wanted)
        return model.eval()

    def stored_bytes(self, span: LayerSpan) -> int:
        """Bytes on the disk that `read` will read, for a progress display."""
        wanted = self._wanted(span)
        return sum(self._names[name].num_bytes for name, target in self._targets.items() if _part(target) in wanted)

    def _match(self) -> dict[str, str]:
        """Checkpoint name to the model's (first) name for it; what the model does not know is left out."""
        model = self._shapes
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        known = model.state_dict()
        targets = {}
        for name in self._names:
            renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
            if renamed not in known:
                renamed, _ = rename_source_key(name, [], [], model.base_model_prefix, known)
            if renamed in known:
                targets[name] = renamed
        return targets

    def _check_complete(self) -> None:
        """Most checkpoints lack a tensor because a file was lost: every layer must have as many tensors as the model says it has."""
        model = self._shapes
        tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
        found = set(self._targets.values())
        split = {entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)}
        fused = {pattern for entry in split if len(entry.target_patterns) > 1 for pattern in entry.target_patterns}
        missing = [
            name for name in model.state_dict() if name not in found and name not in tied and not any(pattern in name for pattern in fused)
        ]
        if missing:
            raise SourceError(_lacks(self._origin, missing))
        if tied and not found & tied:
            raise SourceError(_lacks(self._origin, sorted(tied)))
        self._check_experts()

    def _check_experts(self) -> None:
        """Tensors that are merged into one are all there: each merged tensor of a kind is made of as many."""
        counts = Counter(self._targets.values())
        for kind in {_without_layer(target) for target in counts}:
            of_kind = {target: number for target, number in counts.items() if _without_layer(target) == kind}
            most = max(of_kind.values())
            for target, number in of_kind.items():
                if number < most:
                    raise SourceError(
                        f"{self._origin} holds {number} of the {most} parts of {target}: the checkpoint is incomplete; download it again"
                    )

    def _is_tied(self) -> bool:
        return "lm_head.weight" in self._shapes.all_tied_weights_keys and not {"lm_head.weight", "model.embed_tokens.weight"} <= set(
            self._targets.values()
        )

    def _wanted(self, span: LayerSpan) -> set[str]:
        """Parts (see `_part`) that a span needs."""
        parts = {str(idx) for idx in range(span.start, span.end)}
        is_last = span.end == self._shape.num_layers
        is_tied = "lm_head.weight" in self._shapes.all_tied_weights_keys
        if span.start == 0:
            parts |= {_EMBEDDING}
        if is_last:
            parts |= {_HEAD, _NORM}
        if is_tied and (span.start == 0 or is_last):
            parts |= {_EMBEDDING, _HEAD}  # stored under either name, or under both
        return parts

    def _check_span(self, model: Any, wanted: set[str]) -> None:
        needed = {name: tensor for name, tensor in model.state_dict().items() if _part(name) in wanted}
        missing = sorted(name for name, tensor in needed.items() if tensor.is_meta)
        if missing:
            raise SourceError(_lacks(self._origin, missing))
        for name, tensor in needed.items():
            if not _is_finite(tensor):
                raise SourceError(
                    f"{self._origin} holds infinite or undefined numbers in {name}: the checkpoint is damaged; download it again"
                )


def sizes_of(model: Any, *, is_tied: bool = False) -> WeightSizes:
    """How large each part of a model is; its weights may be on the meta device."""
    return WeightSizes(
        layers=tuple(sum(tensor.numel() for tensor in layer.parameters()) for layer in model.model.layers),
        embedding=model.model.embed_tokens.weight.numel(),
        head=model.lm_head.weight.numel(),
        is_tied=is_tied,
        largest_tensor=max(tensor.numel() for tensor in model.parameters()),
        channel_counts=frozenset(_channel_counts(model)),
    )


def layer_kinds(layers: Iterable[Any]) -> tuple[Hashable, ...]:
    """For each decoder layer (a torch module, its weights may be on the meta device) what tells its kind: the shapes of its weights."""
    return tuple(tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()) for layer in layers)


def _lacks(origin: str, missing: list[str]) -> str:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{origin} lacks the tensor {missing[0]}{more}: the checkpoint is incomplete; download it again"


def _part(name: str) -> str:
    """The part of a model that a tensor belongs to: a layer's index, or the prefix of what is not a layer."""
    match = _LAYER.match(name)
    if match:
        return match.group(1)
    return next((prefix for prefix in (_EMBEDDING, _HEAD, _NORM) if name.startswith(prefix)), name)


def _without_layer(name: str) -> str:
    return _LAYER.sub("", name)


def _fill_computed_buffers(model: Any) -> None:
    """Give rotary frequencies, embedding scales and their like, which no checkpoint stores, the values that transformers computes."""
    modules = dict(model.named_modules())
    owners = set()
    for key, buffer in model.named_non_persistent_buffers():
        owner, _, name = key.rpartition(".")
        modules[owner].register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        owners.add(owner)
    for owner in sorted(owners):
        model._init_weights(modules[owner])  # leaves alone what was read, which is marked


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass and no copy: the extremes are undefined as soon as one number is."""
    if not tensor.numel():
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor.detach()))


def _channel_counts(model: Any) -> Mapping[int, int]:
    """Input sizes of all the matrices of a model, merged experts included."""
    counts: Counter[int] = Counter()
    for module in model.modules():
        if hasattr(module, "in_features"):
            counts[module.in_features] += 1
        else:
            for tensor in module.parameters(recurse=False):
                if tensor.dim() == 3:  # [experts, outputs, inputs]
                    counts[tensor.shape[-1]] += 1
    return counts
