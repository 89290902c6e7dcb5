"""Weight compression that gives a layer the same bytes whatever the split.

NNCF decides by position in the graph it sees: left alone it gives the last product and the embedding of every model it is handed the
backup mode, so the last down-projection of a middle stage would be stored otherwise than inside the unsplit model. Here nothing
is left to position: layers, embedding and head are named, and each pass compresses exactly what is in its mode. For int4 with an int8
embedding and head this is byte for byte what NNCF makes of the unsplit model by default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nncf
import numpy as np
import openvino as ov
from openvino import opset13

from export_tools.quiet import quiet_nncf
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import InvalidOptionError, UsageError

# Names of torch modules inside StageModule, as the converter carries them into node names.
_EMBEDDING_PREFIX = "__module.embed_tokens/"
_HEAD_PREFIX = "__module.lm_head/"
# Group sizes are halved down to this where the asked one does not divide a channel count; below it a weight becomes int8.
_SMALLEST_GROUP = 32
_LARGEST_ACTIVATION_GROUP = 128  # 256 was measured not to be exact
_UNNAMED = re.compile(r"[A-Za-z0-9]+_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightModes:
    """How the parts of a model are stored."""

    layers: WeightMode
    embedding: WeightMode
    head: WeightMode
    group_size: int
    """int4 weights that share one scale, where it divides the channel count."""

    @classmethod
    def of(cls, layers: WeightMode, *, embedding: WeightMode | None, head: WeightMode | None, group_size: int) -> WeightModes:
        """Modes as asked for; None is int8 where the layers are int4, else like the layers.

        Raises:
            InvalidOptionError: a group size that is no power of two from 16, or fp32 asked for beside another mode.
        """
        if group_size < 16 or group_size & (group_size - 1):
            raise InvalidOptionError(f"group size {group_size} is not usable: choose a power of two from 16, such as 32, 64 or 128")
        default = WeightMode.INT8 if layers is WeightMode.INT4 else layers
        modes = cls(layers=layers, embedding=embedding or default, head=head or default, group_size=group_size)
        for name, mode in (("embedding", modes.embedding), ("head", modes.head)):
            if mode is WeightMode.FP32 and layers is not WeightMode.FP32:
                raise InvalidOptionError(f"--{name} fp32 goes with --weights fp32 only, not with {layers.value}: choose int4, int8 or fp16")
        return modes

    @property
    def has_int4(self) -> bool:
        return WeightMode.INT4 in (self.layers, self.embedding, self.head)

    def part_bytes(self, numbers: int, mode: WeightMode) -> float:
        """Bytes of so many weights in `mode`, with their scales: one of 16 bits a group of int4."""
        per_number = mode.bits / 8 + (2 / self.group_size if mode is WeightMode.INT4 else 0)
        return numbers * per_number


def activation_group_size(channel_counts: Iterable[int], modes: WeightModes) -> int:
    """Values of an activation that may share a scale at run time, so that groups of activations never straddle groups of weights. Pure.

    The CPU plugin quantizes a product's activations only where the group divides its input; a product left out would be summed in float32,
    whose last bits depend on the number of rows (docs/decisions/0005-fast-numerics.md).

    Args:
        channel_counts: input sizes of all matrices.
        modes: how they are stored.

    Returns:
        128, 64 or 32; 0 when the layers are not compressed or some matrix takes none of them.
    """
    if modes.layers not in (WeightMode.INT4, WeightMode.INT8):
        return 0
    largest = min(modes.group_size, _LARGEST_ACTIVATION_GROUP) if modes.has_int4 else _LARGEST_ACTIVATION_GROUP
    group = math.gcd(largest, *channel_counts)
    return group if group >= _SMALLEST_GROUP else 0


def compress_stage(model: ov.Model, modes: WeightModes) -> ov.Model:
    """Store the weights of a stage as `modes` says; a model that is fp16 throughout is left to `save_stage`.

    Args:
        model: a stage from `make_stateful`.
        modes: how its parts are stored.
    """
    layers = _layer_nodes(model)
    ends = dict.fromkeys(_embedding_nodes(model), modes.embedding) | dict.fromkeys(_head_nodes(model), modes.head)
    in_mode = {**dict.fromkeys(layers, modes.layers), **ends}
    with quiet_nncf():
        if WeightMode.INT4 in in_mode.values():
            model = nncf.compress_weights(
                model,
                mode=nncf.CompressWeightsMode.INT4_SYM,
                ratio=1.0,
                group_size=modes.group_size,
                all_layers=True,
                ignored_scope=_all_but(WeightMode.INT4, in_mode),
                advanced_parameters=nncf.AdvancedCompressionParameters(
                    group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST,
                    min_adjusted_group_size=min(_SMALLEST_GROUP, modes.group_size),
                ),
            )
        if WeightMode.INT8 in in_mode.values():
            compressed = {name for name, mode in in_mode.items() if mode is WeightMode.INT4}
            rest = {name: mode for name, mode in in_mode.items() if name not in compressed}
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=_all_but(WeightMode.INT8, rest))
    if not _is_halved_whole(modes):
        _halve(model, {name for name, mode in in_mode.items() if mode is WeightMode.FP16})
    return model


def save_stage(model: ov.Model, xml: Path, modes: WeightModes) -> None:
    """Write the .xml and .bin of a stage; in every mode but fp16 throughout, what is not compressed (norms, scales) stays as it is.

    Raises:
        UsageError: OpenVINO could not write the files.
    """
    _number_nodes(model)
    try:
        ov.save_model(model, xml, compress_to_fp16=_is_halved_whole(modes))
    except RuntimeError as error:  # all OpenVINO raises, a full disk included
        raise UsageError(f"cannot write {xml}: {error}; is the disk full?") from error


def _is_halved_whole(modes: WeightModes) -> bool:
    """Whether OpenVINO halves the whole graph while it writes; it leaves graphs alone that NNCF has touched."""
    return modes.layers is modes.embedding is modes.head is WeightMode.FP16


def _number_nodes(model: ov.Model) -> None:
    """Number nodes that nobody named by their order in the graph.

    OpenVINO numbers them by a counter of the process, so that an export's bytes would depend on what the process did before.
    """
    for number, node in enumerate(model.get_ordered_ops()):
        if _UNNAMED.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_n{number}")


def _all_but(mode: WeightMode, in_mode: dict[str, WeightMode]) -> nncf.IgnoredScope | None:
    """What a pass for `mode` must leave alone."""
    others = [name for name, other in in_mode.items() if other is not mode]
    return nncf.IgnoredScope(names=others) if others else None


def _layer_nodes(model: ov.Model) -> list[str]:
    """Friendly names of the products with weights inside decoder layers."""
    return [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "MatMul"
        and not node.get_friendly_name().startswith((_HEAD_PREFIX, _EMBEDDING_PREFIX))
        and any(_weight_constant(node, port) is not None for port in range(2))
    ]


def _embedding_nodes(model: ov.Model) -> list[str]:
    found = _named(model, "Gather", _EMBEDDING_PREFIX)
    assert len(found) == ("input_ids" in model.input(0).get_names()), f"embedding not found by name: {found}"
    return found


def _head_nodes(model: ov.Model) -> list[str]:
    found = _named(model, "MatMul", _HEAD_PREFIX)
    assert len(found) == ("logits" in model.output(0).get_names()), f"head not found by name: {found}"
    return found


def _named(model: ov.Model, kind: str, prefix: str) -> list[str]:
    ops = model.get_ordered_ops()
    return [node.get_friendly_name() for node in ops if node.get_type_name() == kind and node.get_friendly_name().startswith(prefix)]


def _weight_constant(node: ov.Node, port: int) -> ov.Node | None:
    """The matrix behind an input of a product, through the conversions that may stand between; None when it is computed."""
    source = node.input_value(port).get_node()
    while source.get_type_name() in ("Convert", "Transpose"):
        source = source.input_value(0).get_node()
    is_matrix = source.get_type_name() == "Constant" and sum(size > 1 for size in source.get_output_shape(0)) >= 2
    return source if is_matrix else None


def _halve(model: ov.Model, names: set[str]) -> None:
    """Store the weights of single nodes as float16."""
    for node in model.get_ordered_ops():
        if node.get_friendly_name() not in names:
            continue
        for port in range(2):
            constant = _weight_constant(node, port)
            if constant is None or constant.get_element_type() != ov.Type.f32:
                continue
            half = opset13.constant(constant.get_data().astype(np.float16))
            half.set_friendly_name(constant.get_friendly_name())
            restored = opset13.convert(half, "f32")
            for consumer in constant.output(0).get_target_inputs():
                if consumer.get_node().get_friendly_name() in names or consumer.get_node().get_type_name() in ("Convert", "Transpose"):
                    consumer.replace_source_output(restored.output(0))
    model.validate_nodes_and_infer_types()
