"""The plan of a fleet is the best there is: against every chain of every small fleet."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

from export_tools.placement import (
    MAX_NODES,
    WORKER_BYTES,
    Limit,
    LinkEnd,
    ModelProfile,
    Node,
    NodeCost,
    Users,
    plan_fleet,
)
from langchain_pshard.core.bundle import LayerSpan, PartCost
from langchain_pshard.core.errors import InvalidOptionError, NoPlanError

MIB = 1 << 20
Chain = tuple[tuple[Node, LayerSpan], ...]


def part(decode_ms: float, mib: int) -> PartCost:
    return PartCost(decode_ms=decode_ms, prefill_ms=decode_ms / 10, num_bytes=mib * MIB)


def profile(layers: list[PartCost], *, head: PartCost, embedding: PartCost | None = None) -> ModelProfile:
    return ModelProfile(
        name="tiny",
        layers=tuple(layers),
        embedding=embedding or part(0.0, 10),
        head=head,
        step_ms=0.1,
        hidden_bytes=4096,
        kv_layer_bytes=1024,
        sampling_bytes=0,
        windows=(None,) * len(layers),
        is_measured=True,
    )


def node(name: str, mib: int = 100_000, speed: float = 1.0, *, latency_ms: float = 0.1, bandwidth_mbit: float = 1000) -> Node:
    return Node(
        name=name,
        memory_bytes=mib * MIB + WORKER_BYTES,
        decode_speed=speed,
        prefill_speed=speed,
        link=LinkEnd(latency_ms=latency_ms, bandwidth_mbit=bandwidth_mbit),
    )


CLIENT = LinkEnd(latency_ms=0.05)
EVEN = profile([part(1.0, 100)] * 6, head=part(3.0, 100))


def chains(num_layers: int, nodes: list[Node]) -> Iterator[Chain]:
    for count in range(1, min(len(nodes), num_layers) + 1):
        for order in permutations(nodes, count):
            for cut in combinations(range(1, num_layers), count - 1):
                spans = [LayerSpan(start, end) for start, end in pairwise((0, *cut, num_layers))]
                yield tuple(zip(order, spans, strict=True))


def kv_positions(model: ModelProfile, span: LayerSpan, context: int, streams: int | None) -> int:
    windows = model.windows[span.start : span.end]
    if None in windows or streams is None:
        return context
    seen = max(window or 0 for window in windows) - 1 + 512  # before a slice, and the longest slice
    return min(context, streams * (math.ceil(seen / 32) + 1) * 32)


def stage_ms(model: ModelProfile, where: Node, span: LayerSpan, context: int, streams: int | None) -> float | None:
    """Straight from the definition; None where it does not fit."""
    parts = [*model.layers[span.start : span.end]]
    parts += [model.embedding] if span.start == 0 else []
    parts += [model.head] if span.end == len(model.layers) else []
    kv = span.num_layers * kv_positions(model, span, context, streams) * model.kv_layer_bytes
    needed = sum(each.num_bytes for each in parts) + kv + WORKER_BYTES + (model.sampling_bytes if span.end == len(model.layers) else 0)
    if needed > where.memory_bytes:
        return None
    return (model.step_ms + sum(each.decode_ms for each in parts)) / where.decode_speed


def cost(model: ModelProfile, chain: Chain, users: Users, context: int, streams: int | None) -> float | None:
    stages = [stage_ms(model, where, span, context, streams) for where, span in chain]
    if None in stages:
        return None
    times = [time_ms for time_ms in stages if time_ms is not None]
    hops = list(pairwise(where.link for where, _ in chain))
    transfers = [model.hidden_bytes * 8 / 1e3 / min(a.bandwidth_mbit, b.bandwidth_mbit) for a, b in hops]
    if users is Users.MANY:
        return max([*times, *transfers])
    latencies = [a.latency_ms + b.latency_ms for a, b in hops]
    ends = CLIENT.latency_ms * 2 + chain[0][0].link.latency_ms + chain[-1][0].link.latency_ms
    return sum(times) + sum(transfers) + sum(latencies) + ends


def random_case(seed: int) -> tuple[ModelProfile, list[Node], int, int | None]:
    rng = random.Random(seed)
    layers = [part(rng.choice([0.5, 1.0, rng.uniform(0.1, 3)]), rng.randint(50, 150)) for _ in range(rng.randint(1, 6))]
    model = profile(layers, head=part(rng.uniform(0, 5), rng.randint(10, 300)), embedding=part(rng.uniform(0, 0.2), 50))
    nodes = [
        node(
            f"n{idx}",
            rng.choice([150, 300, 600, 2000]),
            rng.choice([0.3, 1.0, 1.0, 2.5]),
            latency_ms=rng.choice([0.0, 0.1, 2.0]),
            bandwidth_mbit=rng.choice([10, 100, 1000]),
        )
        for idx in range(rng.randint(1, 4))
    ]
    context = rng.choice([0, 1000, 50_000])
    windows = tuple(rng.choice([None, 64, 64, 4096]) for _ in layers)
    model = replace(model, windows=windows, sampling_bytes=rng.choice([0, 50 * MIB, 200 * MIB]))
    return model, nodes, context, rng.choice([None, 1, 4])


@pytest.mark.parametrize("users", list(Users))
def test_the_plan_equals_exhaustive_search(users: Users) -> None:
    num_infeasible = num_split = num_left_out = 0
    for seed in range(500):
        model, nodes, context, streams = random_case(seed)
        costs = [found for chain in chains(len(model.layers), nodes) if (found := cost(model, chain, users, context, streams)) is not None]
        if not costs:
            num_infeasible += 1
            with pytest.raises(NoPlanError):
                plan_fleet(model, nodes, CLIENT, users=users, context_tokens=context, num_streams=streams)
            continue
        plan = plan_fleet(model, nodes, CLIENT, users=users, context_tokens=context, num_streams=streams)
        predicted = plan.token_ms if users is Users.ONE else plan.slowest_ms
        assert predicted == pytest.approx(min(costs), rel=1e-9), f"seed {seed}"
        by_name = {each.name: each for each in nodes}
        chosen = tuple((by_name[stage.node], stage.span) for stage in plan.stages)
        assert cost(model, chosen, users, context, streams) == pytest.approx(min(costs), rel=1e-9), f"seed {seed}"
        assert all(stage.memory_bytes <= by_name[stage.node].memory_bytes for stage in plan.stages)
        assert {stage.node for stage in plan.stages} | set(plan.unused) == set(by_name)
        num_split += len(plan.stages) > 1
        num_left_out += bool(plan.unused)
    assert min(num_infeasible, num_split, num_left_out) > 20, "the random fleets do not cover the cases"


@pytest.mark.parametrize("users", list(Users))
def test_many_layers_and_nodes_take_less_than_two_seconds(users: Users) -> None:
    model = profile([part(1.0 + idx % 3, 100) for idx in range(64)], head=part(9.0, 300))
    fleet = [node(f"n{idx}", 1500 + 100 * idx, 1 + idx / 4, latency_ms=idx / 10) for idx in range(8)]
    started_s = time.process_time()
    plan = plan_fleet(model, fleet, CLIENT, users=users, context_tokens=4096)
    assert time.process_time() - started_s < 2.0
    assert plan.stages[0].span.start == 0
    assert plan.stages[-1].span.end == 64
    assert all(before.span.end == after.span.start for before, after in pairwise(plan.stages))


def test_one_user_stays_on_the_fastest_machine_that_holds_the_model() -> None:
    plan = plan_fleet(EVEN, [node("slow"), node("fast", speed=2.0)], CLIENT, users=Users.ONE, context_tokens=1000)
    assert [(stage.node, stage.span) for stage in plan.stages] == [("fast", LayerSpan(0, 6))]
    assert plan.unused == ("slow",)
    assert plan.token_ms == pytest.approx((0.1 + 6 + 3) / 2 + 2 * (0.05 + 0.1))
    assert plan.alone is not None
    assert plan.alone.token_ms == pytest.approx(plan.token_ms)
    assert plan.stages[0].prefill_ms == pytest.approx(0.9 / 2)


def test_many_users_share_the_load_and_leave_a_weak_node_out() -> None:
    fleet = [node("a"), node("b"), node("weak", speed=0.05)]
    plan = plan_fleet(EVEN, fleet, CLIENT, users=Users.MANY, context_tokens=1000)
    assert [(stage.node, stage.span) for stage in plan.stages] == [("a", LayerSpan(0, 4)), ("b", LayerSpan(4, 6))]
    assert plan.unused == ("weak",)
    assert plan.slowest_ms == pytest.approx(5.1)
    assert plan.tokens_per_s == pytest.approx(1e3 / 5.1)
    assert plan.alone is not None
    assert plan.alone.slowest_ms == pytest.approx(9.1)


def test_what_limits_each_stage() -> None:
    tight = node("tight", 215)  # the embedding and two layers, no third; KV is 1 MiB a layer
    heavy = replace(EVEN, head=part(3.0, 300))
    plan = plan_fleet(heavy, [tight, node("big", 1000)], CLIENT, users=Users.MANY, context_tokens=1024)
    assert [(stage.node, stage.span, stage.limit) for stage in plan.stages] == [
        ("tight", LayerSpan(0, 2), Limit.MEMORY),
        ("big", LayerSpan(2, 6), Limit.SPEED),
    ]
    assert plan.stages[0].weight_bytes == 210 * MIB
    assert plan.stages[0].kv_bytes == 2 * MIB
    far = [node("a", 450, latency_ms=50), node("b", 450, latency_ms=50)]
    plan = plan_fleet(EVEN, far, CLIENT, users=Users.ONE, context_tokens=16)
    assert Limit.LINK in {stage.limit for stage in plan.stages}
    assert plan.alone is None


def test_stages_whose_layers_all_have_windows_need_no_more_kv_than_they_keep() -> None:
    windowed = replace(EVEN, windows=(1024, 512, 1024, 1024, 1024, None))
    a, b = node("a", 1000), node("b", 1000)

    def kv(context: int, streams: int | None) -> list[float]:
        plan = plan_fleet(windowed, [a, b], CLIENT, users=Users.MANY, context_tokens=context, num_streams=streams)
        assert [stage.span for stage in plan.stages] == [LayerSpan(0, 4), LayerSpan(4, 6)]
        return [stage.kv_bytes / 1024 for stage in plan.stages]  # KiB: positions times layers

    assert kv(32_768, 1) == [4 * 1568, 2 * 32_768]  # 1023 + 512 positions in 48 blocks, and one as they begin anywhere
    assert kv(32_768, 5) == [4 * 5 * 1568, 2 * 32_768]
    assert kv(32_768, 21) == [4 * 32_768, 2 * 32_768]  # 21 streams of 1,560 positions: nothing is passed
    assert kv(32_768, None) == [4 * 32_768, 2 * 32_768]
    assert kv(1000, 1) == [4 * 1000, 2 * 1000]
    # What is kept decides what fits: beside 310 MiB of embedding and three layers 4.6 MiB of KV, but not 96.
    windowed, tight = replace(windowed, head=part(3.0, 300)), node("tight", 310 + 5)
    plan = plan_fleet(windowed, [tight, b], CLIENT, users=Users.MANY, context_tokens=32_768, num_streams=1)
    assert [(stage.node, stage.span) for stage in plan.stages] == [("tight", LayerSpan(0, 3)), ("b", LayerSpan(3, 6))]
    assert plan.stages[0].limit is Limit.MEMORY
    plan = plan_fleet(windowed, [tight, b], CLIENT, users=Users.MANY, context_tokens=32_768)
    assert [(stage.node, stage.span) for stage in plan.stages] == [("tight", LayerSpan(0, 2)), ("b", LayerSpan(2, 6))]


def test_costs_measured_on_a_node_replace_its_speed() -> None:
    measured = replace(node("measured", speed=9.0), cost=NodeCost(layer=2.0, head=1.0, embedding=0.5))
    plan = plan_fleet(EVEN, [measured], CLIENT, users=Users.ONE, context_tokens=16)
    assert plan.stages[0].decode_ms == pytest.approx(6 * 2.0 + 1.0 + 0.5 + 0.1 * 2)


def test_a_fleet_that_is_too_small_is_told_what_it_lacks() -> None:
    with pytest.raises(NoPlanError) as caught:
        plan_fleet(EVEN, [node("a", 300), node("b", 200)], CLIENT, users=Users.ONE, context_tokens=2048)
    for words in ("tiny", "0.69 GiB", "0.01 GiB", "a 0.54 GiB", "b 0.45 GiB", "--context"):
        assert words in str(caught.value)


@pytest.mark.parametrize("count", [0, MAX_NODES + 1])
def test_number_of_nodes_is_bounded(count: int) -> None:
    with pytest.raises(InvalidOptionError, match=rf"{count} nodes"):
        plan_fleet(EVEN, [node(f"n{idx}") for idx in range(count)], CLIENT, users=Users.ONE, context_tokens=16)
