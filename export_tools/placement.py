"""Pure: which node of a fleet holds which layers, and in what order the stages follow one another.

Exact, by dynamic programming over (nodes used, last node, layers placed): the best chain that ends so does not depend on what comes after
it. For one user the sum of all stages and hops is minimised: what a token takes. For many the slowest stage or transfer is: with
enough streams under way every stage is busy and the others wait for that one; of the chains with the fastest slowest stage it is
the one with the smallest sum.

Links are a star: each node, and the client, has a latency and a bandwidth of its own towards the network in the middle. A hop takes both
ends' latencies and is as wide as the narrower end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import LayerSpan, PartCost
from langchain_pshard.core.errors import InvalidOptionError, NoPlanError
from langchain_pshard.core.kv import kept_tokens

MAX_NODES = 12  # the number of subsets doubles with each; twelve take about two seconds
WORKER_BYTES = 256 << 20
"""What a worker takes beside weights and KV: Python, OpenVINO and buffers."""
_TIE = 1e-9  # sums of the same numbers in another order differ by less

Table = npt.NDArray[np.float64]


class Users(Enum):
    """Whom the plan is for."""

    ONE = "one"
    MANY = "many"


class Limit(Enum):
    """What keeps a stage from doing more."""

    MEMORY = "memory"
    """Not one layer more would fit."""
    LINK = "link"
    """Handing on takes longer than computing."""
    SPEED = "speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What a model costs and needs, on the reference machine of the yardstick."""

    name: str
    layers: tuple[PartCost, ...]
    embedding: PartCost
    head: PartCost
    step_ms: float
    """What an inference costs a stage beside its parts."""
    hidden_bytes: int
    """One token's hidden state, as it travels between stages."""
    kv_layer_bytes: int
    """KV of one position in one layer."""
    sampling_bytes: int
    """What the last stage's worker takes beside its weights, to hold logits and to enforce grammars."""
    windows: tuple[int | None, ...]
    """Attention window of each layer whose stage could give KV back; None where a layer sees all, and everywhere without a paged form."""
    is_measured: bool
    """False: costs are estimated from bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """How something is connected."""

    latency_ms: float = 0.2
    """One way, this end's share."""
    bandwidth_mbit: float = 1000.0

    @property
    def bytes_per_ms(self) -> float:
        return self.bandwidth_mbit * 1e3 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Decode milliseconds of this very model's parts, measured on a node."""

    layer: float
    head: float
    embedding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that may serve a stage."""

    name: str
    memory_bytes: int
    decode_speed: float = 1.0
    """Times the reference machine; not used where `cost` is known."""
    prefill_speed: float = 1.0
    cost: NodeCost | None = None
    link: LinkEnd = field(default_factory=LinkEnd)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage of a plan, and what it is predicted to take."""

    node: str
    span: LayerSpan
    decode_ms: float
    """Computing one token."""
    prefill_ms: float
    """Computing one prompt token inside a chunk."""
    hop_ms: float
    """Handing one token on to the next stage, or the result to the client."""
    transfer_ms: float
    """The part of `hop_ms` during which the link is busy."""
    weight_bytes: int
    kv_bytes: int
    worker_bytes: int
    """Of the worker itself."""
    limit: Limit

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.worker_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The best node that can hold the whole model by itself."""

    node: str
    token_ms: float
    slowest_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best chain."""

    users: Users
    context_tokens: int
    num_streams: int | None
    stages: tuple[PlannedStage, ...]
    enter_ms: float
    """From the client to the first stage."""
    unused: tuple[str, ...]
    alone: Alone | None
    """None: no single node holds the model."""

    @property
    def token_ms(self) -> float:
        """What one token of one stream takes, all hops included."""
        return self.enter_ms + sum(stage.decode_ms + stage.hop_ms for stage in self.stages)

    @property
    def slowest_ms(self) -> float:
        """What the slowest stage or transfer takes: a full pipeline finishes a step in each such time."""
        return max(max(stage.decode_ms, stage.transfer_ms) for stage in self.stages)

    @property
    def tokens_per_s(self) -> float:
        """For one user, of that stream; for many, of all streams together at one row a step (batched rows come on top)."""
        return 1e3 / (self.token_ms if self.users is Users.ONE else self.slowest_ms)


