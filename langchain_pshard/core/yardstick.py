"""The workload by which machines are compared: a few decoder-like layers with int4 weights, the same on every machine.

A layer's cost that the exporter measured on one machine says what it costs on another one only if both have measured the same thing. So
this stands in the core, which exporter and worker share. The core imports no engine: whoever measures hands over the `openvino` module.

The reference is one core of an Intel Xeon (Sapphire Rapids, 2.1 GHz) with OpenVINO 2026.4; a machine of speed 2 needs half its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import MachineSpeed

REFERENCE_DECODE_MS = 2.8
"""One row through the yardstick on the reference machine."""
REFERENCE_PREFILL_MS = 0.58
"""One row of a chunk of `PREFILL_ROWS` there."""
PREFILL_ROWS = 128

_NUM_LAYERS = 6
_HIDDEN = 1024
_INTERMEDIATE = 3072
_HEADS, _HEAD_DIM, _CONTEXT = 16, 64, 256
_GROUP = 128  # of int4 weights and of quantized activations
_DECODE_ROUNDS, _PREFILL_ROUNDS = 100, 8

YARDSTICK_PARAMETERS = _NUM_LAYERS * (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _INTERMEDIATE)
YARDSTICK_BYTES = YARDSTICK_PARAMETERS // 2
"""What a decoded row reads, scales aside: 41 MB, more than most caches hold."""

Floats = npt.NDArray[np.float32]


def fast_properties(activation_group_size: int, threads: int | None) -> dict[str, Any]:
    """Compile properties of `fast` numerics (docs/decisions/0005-fast-numerics.md); `threads` None leaves the choice to the device."""
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": activation_group_size,
        "EXECUTION_MODE_HINT": "PERFORMANCE",
    }
    return properties if threads is None else {**properties, "INFERENCE_NUM_THREADS": threads}


class Yardstick:
    """The workload, compiled for one device; its first runs re-pack the weights."""

    def __init__(self, ov: ModuleType, *, device: str = "CPU", threads: int | None = None) -> None:
        """Compile it, in about a second.

        Args:
            ov: the `openvino` module.
            device: OpenVINO device; one that exists.
            threads: inference threads; None leaves the choice to the device.

        Raises:
            RuntimeError: OpenVINO could not compile it for the device.
        """
        self._request = _compile(ov, device, fast_properties(_GROUP, threads)).create_infer_request()
        rng = np.random.default_rng(1)
        self._inputs = {num_rows: ov.Tensor(_random(rng, num_rows, _HIDDEN)) for num_rows in (1, PREFILL_ROWS)}
        self.prefill()
        self.decode()

    def decode(self) -> Floats:
        """One row; returns its output [1, hidden]."""
        return self._run(1)

    def prefill(self) -> Floats:
        """A chunk of `PREFILL_ROWS` rows; returns its output."""
        return self._run(PREFILL_ROWS)

    def _run(self, num_rows: int) -> Floats:
        self._request.set_input_tensor(self._inputs[num_rows])
        self._request.start_async()  # with one thread the synchronous call swallows exceptions
        self._request.wait()
        output: Floats = self._request.get_output_tensor().data
        return output.copy()  # the next run overwrites it


def machine_speed(decode_ms: float, chunk_ms: float) -> MachineSpeed:
    """The speed of a machine that needs so long for `Yardstick.decode` and `Yardstick.prefill`. Pure."""
    prefill_ms = chunk_ms / PREFILL_ROWS
    return MachineSpeed(decode=round(REFERENCE_DECODE_MS / decode_ms, 3), prefill=round(REFERENCE_PREFILL_MS / prefill_ms, 3))


def measure_speed(yardstick: Yardstick) -> MachineSpeed:
    """Time the yardstick; takes about two seconds."""
    (decode_ms,) = fastest_ms([yardstick.decode], _DECODE_ROUNDS)
    (chunk_ms,) = fastest_ms([yardstick.prefill], _PREFILL_ROUNDS)
    return machine_speed(decode_ms, chunk_ms)


def fastest_ms(actions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The shortest time of each action over `rounds` turns.

    In turns, so that a change of the machine's mood hits all alike and each finds the caches full of what the others use, as a layer does
    in a whole model. The shortest, because what else runs on the machine only ever adds time.
    """
    times_ms = [[0.0] * rounds for _ in actions]
    for turn in range(rounds):
        for idx, action in enumerate(actions):
            started_s = time.perf_counter()
            action()
            times_ms[idx][turn] = 1e3 * (time.perf_counter() - started_s)
    return [min(times) for times in times_ms]


