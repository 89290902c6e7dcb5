"""One stage module to one OpenVINO model: trace, convert, name.

The graph that leaves here is still stateless, past tensors are inputs and outputs; `stateful.py` turns them into state.
"""

from __future__ import annotations

import warnings
from typing import Any

import openvino as ov
import torch
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

from export_tools.architectures import ModelShape
from export_tools.stage_module import StageModule

# Sizes of the traced example: all different and none 1, so that no axis is taken for a constant or a broadcast.
_BATCH, _TOKENS, _PAST = 2, 3, 4


def past_names(layer_idx: int) -> tuple[str, str]:
    """Names of the key and value inputs of a layer."""
    return f"past_key_values.{layer_idx}.key", f"past_key_values.{layer_idx}.value"


def present_names(layer_idx: int) -> tuple[str, str]:
    """Names of the key and value outputs of a layer."""
    return f"present.{layer_idx}.key", f"present.{layer_idx}.value"


def convert_stage(stage: StageModule, shape: ModelShape) -> ov.Model:
    """Trace a stage into an OpenVINO model whose constants share the stage's memory.

    Inputs, in order: `input_ids` or `inputs_embeds`, `attention_mask`, `position_ids`, then past keys and values; outputs: `logits` or
    `last_hidden_state`, then the grown keys and values. Friendly names equal tensor names: openvino_genai and the paged-attention
    transformation look for either.
    """
    with warnings.catch_warnings(), torch.no_grad():
        # Python-side comparisons of shapes inside transformers' layers; the shapes they compare do not vary.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        # OpenVINO's converter traces; it will move on when torch drops tracing, and pyproject pins both.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
        example = _example(stage, shape)
        # Traced once and not, as by default, twice again to compare: a stage has no randomness, and verification compares more.
        traced = TorchScriptPythonDecoder(stage, example_input=example, trace_kwargs={"check_trace": False})
        model = ov.convert_model(traced, example_input=example)
    _name_inputs(model, stage, shape)
    _name_outputs(model, stage)
    model.validate_nodes_and_infer_types()
    model.set_friendly_name(f"layers_{stage.span}")  # its own counts the graphs of the process: the same export twice would differ
    return model


def _example(stage: StageModule, shape: ModelShape) -> tuple[torch.Tensor, ...]:
    ids = torch.zeros(_BATCH, _TOKENS, dtype=torch.int64)
    tokens = ids if stage.is_first else torch.zeros(_BATCH, _TOKENS, shape.hidden_size)
    attention_mask = torch.ones(_BATCH, _PAST + _TOKENS, dtype=torch.int64)
    position_ids = torch.arange(_PAST, _PAST + _TOKENS).expand(_BATCH, _TOKENS)
    past = [torch.zeros(_BATCH, shape.num_kv_heads, _PAST, shape.head_dim) for _ in range(2 * stage.span.num_layers)]
    return (tokens, attention_mask, position_ids, *past)


def _name_inputs(model: ov.Model, stage: StageModule, shape: ModelShape) -> None:
    ids = (["input_ids"], [-1, -1])
    # Two names: the paged-attention transformation knows only `inputs_embeds`; `hidden_states` says what it is.
    hidden = (["inputs_embeds", "hidden_states"], [-1, -1, shape.hidden_size])
    expected = [ids if stage.is_first else hidden, (["attention_mask"], [-1, -1]), (["position_ids"], [-1, -1])]
    for idx in range(stage.span.start, stage.span.end):
        expected += [([name], [-1, shape.num_kv_heads, -1, shape.head_dim]) for name in past_names(idx)]
    parameters = model.get_parameters()
    assert len(parameters) == len(expected), f"traced {len(parameters)} inputs, expected {len(expected)}"
    for parameter, (names, dims) in zip(parameters, expected, strict=True):
        parameter.set_partial_shape(ov.PartialShape(dims))
        _name(parameter, names)


def _name_outputs(model: ov.Model, stage: StageModule) -> None:
    # Not `hidden_states`: a middle stage has that name on its input, and OpenVINO would rename the second one.
    expected = ["logits" if stage.is_last else "last_hidden_state"]
    for idx in range(stage.span.start, stage.span.end):
        expected += present_names(idx)
    results = model.get_results()
    assert len(results) == len(expected), f"traced {len(results)} outputs, expected {len(expected)}"
    for result, name in zip(results, expected, strict=True):
        _name(result, [name])


def _name(node: Any, names: list[str]) -> None:
    node.set_friendly_name(names[0])
    node.output(0).get_tensor().set_names(set(names))
