"""From the times of a few stages to the costs of a model's parts, and from those to a cut and a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_tools.budget import check_measuring
from export_tools.compress import WeightModes
from export_tools.costs import PartBytes, solve, spans_to_measure
from export_tools.export import cutting_costs, lightest_spans
from export_tools.profile import estimated_profile, passed_windows, profile_of_manifest
from export_tools.weights import WeightSizes, layer_kinds
from langchain_pshard.core.bundle import LayerSpan, MachineSpeed, Manifest, ModelCosts, PartCost, StageCost, WeightMode
from langchain_pshard.core.errors import BundleError, UsageError
from langchain_pshard.core.yardstick import (
    PREFILL_ROWS,
    REFERENCE_DECODE_MS,
    REFERENCE_PREFILL_MS,
    YARDSTICK_BYTES,
    Yardstick,
    fast_properties,
    fastest_ms,
    machine_speed,
)
from tests.unit.test_bundle import a_manifest
from workers.shard import Settings, _choose_numerics

MIB = 1 << 20


def measured(**changes: Any) -> ModelCosts:
    fields: dict[str, Any] = {
        "layers": tuple(PartCost(decode_ms=1.0 + idx, prefill_ms=0.1, num_bytes=100) for idx in range(4)),
        "embedding": PartCost(decode_ms=0.25, prefill_ms=0.05, num_bytes=50),
        "head": PartCost(decode_ms=6.0, prefill_ms=0.2, num_bytes=70),
        "step_ms": 0.5,
        "machine": MachineSpeed(decode=2.0, prefill=4.0),
        "cpu": "a processor",
    }
    return ModelCosts(**{**fields, **changes})


def with_costs(costs: ModelCosts) -> Manifest:
    fields = {name: getattr(a_manifest(), name) for name in Manifest.__struct_fields__}
    return Manifest(**{**fields, "costs": costs})


def test_few_stages_are_measured() -> None:
    small = [10 * MIB] * 18
    assert spans_to_measure("a" * 18, small) == (LayerSpan(0, 1), LayerSpan(1, 2), LayerSpan(1, 5), LayerSpan(17, 18))
    large = [200 * MIB] * 18
    assert LayerSpan(1, 3) in spans_to_measure("a" * 18, large)
    assert LayerSpan(1, 5) not in spans_to_measure("a" * 18, large)
    for num_stages, longest in ((1, 4), (6, 3), (9, 2), (18, 2)):  # no longer than the largest stage, as far as it still tells layers apart
        assert LayerSpan(1, 1 + longest) == max(spans_to_measure("a" * 18, small, num_stages), key=lambda span: span.num_layers)
    # a dense first layer, two of another kind, then the rest
    assert spans_to_measure("dxxbbbbb", small) == (
        LayerSpan(0, 1),
        LayerSpan(1, 2),
        LayerSpan(3, 4),
        LayerSpan(3, 7),
        LayerSpan(7, 8),
    )
    assert spans_to_measure("a", small) == (LayerSpan(0, 1),)
    assert spans_to_measure("ab", small) == (LayerSpan(0, 1), LayerSpan(1, 2))


COSTS = st.floats(0.01, 20)


@given(kinds=st.text("abc", min_size=1, max_size=12), step=COSTS, layers=st.tuples(COSTS, COSTS, COSTS), embedding=COSTS, head=COSTS)
def test_the_parts_add_up_to_what_was_measured(
    kinds: str, step: float, layers: tuple[float, float, float], embedding: float, head: float
) -> None:
    cost_of = dict(zip("abc", layers, strict=True))
    spans = spans_to_measure(kinds, [MIB] * len(kinds))

    def time_ms(span: LayerSpan) -> float:
        ends = embedding * (span.start == 0) + head * (span.end == len(kinds))
        return step + sum(cost_of[kind] for kind in kinds[span.start : span.end]) + ends

    found_step, found_layers, found_embedding, found_head = solve(spans, [time_ms(span) for span in spans], kinds)
    for span in spans:
        ends = found_embedding * (span.start == 0) + found_head * (span.end == len(kinds))
        again = found_step + sum(found_layers[kind] for kind in kinds[span.start : span.end]) + ends
        assert again >= time_ms(span) - 1e-6  # what cannot be told apart may come out negative, and is then free
    if kinds == kinds[0] * len(kinds) and len(kinds) >= 4:
        assert found_layers[kinds[0]] == pytest.approx(cost_of[kinds[0]])
        assert (found_step, found_embedding, found_head) == pytest.approx((step, embedding, head))


def test_kinds_are_told_apart_by_their_weights() -> None:
    def layer(*shapes: tuple[int, ...]) -> Any:
        return SimpleNamespace(named_parameters=lambda: [(f"w{idx}", SimpleNamespace(shape=shape)) for idx, shape in enumerate(shapes)])

    first, second, third = layer_kinds([layer((2, 3)), layer((2, 3)), layer((2, 3), (4,))])
    assert first == second != third


def test_a_stage_costs_its_parts() -> None:
    costs = measured()
    assert costs.stage(LayerSpan(0, 4)) == StageCost(decode_ms=16.75, prefill_ms=0.65)
    assert costs.stage(LayerSpan(1, 3)) == StageCost(decode_ms=5.5, prefill_ms=0.2)


def test_bytes_decide_the_cut_where_nothing_was_measured() -> None:
    stored = PartBytes(layers=(5, 5, 5), embedding=90, head=7)
    assert cutting_costs(None, stored) == ([5.0, 5.0, 5.0], 7.0)
    assert cutting_costs(measured(), stored) == ([1.25, 2.0, 3.0, 4.0], 6.0)


def test_measuring_needs_one_sample_in_float32_and_all_of_them_compiled() -> None:
    sizes = WeightSizes(
        layers=(10 * MIB,) * 4, embedding=100 * MIB, head=50 * MIB, is_tied=False, largest_tensor=100 * MIB, channel_counts=frozenset({64})
    )
    samples = (LayerSpan(0, 1), LayerSpan(1, 2), LayerSpan(1, 3), LayerSpan(3, 4))
    # the first sample in float32, half as much again, both ends and five layers in int8 twice, and the libraries
    needed = (110 * 4 * 3 // 2 + 2 * (100 + 50 + 5 * 10) + 700) * MIB
    modes = WeightModes.of(WeightMode.INT8, embedding=None, head=None, group_size=128)
    check_measuring(sizes, samples, modes, needed)
    with pytest.raises(UsageError, match=r"to measure costs: .*--no-measure"):
        check_measuring(sizes, samples, modes, needed - 1)
    assert lightest_spans(sizes, 2) == (LayerSpan(0, 1), LayerSpan(1, 4))


def test_costs_are_part_of_the_manifest_and_must_fit_it() -> None:
    plain, measured_one = a_manifest(), with_costs(measured())
    assert b"costs" not in plain.sealed().to_json()
    again = Manifest.from_json(measured_one.sealed().to_json(), origin="test")
    assert again.costs == measured()
    assert again.fingerprint != plain.computed_fingerprint
    with pytest.raises(BundleError, match="costs of 3 layers for 4 layers"):
        with_costs(measured(layers=measured().layers[:3]))


def test_a_profile_is_that_of_the_reference_machine() -> None:
    profile = profile_of_manifest(with_costs(measured()))
    assert profile.is_measured
    assert profile.layers[1] == PartCost(decode_ms=4.0, prefill_ms=0.4, num_bytes=100)
    assert (profile.head.decode_ms, profile.step_ms) == (12.0, 1.0)
    assert profile.hidden_bytes == 64 * 4
    assert profile.kv_layer_bytes == 2 * 2 * 16 * 2
    assert profile.windows == a_manifest().attention_windows


def test_only_a_paged_stage_gives_kv_back() -> None:
    assert passed_windows([8, None, 4], ["paged", "stateful"]) == (8, None, 4)
    assert passed_windows([8, None, 4], ["stateful"]) == (None, None, None)


def test_an_estimate_counts_bytes() -> None:
    profile = estimated_profile(
        name="m",
        layer_bytes=[YARDSTICK_BYTES],
        embedding_bytes=8,
        head_bytes=2 * YARDSTICK_BYTES,
        weights=WeightMode.INT4,
        ends=WeightMode.INT8,
        hidden_size=64,
        kv_values=64,
        vocab_size=1000,
        windows=[8],
    )
    assert profile.windows == (8,)
    assert profile.sampling_bytes == 2_048_000
    assert not profile.is_measured
    assert profile.layers[0].decode_ms == pytest.approx(REFERENCE_DECODE_MS)
    assert profile.head.decode_ms == pytest.approx(2 * REFERENCE_DECODE_MS)
    assert profile.embedding == PartCost(decode_ms=0.0, prefill_ms=0.0, num_bytes=8)
    assert not profile_of_manifest(a_manifest()).is_measured


def test_the_yardstick_and_a_worker_compile_alike() -> None:
    numerics, properties = _choose_numerics(openvino, a_manifest(), Settings(threads=1))
    assert numerics.name == "fast"
    assert properties == fast_properties(128, threads=1)


def test_the_yardstick_is_the_same_work_every_time() -> None:
    first, second = (Yardstick(openvino, threads=1) for _ in range(2))
    assert first.decode().shape == (1, 1024)
    assert np.isfinite(first.prefill()).all()
    assert np.array_equal(first.decode(), second.decode())
    assert np.array_equal(first.prefill(), second.prefill())


def test_speeds_are_multiples_of_the_reference() -> None:
    assert machine_speed(REFERENCE_DECODE_MS / 2, PREFILL_ROWS * REFERENCE_PREFILL_MS * 4) == MachineSpeed(decode=2.0, prefill=0.25)


def test_actions_take_turns() -> None:
    turns: list[str] = []
    times_ms = fastest_ms([lambda: turns.append("a"), lambda: turns.append("b")], 3)
    assert turns == ["a", "b"] * 3
    assert all(0 <= time_ms < 1000 for time_ms in times_ms)