def _compile(ov: ModuleType, device: str, properties: Mapping[str, Any]) -> Any:
    opset: Any = ov.opset13
    rng = np.random.default_rng(0)
    hidden = opset.parameter([-1, _HIDDEN], dtype=np.float32, name="hidden")  # [rows, hidden]
    state: Any = hidden
    for _ in range(_NUM_LAYERS):
        state = opset.add(state, _attention(ov, opset, rng, state))
        state = opset.add(state, _feed_forward(ov, opset, rng, state))
    model = ov.Model([opset.result(state)], [hidden], "yardstick")
    return ov.Core().compile_model(model, device, dict(properties))


def _attention(ov: ModuleType, opset: Any, rng: np.random.Generator, hidden: Any) -> Any:
    """Every row attends to the same stored context, as decode rows do to their own."""
    query = opset.reshape(_project(ov, opset, rng, hidden, _HIDDEN), [1, -1, _HEADS, _HEAD_DIM], special_zero=False)
    query = opset.transpose(query, [0, 2, 1, 3])  # [1, heads, rows, head_dim]
    stored = [opset.constant(_random(rng, 1, _HEADS, _CONTEXT, _HEAD_DIM)) for _ in range(2)]
    # Keys and values of the row itself: computed for their cost, added in so that they are not optimized away.
    own = opset.add(_project(ov, opset, rng, hidden, _HIDDEN), _project(ov, opset, rng, hidden, _HIDDEN))
    mixed = opset.scaled_dot_product_attention(query, stored[0], stored[1])
    joined = opset.reshape(opset.transpose(mixed, [0, 2, 1, 3]), [-1, _HIDDEN], special_zero=False)
    return _project(ov, opset, rng, opset.add(joined, own), _HIDDEN)


def _feed_forward(ov: ModuleType, opset: Any, rng: np.random.Generator, hidden: Any) -> Any:
    gated = opset.multiply(opset.swish(_project(ov, opset, rng, hidden, _INTERMEDIATE)), _project(ov, opset, rng, hidden, _INTERMEDIATE))
    return opset.tanh(_project(ov, opset, rng, gated, _HIDDEN, num_in=_INTERMEDIATE))  # tanh keeps the numbers small


def _project(ov: ModuleType, opset: Any, rng: np.random.Generator, hidden: Any, num_out: int, *, num_in: int = _HIDDEN) -> Any:
    """A product with random int4 weights, one scale per group, in the form the exporter's compression has."""
    packed = rng.integers(0, 256, size=(num_out, num_in // _GROUP, _GROUP // 2), dtype=np.uint8)
    tensor = ov.Tensor(packed, ov.Shape([num_out, num_in // _GROUP, _GROUP]), ov.Type.i4)
    weights = ov.op.Constant(tensor, shared_memory=False)  # a copy: the tensor is a view on an array that is about to go
    scales = opset.constant((rng.random((num_out, num_in // _GROUP, 1)) * 0.01).astype(np.float16))
    scaled = opset.multiply(opset.convert(weights, np.float16), scales)
    matrix = opset.convert(opset.reshape(scaled, [num_out, num_in], special_zero=False), np.float32)
    return opset.matmul(hidden, matrix, transpose_a=False, transpose_b=True)


def _random(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)