def plan_fleet(
    model: ModelProfile, nodes: Sequence[Node], client: LinkEnd, *, users: Users, context_tokens: int, num_streams: int | None = None
) -> Plan:
    """The best chain of stages over any of the nodes, in any order.

    Args:
        model: what is to be served.
        nodes: at most `MAX_NODES`, each used for at most one stage.
        client: how the client is connected.
        users: what is minimised.
        context_tokens: KV positions each stage must hold, over all streams; of a stage that gives KV back, what it keeps of them.
        num_streams: most streams that these are; None when nobody knows, then no stage counts on giving any back.

    Raises:
        InvalidOptionError: too many nodes, or none.
        NoPlanError: the nodes together cannot hold the model.
    """
    if not 1 <= len(nodes) <= MAX_NODES:
        raise InvalidOptionError(f"a fleet of {len(nodes)} nodes cannot be planned: name 1 to {MAX_NODES} nodes")
    kv_bytes = _kv_bytes(model, context_tokens, num_streams)
    stages = [_NodeStages(model, node, kv_bytes) for node in nodes]
    tables = np.stack([each.decode_ms for each in stages])  # [nodes, start, end]
    links = _Links(nodes, client, model.hidden_bytes)
    if users is Users.MANY:
        bound = _best_chain(tables, _Hops(np.zeros(len(nodes)), links.transfer_ms, np.zeros(len(nodes))), np.maximum)
        if bound is not None:
            slowest_ms = bound[0] * (1 + _TIE)
            tables = np.where(tables <= slowest_ms, tables, np.inf)
            links.forbid(links.transfer_ms > slowest_ms)
    best = _best_chain(tables, links.hops, np.add)
    if best is None:
        raise NoPlanError(_too_small(model, nodes, context_tokens, kv_bytes))
    chain = best[1]
    used = {node_idx for node_idx, _ in chain}
    return Plan(
        users=users,
        context_tokens=context_tokens,
        num_streams=num_streams,
        stages=tuple(
            _planned(stages[node_idx], links, span, node_idx, chain[place + 1][0] if place + 1 < len(chain) else None)
            for place, (node_idx, span) in enumerate(chain)
        ),
        enter_ms=float(links.hops.enter[chain[0][0]]),
        unused=tuple(node.name for idx, node in enumerate(nodes) if idx not in used),
        alone=_alone(stages, links, users),
    )


class _NodeStages:
    """Every stage one node could hold; tables are indexed [start, end] and infinite where there is no such stage or it does not fit."""

    def __init__(self, model: ModelProfile, node: Node, kv_bytes: Table) -> None:
        self.node = node
        scale = self._scale(model)
        layers, embedding, head, step_ms = self._decode_costs(model, scale)
        decode = _spans(layers, embedding, head) + step_ms
        prefill_scale = scale if node.cost else 1 / node.prefill_speed
        prefill = _spans([part.prefill_ms for part in model.layers], model.embedding.prefill_ms, model.head.prefill_ms) * prefill_scale
        self.weight_bytes = _spans([part.num_bytes for part in model.layers], model.embedding.num_bytes, model.head.num_bytes)
        self.kv_bytes = kv_bytes
        self.worker_bytes = WORKER_BYTES + _spans([0.0] * len(model.layers), 0.0, model.sampling_bytes)
        self.fits = self.weight_bytes + self.kv_bytes + self.worker_bytes <= node.memory_bytes
        self.decode_ms = np.where(self.fits, decode, np.inf)
        self.prefill_ms = prefill

    def _scale(self, model: ModelProfile) -> float:
        if self.node.cost is None:
            return 1 / self.node.decode_speed
        return self.node.cost.layer * len(model.layers) / sum(part.decode_ms for part in model.layers)

    def _decode_costs(self, model: ModelProfile, scale: float) -> tuple[list[float], float, float, float]:
        layers = [part.decode_ms * scale for part in model.layers]
        cost = self.node.cost
        embedding = model.embedding.decode_ms * scale if cost is None else cost.embedding
        head = model.head.decode_ms * scale if cost is None else cost.head
        return layers, embedding, head, model.step_ms * scale

    def can_grow(self, span: LayerSpan) -> bool:
        """Whether one layer more, before or after `span`, would fit; True where there is none to take."""
        last = len(self.fits) - 1
        neighbours = [(span.start - 1, span.end)] if span.start > 0 else []
        neighbours += [(span.start, span.end + 1)] if span.end < last else []
        return not neighbours or any(self.fits[start, end] for start, end in neighbours)


def _kv_bytes(model: ModelProfile, context_tokens: int, num_streams: int | None) -> Table:
    """[start, end] -> KV of a stage, which no node changes; infinite where the span is empty."""
    num_layers = len(model.layers)
    table: Table = np.full((num_layers + 1, num_layers + 1), np.inf)
    for start, end in combinations(range(num_layers + 1), 2):
        table[start, end] = (end - start) * model.kv_layer_bytes * kept_tokens(model.windows[start:end], context_tokens, num_streams)
    return table


