"""Weight compression that gives a layer the same bytes whatever the split.

Layers, embedding and head are named, and each matrix is stored as its part's mode says, looking at nothing but the matrix. For int4 with an
int8 embedding and head the result is byte for byte what NNCF makes of the unsplit model by default. NNCF asked stage by stage would decide
by position in the graph it sees, and store the last product of every stage in its backup mode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13

from export_tools.quantize import to_int4, to_int8
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
    awq: bool = False
    """Whether layers are scaled before they are compressed (`awq.py`)."""

    @classmethod
    def of(
        cls, layers: WeightMode, *, embedding: WeightMode | None, head: WeightMode | None, group_size: int, awq: bool = False
    ) -> WeightModes:
        """Modes as asked for; None is int8 where the layers are int4, else like the layers.

        Raises:
            InvalidOptionError: a group size that is no power of two from 16, fp32 asked for beside another mode, or awq for layers that
                are not int4.
        """
        if group_size < 16 or group_size & (group_size - 1):
            raise InvalidOptionError(f"group size {group_size} is not usable: choose a power of two from 16, such as 32, 64 or 128")
        default = WeightMode.INT8 if layers is WeightMode.INT4 else layers
        if awq and layers is not WeightMode.INT4:
            raise InvalidOptionError(
                f"--awq goes with --weights int4 only, not with {layers.value}: it evens out groups that share a scale; leave it out"
            )
        modes = cls(layers=layers, embedding=embedding or default, head=head or default, group_size=group_size, awq=awq)
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


def compress_stage(model: ov.Model, modes: WeightModes) -> None:
    """Store the weights of a stage as `modes` says, in place; a model that is fp16 throughout is left to `save_stage`.

    Args:
        model: a stage from `make_stateful`.
        modes: how its parts are stored.
    """
    in_mode = dict.fromkeys(_layer_nodes(model), modes.layers)
    in_mode |= dict.fromkeys(_embedding_nodes(model), modes.embedding) | dict.fromkeys(_head_nodes(model), modes.head)
    if _is_halved_whole(modes):
        return
    made: dict[tuple[str, WeightMode, bool], ov.Output] = {}  # a tied embedding and head share what both store alike
    for node in model.get_ordered_ops():
        mode = in_mode.get(node.get_friendly_name(), WeightMode.FP32)
        if mode is WeightMode.FP32:
            continue
        port = _weight_port(node)
        constant = node.input_value(port).get_node()
        is_turned = _is_turned(node, port)
        key = (constant.get_friendly_name(), mode, is_turned)
        if key not in made:
            weights = constant.get_data()
            made[key] = _stored(np.ascontiguousarray(weights.swapaxes(-1, -2)) if is_turned else weights, key[0], port, mode, modes)
        if is_turned:
            _turn(node, port)
        node.input(port).replace_source_output(made[key])
    model.validate_nodes_and_infer_types()


def _stored(weights: NDArray[np.float32], name: str, port: int, mode: WeightMode, modes: WeightModes) -> ov.Output:
    """Constants and the operations that make float32 of them again: the pattern that the plugins recognize and never compute.

    Args:
        weights: [.., rows, columns]; a row is one output's.
        name: of the constant; those made here are called after it.
        port: the input of the product that they go to, for a name as NNCF gives it.
        mode: int4, int8 or fp16.
        modes: for the group size.
    """
    rows = weights.reshape(-1, weights.shape[-1])
    group = math.gcd(rows.shape[1], modes.group_size)
    if mode is WeightMode.FP16:
        half = opset13.constant(rows.astype(np.float16).reshape(weights.shape))
        half.set_friendly_name(name)
        return opset13.convert(half, "f32").output(0)
    if mode is WeightMode.INT4 and group >= min(_SMALLEST_GROUP, modes.group_size):
        int4 = to_int4(rows, group)
        grouped = [*weights.shape[:-1], weights.shape[-1] // group, group]
        integers = _named_constant(ov.op.Constant(ov.Tensor(int4.packed, ov.Shape(grouped), ov.Type.i4), shared_memory=False), name)
        scales = int4.scales.reshape(*grouped[:-1], 1)
        values = opset13.convert(integers, "f16")
    else:
        int8 = to_int8(rows)
        integers = _named_constant(opset13.constant(int8.values.reshape(weights.shape)), name)
        per_row = [*weights.shape[:-1], 1]
        scales = int8.scales.reshape(per_row)
        zero_points = _named_constant(opset13.constant(int8.zero_points.reshape(per_row)), f"{name}/zero_point")
        values = opset13.subtract(opset13.convert(integers, "f16"), opset13.convert(zero_points, "f16"), name=f"{name}/zero_point/subtract")
    scaled = opset13.multiply(values, _named_constant(opset13.constant(scales), f"{name}/scale"), name=f"{name}/fq_weights_{port}")
    if len(scaled.get_output_shape(0)) != len(weights.shape):
        scaled = opset13.reshape(scaled, np.array(weights.shape, dtype=np.int64), special_zero=False)
    return opset13.convert(scaled, "f32", name=f"{name}/fq_weights_{port}/convert").output(0)


def _named_constant(constant: ov.Node, name: str) -> ov.Node:
    constant.set_friendly_name(name)
    return constant


def save_stage(model: ov.Model, xml: Path, modes: WeightModes) -> None:
    """Write the .xml and .bin of a stage; in every mode but fp16 throughout, what is not compressed (norms, scales) stays as it is.

    Raises:
        UsageError: OpenVINO could not write the files.
    """
    _number_nodes(model)
    try:
        ov.save_model(model, xml, compress_to_fp16=_is_halved_whole(modes))
    except RuntimeError as error:  # all OpenVINO raises, a full disk included
        raise UsageError(f"cannot write {xml}: {error}: free some space there, or choose another path") from error


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


def _layer_nodes(model: ov.Model) -> list[str]:
    """Friendly names of the products with weights inside decoder layers."""
    return [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "MatMul"
        and not node.get_friendly_name().startswith((_HEAD_PREFIX, _EMBEDDING_PREFIX))
        and any(_is_weights(node, port) for port in range(2))
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


def _weight_port(node: ov.Node) -> int:
    """The input of a product or a look-up that is a matrix of weights."""
    return next(port for port in range(2) if _is_weights(node, port))


def _is_weights(node: ov.Node, port: int) -> bool:
    """Whether an input is a matrix and not computed. Conversion has folded every transposition of weights into a constant or a product."""
    source: ov.Node = node.input_value(port).get_node()
    is_constant: bool = source.get_type_name() == "Constant"
    return is_constant and sum(size > 1 for size in source.get_output_shape(0)) >= 2


def _is_turned(node: ov.Node, port: int) -> bool:
    """Whether a product takes its weights as [.., inputs, outputs], other than torch's layers keep them."""
    if node.get_type_name() != "MatMul":
        return False
    attributes = node.get_attributes()
    return bool(attributes["transpose_a"]) if port == 0 else not attributes["transpose_b"]


def _turn(node: ov.Node, port: int) -> None:
    """Let a product take its weights the other way round."""
    node.set_attribute("transpose_a" if port == 0 else "transpose_b", port == 1)
