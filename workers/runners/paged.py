"""The paged engine: one KV pool, any mix of slices of any streams in one inference.

The stage graph becomes a paged-attention graph at load; `layout` says how slices become its subsequences, and why so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.kv import BLOCK_TOKENS
from langchain_pshard.core.numerics import Numerics
from workers.blocks import BlockPool, BlockTable
from workers.runners.engine import (
    OV_TYPES,
    Port,
    Request,
    StageModel,
    aligned,
    check_memory,
    input_indices,
)
from workers.runners.layout import ARRAYS, Layout, lay_out
from workers.runners.lm_head import LmHead
from workers.runners.runner import NO_TOKENS, Logits, RunSlice, StreamKey, TokenArray

_WINDOW_INPUT = 10
"""Which input of PagedAttentionExtension is the sliding window, a scalar; 0 means none."""


class PagedRunner:
    """A `Runner` over one paged-attention graph and one InferRequest.

    Invariants: those of `Runner` and `BlockPool`; the pool's memory is finite numbers everywhere (attention may multiply what lies behind a
    stream's end in its last block by zero, and zero times NaN is NaN), so it starts as zeros.
    """

    def __init__(self, stage: StageModel) -> None:
        """Transform, compile and allocate the pool.

        Raises:
            InvalidOptionError: the device refuses the model, or `kv_memory_bytes` holds not even one block.
            CapacityError: the machine has less memory available than the pool needs.
        """
        self._stage = stage
        _transform(stage)
        self._head = LmHead(stage) if stage.is_last else None
        self._compiled = stage.compile_layers()
        self._request: Any = Request(self._compiled, stage.stage_name)
        self._inputs = input_indices(self._compiled)
        self._layout: Layout | None = None  # of the last step, while the request still reads its arrays
        self._hidden: Tensor | None = None  # likewise
        self._pool, self._caches = _allocate(stage, self._compiled)
        for idx, (array, element_type) in self._caches.items():
            self._request.set_input(Port(idx, array, element_type))

    @property
    def numerics(self) -> Numerics:
        return self._stage.numerics

    @property
    def is_rewind_exact(self) -> bool:
        # u8 keys share a scale per channel over a block: a rejected token leaves its mark on it.
        return self._stage.numerics.kv_precision != "u8"

    @property
    def kv_capacity_tokens(self) -> int:
        return self._pool.num_tokens

    @property
    def kv_stream_tokens(self) -> int | None:
        return self._pool.max_stream_tokens

    @property
    def kv_used_tokens(self) -> int:
        return self._pool.used_tokens

    def open(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS, *, shares_generated: bool = False) -> int:
        if not self._stage.has_prefix_cache:
            return self._pool.take(key, num_tokens)
        return self._pool.take(key, num_tokens, prompt, shares_generated=shares_generated and len(prompt) > 0)

    def close_stream(self, key: StreamKey) -> None:
        self._pool.release(key)

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor | Logits:
        assert (hidden is None) == self._stage.is_first, "the first stage embeds tokens, the others take hidden states"
        for piece in slices:
            for source, target in self._pool.begin_write(piece.key, piece.start, len(piece.tokens)):
                self._copy_block(source, target)
        tables = [self._pool.table(piece.key) for piece in slices]
        layout, self._layout = self._layout, None  # until it is over: a failure in between must not leave half of the inputs behind
        memory, self._hidden = self._hidden, None
        inputs: list[Port] = []
        if hidden is not None:
            memory, inputs = self._into_memory(hidden, memory)
        if layout is None or not layout.move(slices, tables):
            layout, unset = _laid_out(slices, tables, layout)
            inputs += self._layout_ports(layout, unset)
        output = self._infer(inputs, layout)
        self._layout, self._hidden = layout, memory
        for piece in slices:
            self._pool.wrote(piece.key, piece.start, piece.tokens, piece.kind)
        return output

    def _infer(self, inputs: Sequence[Port], layout: Layout) -> Tensor | Logits:
        hidden = self._request.infer(inputs, len(layout.tokens))[:, 0]
        return hidden.copy() if self._head is None else self._head.logits(hidden, layout.sampled_rows)

    def _copy_block(self, source: int, target: int) -> None:
        for array, _ in self._caches.values():
            array[target] = array[source]

    def _into_memory(self, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, list[Port]]:
        """The hidden states where the request reads them: copied to where the last ones were, which is quicker than setting an input, or
        in memory of their own when they are more or fewer rows."""
        if memory is not None and memory.shape == hidden.shape:
            memory[...] = hidden
            return memory, []
        boundary = self._stage.numerics.boundary
        memory = aligned(hidden.copy(), boundary)
        return memory, [Port(self._inputs["inputs_embeds"], memory, OV_TYPES[boundary])]

    def _layout_ports(self, layout: Layout, names: Sequence[str]) -> list[Port]:
        ports = [
            Port(self._inputs[name], getattr(layout, name), element_type) for name, element_type in _LAYOUT_TYPES.items() if name in names
        ]
        if self._stage.is_first and "tokens" in names:
            ports.append(Port(self._inputs["input_ids"], layout.tokens, ov.Type.i64))
        return ports

    def close(self) -> None:
        self._layout = self._hidden = None
        self._request = self._compiled = self._head = None
        self._caches = {}


def _laid_out(slices: Sequence[RunSlice], tables: Sequence[BlockTable], old: Layout | None) -> tuple[Layout, Sequence[str]]:
    """The layout of a batch, where the request reads the old one if it may, and the names of what it has to be given anew."""
    layout = lay_out(slices, tables)
    return (layout, ARRAYS) if old is None else layout.over(old)


_LAYOUT_TYPES: dict[str, Any] = {
    "position_ids": ov.Type.i64,
    "past_lens": ov.Type.i32,
    "subsequence_begins": ov.Type.i32,
    "block_indices": ov.Type.i32,
    "block_indices_begins": ov.Type.i32,
    "max_context_len": ov.Type.i32,
}
"""Inputs that every stage has, named as the arrays of a layout are."""


def _transform(stage: StageModel) -> None:
    """Give the stage graph its paged-attention form."""
    model = stage.model
    paged_attention_transformation(model)
    if not stage.is_first:
        # Flattened to [-1, -1]; the last axis is known.
        model.input("inputs_embeds").get_node().set_partial_shape(ov.PartialShape([-1, stage.hidden_size]))
    _set_windows(model, stage)
    model.validate_nodes_and_infer_types()


def _set_windows(model: Any, stage: StageModel) -> None:
    """Write each layer's window into its attention node: the transformation does not find it in our mask and leaves 0."""
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    if len(attentions) != len(stage.windows):
        raise InvalidOptionError(
            f"{stage.stage_name} has {len(attentions)} attention layers that can be paged, {len(stage.windows)} are needed:"
            " run it with --runner stateful"
        )
    for node, window in zip(attentions, stage.windows, strict=True):  # layers follow one another, so graph order is layer order
        node.input(_WINDOW_INPUT).replace_source_output(opset13.constant(window or 0, dtype=np.int32).output(0))


