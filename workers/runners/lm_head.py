"""The head: the product that makes logits of a model's last hidden states, cut off the last stage and compiled by itself.

So only rows that are sampled go through it, those of all streams at once whatever engine the layers run in; and it may quantize activations
in larger groups than the layers, whose int4 weights bound theirs. Every decoded token reads its weights whole (63 % of those of
Gemma 3 270M), and with several rows what it computes for each of them shows beside that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from langchain_pshard.core.errors import BundleError, InferenceError
from workers.runners.engine import Port, Request, StageModel
from workers.runners.runner import NOT_FINITE, Logits

_AFTER_HEAD = frozenset({"Convert", "Multiply", "Divide", "Tanh"})
"""What may stand between the head's matrix product and the output: casts, Granite's scale, Gemma's soft-cap."""


class LmHead:
    """One compiled model and one request: used by one thread."""

    def __init__(self, stage: StageModel) -> None:
        """Take the head out of `stage.model`, which ends in hidden states from now on, and compile it.

        Raises:
            BundleError: the graph does not end in a matrix product.
            InvalidOptionError: the device refuses the head.
        """
        self._stage = stage
        self._request = Request(stage.compile_head(cut_off(stage.model)), stage.stage_name)
        self._rows: npt.NDArray[np.float32] = np.zeros((0, stage.hidden_size), dtype=np.float32)  # what the request reads

    def logits(self, hidden: npt.NDArray[np.float32], rows: npt.NDArray[np.int32]) -> Logits:
        """Logits of some rows of hidden states.

        Args:
            hidden: [tokens, hidden] float32.
            rows: [n], which of them.

        Returns:
            [n, vocab] in the engine's own memory, which is gone with the next call.

        Raises:
            InferenceError: the engine failed; or a row has what is no finite number, of which a product that quantizes makes one.
        """
        if not len(rows):  # of all chunks of a prompt but its last
            return np.zeros((0, self._stage.vocab_size), dtype=np.float32)
        taken = hidden[rows]
        if not np.isfinite(taken).all():
            raise InferenceError(f"the hidden states at the end of {self._stage.stage_name} are {NOT_FINITE}")
        if len(rows) == len(self._rows):
            self._rows[...] = taken  # quicker than setting an input
            return self._request.infer([], len(rows))[:, 0]
        self._rows = taken[:0]  # nothing, until it is certain what the request reads
        logits = self._request.infer([Port(0, taken[:, None], ov.Type.f32)], len(rows))
        self._rows = taken
        return logits[:, 0]


def cut_off(model: Any) -> Any:
    """Cut a last stage in front of its head's matrix product, which treats every row alone.

    Args:
        model: ov.Model, changed in place: it ends in the hidden states that the head takes.

    Returns:
        The head, an ov.Model from [n, 1, hidden] to [n, 1, vocab], both float32: what follows the product may count on three axes.

    Raises:
        BundleError: the graph does not end in a matrix product.
    """
    result = model.get_results()[0]
    node = result.input_value(0).get_node()
    while node.get_type_name() in _AFTER_HEAD:
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        raise BundleError(f"the last stage ends in {node.get_type_name()}, not in the head's matrix product: export the model again")
    hidden = node.input_value(0)
    rows = opset13.parameter([-1, 1, hidden.get_partial_shape()[-1].get_length()], dtype=np.float32, name="hidden")
    node.input(0).replace_source_output(rows.output(0))
    head = ov.Model([opset13.result(result.input_value(0))], [rows], "lm_head")
    model.remove_result(result)
    model.add_results([opset13.result(hidden)])
    model.validate_nodes_and_infer_types()
    return head
