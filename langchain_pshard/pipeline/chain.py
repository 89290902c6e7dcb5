"""From the workers' Welcomes to the chain of one model, or to an error that says exactly what does not fit. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from langchain_pshard.core.bundle import Fingerprint, LayerSpan
from langchain_pshard.core.errors import FleetMismatchError
from langchain_pshard.core.messages import PROTOCOL_VERSION, Hop, Welcome, WorkerId
from langchain_pshard.core.numerics import Numerics
from langchain_pshard.core.roles import DraftOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """One stage of the chain and the worker that serves it."""

    stage_idx: int
    address: str
    worker: WorkerId
    span: LayerSpan
    num_bytes: int
    kv_capacity_tokens: int
    is_resumable: bool
    numerics: Numerics
    allows_logits: bool = False
    kv_stream_tokens: int | None = None
    """Most KV positions of one stream, however long it is; None: as many as it has."""

    def kv_needed(self, num_positions: int) -> int:
        """KV positions that a stream of `num_positions` takes here."""
        return num_positions if self.kv_stream_tokens is None else min(num_positions, self.kv_stream_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRole:
    """Where the draft model is served, and what it can hold."""

    address: str
    offer: DraftOffer

    @property
    def context_length(self) -> int:
        return self.offer.context_length


class Route(NamedTuple):
    """How far a step goes."""

    num_stages: int
    num_links: int
    """From the client over the stages' workers and back."""
    num_links_ahead: int
    """Of a step that the chain takes by itself: from worker to worker, and from the last to the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The stages of one model in order. A worker may serve several, and one may serve the draft model, beside stages or alone."""

    fingerprint: Fingerprint
    model_name: str
    stages: tuple[ChainStage, ...]
    draft: DraftRole | None = None

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(Hop(stage.worker, stage.address) for stage in self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def first(self) -> ChainStage:
        return self.stages[0]

    @property
    def route(self) -> Route:
        workers = [stage.worker for stage in self.stages]
        num_between = sum(one != other for one, other in itertools.pairwise(workers))
        return Route(self.num_stages, 2 + num_between, num_between + (workers[0] != workers[-1]))

    def tightest(self, num_positions: int) -> ChainStage:
        """The stage that has the least room left beside a stream of `num_positions`; below none when it cannot hold it at all."""
        return min(self.stages, key=lambda stage: stage.kv_capacity_tokens - stage.kv_needed(num_positions))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the workers that serve stages, each once."""
        return tuple(dict.fromkeys(stage.address for stage in self.stages))

    def stages_at(self, address: str) -> tuple[int, ...]:
        return tuple(stage.stage_idx for stage in self.stages if stage.address == address)


def assemble(welcomes: Mapping[str, Welcome]) -> Chain:
    """The chain that workers, in any order, form together.

    Args:
        welcomes: address -> what the worker there said about itself; not empty.

    Raises:
        FleetMismatchError: not exactly the stages of one model under one protocol, software and numerics class.
    """
    _check_same_worker_twice(welcomes)
    _check_equal(welcomes, "protocol version", lambda welcome: welcome.protocol, "install the same version of langchain-pshard everywhere")
    _check_protocol(welcomes)
    _check_equal(welcomes, "software version", lambda welcome: welcome.software, "install the same version of langchain-pshard everywhere")
    _check_fingerprints(welcomes)
    _check_numerics({address: welcome for address, welcome in welcomes.items() if welcome.stages})
    return Chain(
        fingerprint=next(iter(welcomes.values())).fingerprint,
        model_name=next(iter(welcomes.values())).model_name,
        stages=_stages(welcomes),
        draft=_draft(welcomes),
    )


def _check_same_worker_twice(welcomes: Mapping[str, Welcome]) -> None:
    address_of: dict[WorkerId, str] = {}
    for address, welcome in welcomes.items():
        if (other := address_of.setdefault(welcome.worker, address)) != address:
            raise FleetMismatchError(f"{other} and {address} lead to the same worker: name it once")


def _check_equal(welcomes: Mapping[str, Welcome], what: str, value_of: Callable[[Welcome], object], remedy: str) -> None:
    addresses = defaultdict(list)
    for address, welcome in welcomes.items():
        addresses[value_of(welcome)].append(address)
    if len(addresses) > 1:
        found = "; ".join(f"{value} at {', '.join(at)}" for value, at in addresses.items())
        raise FleetMismatchError(f"the workers' {what}s differ: {found}: {remedy}")


def _check_protocol(welcomes: Mapping[str, Welcome]) -> None:
    for address, welcome in welcomes.items():
        if welcome.protocol != PROTOCOL_VERSION:
            raise FleetMismatchError(
                f"the worker at {address} speaks protocol version {welcome.protocol} (langchain-pshard {welcome.software}), this client"
                f" {PROTOCOL_VERSION}: install the same version of langchain-pshard on both"
            )


def _check_fingerprints(welcomes: Mapping[str, Welcome]) -> None:
    _check_equal(
        welcomes,
        "bundle fingerprint",
        lambda welcome: f"{welcome.model_name} {welcome.fingerprint[:12]}",
        "start all workers on shards of one and the same export",
    )


def _check_numerics(welcomes: Mapping[str, Welcome]) -> None:
    if not welcomes:
        return
    (address, first), *others = welcomes.items()
    for other_address, other in others:
        for name in first.numerics.__struct_fields__:
            value, other_value = getattr(first.numerics, name), getattr(other.numerics, name)
            if value != other_value:
                label = "numerics" if name == "name" else name
                raise FleetMismatchError(
                    f"the workers compute differently: {label} is {_shown(value)} at {address} and {_shown(other_value)} at"
                    f" {other_address}; {_REMEDIES.get(name, 'start all workers with the same options')}"
                )


_REMEDIES = {
    "name": "start all workers with the same --numerics",
    "runner": "start all workers with the same --runner",
    "device": "start all workers with the same --device",
    "openvino": "install the same version of openvino everywhere",
    "inference_precision": "start all workers with --numerics exact, which every machine can do",
    "kv_precision": "start all workers with the same --kv-precision",
    "boundary": "start all workers with the same --activation",
}


def _shown(value: object) -> object:
    return getattr(value, "value", value)


def _stages(welcomes: Mapping[str, Welcome]) -> tuple[ChainStage, ...]:
    found: dict[int, ChainStage] = {}
    num_stages = {offer.num_stages for welcome in welcomes.values() for offer in welcome.stages}
    for address, welcome in welcomes.items():
        for offer in welcome.stages:
            stage = ChainStage(
                stage_idx=offer.stage_idx,
                address=address,
                worker=welcome.worker,
                span=offer.span,
                num_bytes=offer.num_bytes,
                kv_capacity_tokens=offer.kv_capacity_tokens,
                is_resumable=offer.is_resumable,
                numerics=welcome.numerics,
                allows_logits=offer.allows_logits,
                kv_stream_tokens=offer.kv_stream_tokens,
            )
            if (other := found.setdefault(offer.stage_idx, stage)) is not stage:
                raise FleetMismatchError(
                    f"stage {offer.stage_idx} is served twice, at {other.address} and at {address}: leave one of the two out"
                )
    if not num_stages:
        raise FleetMismatchError(f"no worker serves a stage, only the draft is at {', '.join(welcomes)}: name the stages' workers too")
    if len(num_stages) != 1:
        raise FleetMismatchError(f"the workers disagree on the number of stages: {sorted(num_stages)}")
    expected = range(num_stages.pop())
    missing = [idx for idx in expected if idx not in found]
    if missing or len(found) != len(expected):
        served = ", ".join(f"{idx} at {stage.address}" for idx, stage in sorted(found.items()))
        raise FleetMismatchError(
            f"the model has {len(expected)} stages; missing: {', '.join(map(str, missing)) or 'none'}; served: {served}:"
            " start a worker for every missing stage and name it too"
        )
    return tuple(found[idx] for idx in expected)


def _draft(welcomes: Mapping[str, Welcome]) -> DraftRole | None:
    """The draft model where it disturbs least: at the worker with the fewest stages."""
    offers = [(len(welcome.stages), address, welcome.draft) for address, welcome in welcomes.items() if welcome.draft is not None]
    if not offers:
        return None
    _, address, offer = min(offers, key=lambda each: each[0])
    return DraftRole(address=address, offer=offer)