def _allocate(stage: StageModel, compiled: Any) -> tuple[BlockPool, dict[int, tuple[npt.NDArray[Any], Any]]]:
    """The pool, and by input index its caches, [blocks, ...], with their types.

    Shapes and types are those of the compiled model (u8 pads them for its scales).
    """
    ports = {
        idx: (port.get_element_type(), [dim.get_length() for dim in list(port.get_partial_shape())[1:]])
        for idx, port in enumerate(compiled.inputs)
        if any(name.startswith(("key_cache.", "value_cache.")) for name in port.get_names())
    }
    block_bytes = sum(int(np.prod(dims)) * element_type.size for element_type, dims in ports.values())
    num_blocks = stage.kv_memory_bytes // block_bytes
    if num_blocks < 1:
        raise InvalidOptionError(
            f"--kv-memory of {stage.kv_memory_bytes} bytes holds no block of {BLOCK_TOKENS} positions on {stage.stage_name};"
            f" valid: {block_bytes} bytes or more"
        )
    check_memory(num_blocks * block_bytes, stage)
    caches = {
        idx: (np.zeros([num_blocks, *dims], dtype=_STORAGE[element_type.size]), element_type) for idx, (element_type, dims) in ports.items()
    }
    return BlockPool(num_blocks=num_blocks, block_bytes=block_bytes, window=stage.kv_window), caches


_STORAGE: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.float32}
