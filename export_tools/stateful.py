"""Past keys and values as state of the graph, reordered by `beam_idx`.

The result is what the CPU plugin fuses into one operation per layer with its own KV cache: ReadValue, Gather by `beam_idx`,
Concat, ScaledDotProductAttention, Assign. Without the Gather nothing fuses.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation

from export_tools.architectures import ModelShape
from export_tools.convert import past_names, present_names
from langchain_pshard.core.bundle import LayerSpan


def make_stateful(model: ov.Model, shape: ModelShape, span: LayerSpan) -> None:
    """Turn the past inputs and present outputs of a converted stage into state, in place, and add the input `beam_idx` (i32 [batch])."""
    beam_idx = opset13.parameter([-1], dtype=np.int32, name="beam_idx")
    beam_idx.output(0).get_tensor().set_names({"beam_idx"})
    batch_axis = opset13.constant(0, dtype=np.int64)
    pairs: dict[str, str] = {}
    for idx in range(span.start, span.end):
        for past, present in zip(past_names(idx), present_names(idx), strict=True):
            source = model.input(past)
            consumers = source.get_target_inputs()
            gathered = opset13.gather(source, beam_idx, batch_axis)
            for consumer in consumers:
                consumer.replace_source_output(gathered.output(0))
            pairs[past] = present
    model.add_parameters([beam_idx])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, pairs)
    _start_empty(model, shape)


def _start_empty(model: ov.Model, shape: ModelShape) -> None:
    """Give every ReadValue a first value of no slots for as many rows as the input has.

    The value depends on the input on purpose: without one the CPU plugin does not compile, with a constant one it crashes later.
    """
    rows = opset13.gather(opset13.shape_of(model.input(0), output_type="i64"), opset13.constant([0], dtype=np.int64), opset13.constant(0))
    rest = opset13.constant([shape.num_kv_heads, 0, shape.head_dim], dtype=np.int64)
    empty = opset13.broadcast(opset13.constant(0.0, dtype=np.float32), opset13.concat([rows, rest], axis=0))
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty.output(0)])
    model.validate_nodes_and_infer_types()
