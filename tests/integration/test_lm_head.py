"""The head by itself, on graphs that end as stages do: which rows go through it, that a row's bits are its own, and what is refused."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from export_tools.quantize import to_int8
from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import BundleError, InferenceError
from langchain_pshard.core.messages import SliceKind
from langchain_pshard.core.yardstick import fast_properties
from tests.support.bundles import TinyBundle
from tests.support.fake_stages import NUMERICS
from tests.support.runners import piece, running_chain
from tests.unit.test_bundle import a_manifest
from workers.runners.engine import Request, StageModel
from workers.runners.lm_head import LmHead, cut_off
from workers.shard import Settings, head_activation_group_size

VOCAB = 300
CAP = 30.0
Float32s = npt.NDArray[np.float32]


def all_of(hidden: Float32s) -> npt.NDArray[np.int32]:
    return np.arange(len(hidden), dtype=np.int32)


def ending_in_head(weights: Float32s, *, soft_cap: bool = False) -> Any:
    """A stage of no layer whose int8 head follows, and a soft-cap behind it; constants have the three axes of exported ones."""
    hidden = opset13.parameter([-1, 1, weights.shape[1]], dtype=np.float32, name="inputs_embeds")
    stored = to_int8(weights)
    matrix: Any = opset13.subtract(opset13.convert(stored.values, np.float16), opset13.convert(stored.zero_points, np.float16))
    matrix = opset13.convert(opset13.multiply(matrix, opset13.constant(stored.scales)), np.float32)
    logits = opset13.matmul(opset13.relu(hidden), matrix, transpose_a=False, transpose_b=True)
    if soft_cap:
        cap = opset13.constant(np.full((1, 1, 1), CAP, dtype=np.float32))
        logits = opset13.multiply(opset13.tanh(opset13.divide(logits, cap)), cap)
    return ov.Model([opset13.result(logits)], [hidden], "stage")


def a_stage(model: Any, hidden_size: int, *, threads: int = 1) -> StageModel:
    group_size = head_activation_group_size(msgspec.structs.replace(a_manifest(), hidden_size=hidden_size, activation_group_size=32))
    return StageModel(
        model=model,
        core=ov.Core(),
        properties={},
        head_properties=MappingProxyType(fast_properties(group_size, threads)),
        numerics=msgspec.structs.replace(NUMERICS, device="CPU"),
        stage_name="stage 0",
        is_first=False,
        is_last=True,
        hidden_size=hidden_size,
        vocab_size=VOCAB,
        num_kv_heads=1,
        head_dim=1,
        windows=(),
        kv_memory_bytes=1,
        has_prefix_cache=False,
    )


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def random(rng: np.random.Generator, *shape: int) -> Float32s:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("hidden_size", [64, 96, 160, 640, 704, 1152, 2048])
def test_a_row_has_the_same_bits_in_any_company(rng: np.random.Generator, hidden_size: int, threads: int) -> None:
    head = LmHead(a_stage(ending_in_head(random(rng, VOCAB, hidden_size)), hidden_size, threads=threads))
    hidden = random(rng, 40, hidden_size) * random(rng, hidden_size) * 4  # channels of unlike size, as models have them
    alone = np.concatenate([head.logits(hidden, np.array([row], dtype=np.int32)).copy() for row in range(len(hidden))])
    for num_rows in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40):
        assert np.array_equal(head.logits(hidden[:num_rows], all_of(hidden[:num_rows])), alone[:num_rows])


def test_rows_are_picked_in_any_order_and_none_costs_nothing(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    head = LmHead(a_stage(ending_in_head(random(rng, VOCAB, 64)), 64))
    hidden = random(rng, 10, 64)
    every = head.logits(hidden, all_of(hidden)).copy()
    for rows in ([3], [9], [0, 9], [9, 0], [2, 4, 6], list(range(10)), [1]):
        assert np.array_equal(head.logits(hidden, np.array(rows, dtype=np.int32)), every[rows])
    monkeypatch.setattr(Request, "infer", None)
    assert head.logits(hidden, np.zeros(0, dtype=np.int32)).shape == (0, VOCAB)


def test_activations_of_the_head_are_quantized(rng: np.random.Generator) -> None:
    """Products left in float32 would be a hundred times as near, and not the same bits in every company."""
    weights = random(rng, VOCAB, 640)
    stored = to_int8(weights)
    matrix = (stored.values.astype(np.float32) - stored.zero_points) * stored.scales.astype(np.float32)
    hidden = random(rng, 20, 640)
    logits = LmHead(a_stage(ending_in_head(weights), 640)).logits(hidden, all_of(hidden))
    error = np.abs(logits - hidden @ matrix.T).std() / logits.std()
    assert 1e-3 < error < 1e-2


def test_what_follows_the_product_goes_with_the_head(rng: np.random.Generator) -> None:
    weights, hidden = random(rng, VOCAB, 64), random(rng, 6, 64) * 9
    plain = LmHead(a_stage(ending_in_head(weights), 64)).logits(hidden, all_of(hidden))
    capped = LmHead(a_stage(ending_in_head(weights, soft_cap=True), 64)).logits(hidden, all_of(hidden))
    assert np.abs(capped).max() <= CAP < np.abs(plain).max()
    assert np.allclose(capped, CAP * np.tanh(plain / CAP), atol=1e-4)


def test_the_stage_ends_in_what_the_head_takes(rng: np.random.Generator) -> None:
    model = ending_in_head(random(rng, VOCAB, 64))
    head = cut_off(model)
    assert [node.get_type_name() for node in model.get_ordered_ops()] == ["Parameter", "Relu", "Result"]
    assert list(head.input(0).get_partial_shape())[-1].get_length() == 64
    assert list(head.output(0).get_partial_shape())[-1].get_length() == VOCAB
    with pytest.raises(BundleError, match="ends in Relu, not in the head's matrix product: export the model again"):
        cut_off(model)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_finite_number_is_not_made_one(rng: np.random.Generator, number: float) -> None:
    """Quantizing does: a NaN comes out of the product as any number."""
    head = LmHead(a_stage(ending_in_head(random(rng, VOCAB, 64)), 64))
    hidden = random(rng, 3, 64)
    expected = head.logits(hidden, all_of(hidden)).copy()
    hidden[1, 40] = number
    with pytest.raises(InferenceError, match="hidden states at the end of stage 0 are not finite: the weights are damaged"):
        head.logits(hidden, all_of(hidden))
    for row in (0, 2):
        assert np.array_equal(head.logits(hidden, np.array([row], dtype=np.int32))[0], expected[row])


def test_a_head_that_fails_says_so_and_goes_on(rng: np.random.Generator) -> None:
    head = LmHead(a_stage(ending_in_head(random(rng, VOCAB, 64)), 64))
    hidden = random(rng, 4, 64)
    expected = head.logits(hidden, all_of(hidden)).copy()
    for rows in ([0, 1], [0, 1], [0, 1, 2, 3]):
        with pytest.raises(InferenceError, match="stage 0 failed to infer"):
            head.logits(random(rng, 5, 65)[: len(rows) + 1], np.array([*rows, len(rows)], dtype=np.int32))
    for num_rows in (2, 3, 4):
        assert np.array_equal(head.logits(hidden[:num_rows], all_of(hidden[:num_rows])), expected[:num_rows])


@pytest.mark.parametrize("runner", ["paged", "stateful"])
def test_streams_of_a_batch_share_one_run_of_the_head(tiny_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """Under the stateful runner too, which runs their layers one stream after another."""
    num_rows: list[int] = []
    logits_of = LmHead.logits

    def counted(head: LmHead, hidden: Float32s, rows: npt.NDArray[np.int32]) -> Any:
        num_rows.append(len(rows))
        return logits_of(head, hidden, rows)

    bundle = tiny_bundle("llama", weights=WeightMode.INT4, num_stages=1)
    with running_chain(bundle, Settings(runner=runner, threads=1, kv_memory_bytes=1 << 24)) as chain:
        for stream in range(3):
            chain.open(stream, 20)
            chain.run(piece(stream, 0, [5, 6, 7, 8 + stream], SliceKind.PREFILL, num_sampled=0))
        slices = [
            piece(0, 4, [9], SliceKind.ROWS),
            piece(1, 4, [9, 10], SliceKind.ROWS, num_sampled=2),
            piece(2, 4, [9, 10, 11], SliceKind.PREFILL, num_sampled=0),
        ]
        alone = np.concatenate([chain.run(one) for one in slices])
        monkeypatch.setattr(LmHead, "logits", counted)
        assert np.array_equal(chain.run(*slices), alone)
    assert num_rows == [3]
