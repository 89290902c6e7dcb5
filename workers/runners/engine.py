"""What both runners need of OpenVINO: one stage's model, the graph surgery they share, compiling, tensors and one way to infer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import openvino as ov
import psutil

from langchain_pshard.core.codec import NUMPY_DTYPES, Tensor
from langchain_pshard.core.errors import CapacityError, InferenceError, InvalidOptionError
from langchain_pshard.core.kv import widest_window
from langchain_pshard.core.numerics import DType, Numerics

OV_TYPES: Mapping[DType, Any] = {DType.F32: ov.Type.f32, DType.BF16: ov.Type.bf16}
KV_TYPES: Mapping[str, Any] = {"f32": ov.Type.f32, "f16": ov.Type.f16, "u8": ov.Type.u8}


class Port(NamedTuple):
    """An input or output of a step, and the memory it has."""

    idx: int
    array: npt.NDArray[Any]
    element_type: Any  # ov.Type; that of bf16 differs from the array's


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """A stage as it was read from the bundle, and how it is to be run."""

    model: Any  # ov.Model
    core: Any  # ov.Core
    properties: Mapping[str, Any]
    """To compile the layers with."""
    head_properties: Mapping[str, Any]
    """To compile the head with."""
    numerics: Numerics
    stage_name: str
    """For messages."""
    is_first: bool
    is_last: bool
    hidden_size: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Attention window of each layer of this stage."""
    kv_memory_bytes: int
    has_prefix_cache: bool
    num_taken_back: int = 0
    """Positions that a stream may go back behind the start of its last slice; more than its window are then kept for it."""

    @property
    def kv_window(self) -> int | None:
        """Positions before a token that are still needed in the layer that sees most; None when a layer sees all."""
        widest = widest_window(self.windows)
        return None if widest is None else widest + self.num_taken_back

    def empty_output(self, num_rows: int) -> tuple[npt.NDArray[Any], Any]:
        """Memory for the hidden states that the layers put out, [num_rows, hidden], and its type."""
        boundary = self.numerics.boundary
        return np.empty((num_rows, self.hidden_size), dtype=NUMPY_DTYPES[boundary]), OV_TYPES[boundary]

    def compile_layers(self) -> Any:
        """Compile the stage's model in the form a runner gave it.

        Raises:
            InvalidOptionError: the device refuses the model with these options.
        """
        return self._compile(self.model, self.properties)

    def compile_head(self, head: Any) -> Any:
        """Compile the head of this stage's model.

        Raises:
            InvalidOptionError: the device refuses it with these options.
        """
        return self._compile(head, self.head_properties)

    def _compile(self, model: Any, properties: Mapping[str, Any]) -> Any:
        try:
            return self.core.compile_model(model, self.numerics.device, dict(properties))
        except RuntimeError as error:
            raise InvalidOptionError(
                f"{self.stage_name} cannot be compiled for {self.numerics.device} by the {self.numerics.runner} runner with"
                f" {dict(properties)}: {_last_line(error)}"
            ) from error


def share(array: npt.NDArray[Any], element_type: Any) -> Any:
    """An ov.Tensor over the array's own memory; bf16 is held as uint16.

    The tensor keeps the array alive, a request that it was set on does not: the array has to outlive every inference that uses it.
    """
    return ov.Tensor(array, ov.Shape(array.shape), element_type)


def input_indices(compiled: Any) -> dict[str, int]:
    """Input name (every one it has) to the index by which a request sets it: by index is the quickest way."""
    return {name: idx for idx, port in enumerate(compiled.inputs) for name in port.get_names()}


def infer(request: Any, inputs: Sequence[Port], output: Port, stage_name: str) -> None:
    """Run a request to its end; it reads the inputs and writes the output where they lie, which no later step overwrites.

    Raises:
        InferenceError: the engine failed.
    """
    _run(request, inputs, output, len(output.array), stage_name)


def infer_in_place(request: Any, inputs: Sequence[Port], num_rows: int, stage_name: str) -> npt.NDArray[Any]:
    """Run a request to its end; it reads the inputs where they lie.

    Returns:
        The first output, [num_rows, ...], in the engine's own memory: the next inference overwrites it. An engine whose shapes are
        dynamic copies what it computed to any other memory (8 rows of 262,144 logits: 0.5 ms of 10).

    Raises:
        InferenceError: the engine failed.
    """
    return _run(request, inputs, None, num_rows, stage_name)


def _run(request: Any, inputs: Sequence[Port], output: Port | None, num_rows: int, stage_name: str) -> npt.NDArray[Any]:
    """Infer into the output's memory, or the engine's own, and return what is there.

    In the caller's own thread: handing it to another one takes 0.2 to 0.5 ms of a step of 12 on one core, caches included.

    With one inference thread that call swallows exceptions and leaves the output as it was, which a mark in it tells. Where the mark is
    still there, or there was no room for one, or it stood in memory that the engine has given up for more, the inference is made (again)
    by the call that does raise: a failed one changed nothing, and the same one twice gives the same.
    """

    def memory() -> npt.NDArray[Any]:
        return cast(npt.NDArray[Any], request.get_output_tensor(0).data) if output is None else output.array

    try:
        for idx, array, element_type in inputs:
            request.set_input_tensor(idx, share(array, element_type))
        if output is not None:
            request.set_output_tensor(output.idx, share(output.array, output.element_type))
        marked = memory()
        if num_rows and marked.size:
            _mark_of(marked)[0] = _UNWRITTEN
            request.infer(share_outputs=True)
            found = memory()
            if found.ctypes.data == marked.ctypes.data and _is_written(found, num_rows):
                return found
        request.start_async()
        request.wait()
        found = memory()
    except RuntimeError as error:
        raise InferenceError(f"{stage_name} failed to infer: {_last_line(error)}") from error
    if not _is_written(found, num_rows):
        raise InferenceError(f"{stage_name} failed to infer, and the engine does not say why")
    return found


def _mark_of(memory: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return memory.reshape(-1).view(np.uint32)[:1]


def _is_written(memory: npt.NDArray[Any], num_rows: int) -> bool:
    return len(memory) == num_rows and not (num_rows and _mark_of(memory)[0] == _UNWRITTEN)


_UNWRITTEN = np.uint32(0x7FC0_DEAD)
"""Bits that no computation leaves: a NaN with a payload."""


def aligned(hidden: Tensor, boundary: DType) -> Tensor:
    """`hidden` as the engine can read it: contiguous, aligned; copied only when it is not (a frame may start anywhere)."""
    assert hidden.dtype == NUMPY_DTYPES[boundary], f"hidden states in {hidden.dtype}, the boundary carries {boundary.value}"
    return np.require(hidden, requirements=("C", "A"))


def check_memory(num_bytes: int, stage: StageModel) -> None:
    """Refuse a KV budget the machine cannot hold: pages are taken as they are first written, so the allocation itself would not fail.

    Raises:
        CapacityError: with needed and available figures.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise CapacityError(
            f"the KV of {stage.stage_name} needs {num_bytes / 2**20:.0f} MiB, {available / 2**20:.0f} MiB of memory are available:"
            " lower --kv-memory or serve fewer stages here"
        )


def _last_line(error: Exception) -> str:
    """The line of an OpenVINO error that says what happened; the others say where in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
