"""The workload by which machines are compared: a few decoder-like layers with int4 weights, the same on every machine.

A layer's cost that the exporter measured on one machine says what it costs on another one only if both have measured the same thing. So
this stands in the core, which exporter and worker share. The core imports no engine: whoever measures hands over the `openvino` module.

The reference is one core of an Intel Xeon (Sapphire Rapids, 2.1 GHz) with OpenVINO 2026.4; a machine of speed 2 needs half its time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import MachineSpeed

REFERENCE_DECODE_MS = 4.0
"""One row through the yardstick on the reference machine."""
REFERENCE_PREFILL_MS = 0.9
"""One row of a chunk of `PREFILL_ROWS` there."""
PREFILL_ROWS = 128

_NUM_LAYERS = 6
_HIDDEN = 1024
_INTERMEDIATE = 3072
_HEADS, _HEAD_DIM, _CONTEXT = 16, 64, 256
_GROUP = 128  # of int4 weights and of quantized activations
_DECODE_ROUNDS, _PREFILL_ROUNDS = 40, 6

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


def measure_speed(ov: ModuleType, *, device: str = "CPU", threads: int | None = None) -> MachineSpeed:
    """Run the yardstick on a device; takes about three seconds.

    The fastest of many rounds counts: what else runs on the machine only ever adds time.

    Args:
        ov: the `openvino` module.
        device: OpenVINO device; one that exists.
        threads: inference threads; None leaves the choice to the device.

    Raises:
        RuntimeError: OpenVINO could not compile or run it there.
    """
    request = _compile(ov, device, fast_properties(_GROUP, threads)).create_infer_request()
    decode_ms = _fastest_ms(ov, request, num_rows=1, rounds=_DECODE_ROUNDS)
    prefill_ms = _fastest_ms(ov, request, num_rows=PREFILL_ROWS, rounds=_PREFILL_ROUNDS) / PREFILL_ROWS
    return MachineSpeed(decode=round(REFERENCE_DECODE_MS / decode_ms, 3), prefill=round(REFERENCE_PREFILL_MS / prefill_ms, 3))


def _fastest_ms(ov: ModuleType, request: Any, *, num_rows: int, rounds: int) -> float:
    hidden = np.random.default_rng(1).standard_normal((num_rows, _HIDDEN)).astype(np.float32)
    tensor = ov.Tensor(hidden)
    request.set_input_tensor(tensor)
    times_s = []
    for _ in range(rounds + 2):  # the first rounds re-pack the weights and warm the caches
        started_s = time.perf_counter()
        request.start_async()
        request.wait()
        times_s.append(time.perf_counter() - started_s)
    return 1e3 * min(times_s[2:])


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
    weights = ov.op.Constant(ov.Tensor(packed, ov.Shape([num_out, num_in // _GROUP, _GROUP]), ov.Type.i4))
    scales = opset.constant((rng.random((num_out, num_in // _GROUP, 1)) * 0.01).astype(np.float16))
    scaled = opset.multiply(opset.convert(weights, np.float16), scales)
    matrix = opset.convert(opset.reshape(scaled, [num_out, num_in], special_zero=False), np.float32)
    return opset.matmul(hidden, matrix, transpose_a=False, transpose_b=True)


def _random(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)