def _spans(layers: Sequence[float], embedding: float, head: float) -> Table:
    """[start, end] -> sum over the layers of the span and the ends it holds; infinite where the span is empty."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(layers, dtype=np.float64))])
    table = total[None, :] - total[:, None]
    table[0, :] += embedding
    table[:, -1] += head
    table[np.tril_indices(len(total))] = np.inf  # end <= start
    result: Table = table
    return result


@dataclass(frozen=True, slots=True)
class _Hops:
    enter: Table  # [nodes]
    between: Table  # [from, to]
    leave: Table  # [nodes]


class _Links:
    """What hops take; tokens to the first stage and results from the last are a few bytes, all latency."""

    def __init__(self, nodes: Sequence[Node], client: LinkEnd, hidden_bytes: int) -> None:
        latency = np.array([node.link.latency_ms for node in nodes])
        width = np.array([node.link.bytes_per_ms for node in nodes])
        self.transfer_ms = hidden_bytes / np.minimum(width[:, None], width[None, :])
        between = latency[:, None] + latency[None, :] + self.transfer_ms
        ends = latency + client.latency_ms
        self.hops = _Hops(ends, between, ends)

    def forbid(self, hops: npt.NDArray[np.bool_]) -> None:
        self.hops.between[hops] = np.inf


def _best_chain(tables: Table, hops: _Hops, combine: Any) -> tuple[float, list[tuple[int, LayerSpan]]] | None:
    """The chain with the smallest combined cost, and that cost; None when no chain holds all layers.

    Args:
        tables: [nodes, start, end], cost of a stage.
        hops: costs of the hops.
        combine: np.add or np.maximum.
    """
    num_nodes, num_edges, _ = tables.shape
    edges = np.arange(num_edges)
    cost = np.full((1 << num_nodes, num_nodes, num_edges), np.inf)  # [used, last, layers placed]
    previous = np.zeros(cost.shape, dtype=np.int8)
    begun = np.zeros(cost.shape, dtype=np.int16)
    for node in range(num_nodes):
        cost[1 << node, node] = combine(hops.enter[node], tables[node, 0])
    for used in range(1, 1 << num_nodes):
        for node in range(num_nodes):
            if used >> node & 1:
                continue
            arriving = combine(cost[used], hops.between[:, node, None])  # [last, start]
            last = num_nodes - 1 - arriving[::-1].argmin(0)  # of equals the later node, so that equals come in the fleet's order
            staged = combine(arriving[last, edges][:, None], tables[node])  # [start, end]
            start = staged.argmin(0)
            then = used | 1 << node
            cost[then, node] = staged[start, edges]
            previous[then, node] = last[start]
            begun[then, node] = start
    total = combine(cost[:, :, -1], hops.leave)  # [used, last]
    best = total.min()
    if not np.isfinite(best):
        return None
    close = np.argwhere(total <= best * (1 + _TIE))
    used, node = min(((int(used), int(node)) for used, node in close), key=lambda end: (end[0].bit_count(), end[0], -end[1]))
    return float(best), _walk_back(used, node, num_edges - 1, previous, begun)


def _walk_back(used: int, node: int, end: int, previous: npt.NDArray[np.int8], begun: npt.NDArray[np.int16]) -> list[tuple[int, LayerSpan]]:
    chain: list[tuple[int, LayerSpan]] = []
    while end > 0:
        start = int(begun[used, node, end])
        chain.append((node, LayerSpan(start, end)))
        used, node, end = used & ~(1 << node), int(previous[used, node, end]), start
    return chain[::-1]


def _planned(stages: _NodeStages, links: _Links, span: LayerSpan, node_idx: int, next_idx: int | None) -> PlannedStage:
    at = span.start, span.end
    hop_ms = float(links.hops.leave[node_idx] if next_idx is None else links.hops.between[node_idx, next_idx])
    decode_ms = float(stages.decode_ms[at])
    slower = Limit.LINK if hop_ms > decode_ms else Limit.SPEED
    limit = slower if stages.can_grow(span) else Limit.MEMORY
    return PlannedStage(
        node=stages.node.name,
        span=span,
        decode_ms=decode_ms,
        prefill_ms=float(stages.prefill_ms[at]),
        hop_ms=hop_ms,
        transfer_ms=0.0 if next_idx is None else float(links.transfer_ms[node_idx, next_idx]),
        weight_bytes=int(stages.weight_bytes[at]),
        kv_bytes=int(stages.kv_bytes[at]),
        worker_bytes=int(stages.worker_bytes[at]),
        limit=limit,
    )


def _alone(stages: Sequence[_NodeStages], links: _Links, users: Users) -> Alone | None:
    found = [
        Alone(
            node=each.node.name,
            token_ms=float(each.decode_ms[0, -1] + links.hops.enter[idx] + links.hops.leave[idx]),
            slowest_ms=float(each.decode_ms[0, -1]),
        )
        for idx, each in enumerate(stages)
        if each.fits[0, -1]
    ]
    return min(found, key=lambda one: one.token_ms if users is Users.ONE else one.slowest_ms, default=None)


def _too_small(model: ModelProfile, nodes: Sequence[Node], context_tokens: int, kv_bytes: Table) -> str:
    weights = sum(part.num_bytes for part in (*model.layers, model.embedding, model.head))
    kv = int(kv_bytes.diagonal(1).sum())  # of stages with one layer each, which keep least
    offered = ", ".join(f"{node.name} {_gib(node.memory_bytes)}" for node in nodes)
    return (
        f"the fleet cannot hold {model.name}: its weights need {_gib(weights)}, the KV of {context_tokens} tokens at least {_gib(kv)}, each"
        f" worker {_gib(WORKER_BYTES)}, the last one {_gib(model.sampling_bytes)} more;"
        f" the nodes offer {_gib(sum(node.memory_bytes for node in nodes))} ({offered}), in whole layers:"
        " add memory or nodes, lower --context, or use a smaller weight mode"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
