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


class Request:
    """An InferRequest of a compiled stage or head, run in the caller's own thread: handing an inference to another one takes 0.2 to
    0.5 ms of a step of 12 on one core, caches included.

    With one inference thread the synchronous call swallows exceptions and leaves the output as it was, which a mark in the output tells.
    Where the mark is still there the inference is made again, by the call that does raise: a failed one changed nothing. Where none can be
    put, because the engine will need more memory than it has, that call is the only one.
    """

    def __init__(self, compiled: Any, stage_name: str) -> None:
        """
        Args:
            compiled: ov.CompiledModel with one output.
            stage_name: for messages.
        """
        self.native = compiled.create_infer_request()  # ov.InferRequest
        self._stage_name = stage_name
        self._output: npt.NDArray[Any] | None = None  # where the engine wrote last, and will again unless it needs more
        self._most_rows = 0

    def infer(self, inputs: Sequence[Port], num_rows: int) -> npt.NDArray[Any]:
        """Run to the end, of a graph that gives the same when it is run twice; it reads the inputs where they lie.

        Returns:
            The output, [num_rows, ...], in the engine's own memory: the next inference overwrites it, or gives it back for more. An engine
            whose shapes are dynamic copies what it computed to any other memory (8 rows of 262,144 logits: 0.5 ms of 10).

        Raises:
            InferenceError: the engine failed.
        """
        marked, self._output = self._output, None
        try:
            self._set_inputs(inputs)
            if marked is not None and num_rows <= self._most_rows:
                self._run_marked(marked)
                found = self._memory()
                if found.ctypes.data == marked.ctypes.data and len(found) == num_rows and not _is_marked(found):
                    self._output = found
                    return found
            self._run_in_another_thread()
            found = self._memory()
        except RuntimeError as error:
            raise InferenceError(f"{self._stage_name} failed to infer: {_last_line(error)}") from error
        if len(found) != num_rows or _is_marked(found):
            raise InferenceError(f"{self._stage_name} failed to infer, and the engine does not say why")
        self._output = found
        self._most_rows = max(self._most_rows, num_rows)
        return found

    def infer_into(self, inputs: Sequence[Port], output: Port) -> None:
        """Run to the end, of any graph; it reads the inputs and writes the output where they lie, which no later inference overwrites.

        Raises:
            InferenceError: the engine failed.
        """
        try:
            self._set_inputs(inputs)
            self.native.set_output_tensor(output.idx, share(output.array, output.element_type))
            self._run_marked(output.array)
            if _is_marked(output.array):
                self._run_in_another_thread()
        except RuntimeError as error:
            raise InferenceError(f"{self._stage_name} failed to infer: {_last_line(error)}") from error
        if _is_marked(output.array):
            raise InferenceError(f"{self._stage_name} failed to infer, and the engine does not say why")

    def set_input(self, port: Port) -> None:
        """Give an input memory to read, in this and later inferences; it has to outlive them."""
        self.native.set_input_tensor(port.idx, share(port.array, port.element_type))

    def _set_inputs(self, inputs: Sequence[Port]) -> None:
        for port in inputs:
            self.set_input(port)

    def _run_marked(self, output: npt.NDArray[Any]) -> None:
        _mark_of(output)[0] = _UNWRITTEN
        self.native.infer(share_outputs=True)

    def _run_in_another_thread(self) -> None:
        self.native.start_async()
        self.native.wait()

    def _memory(self) -> npt.NDArray[Any]:
        return cast(npt.NDArray[Any], self.native.get_output_tensor(0).data)


def _mark_of(output: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return output.reshape(-1).view(np.uint32)[:1]


def _is_marked(output: npt.NDArray[Any]) -> bool:
    return bool(_mark_of(output)[0] == _UNWRITTEN)


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
