"""Welcomes -> chain, and every way in which they may not fit."""

from __future__ import annotations

import msgspec
import pytest

from langchain_pshard.core.bundle import Fingerprint, LayerSpan
from langchain_pshard.core.errors import FleetMismatchError
from langchain_pshard.core.messages import PROTOCOL_VERSION, RequestId, Welcome, WorkerId
from langchain_pshard.core.numerics import DType, Numerics
from langchain_pshard.core.roles import DraftOffer, StageOffer
from langchain_pshard.pipeline.chain import assemble

NUMERICS = Numerics(
    name="fast",
    runner="paged",
    device="CPU",
    openvino="2026.4.1",
    inference_precision="f32",
    kv_precision="f16",
    dynamic_quantization_group_size=128,
    head_quantization_group_size=320,
    boundary=DType.F32,
)
A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


def welcome(*stages: int, worker: str = "w", num_stages: int = 2, capacity: int = 100, **changes: object) -> Welcome:
    offers = tuple(
        StageOffer(
            stage_idx=idx,
            num_stages=num_stages,
            span=LayerSpan(2 * idx, 2 * idx + 2),
            num_bytes=10 + idx,
            kv_capacity_tokens=capacity - idx,
        )
        for idx in stages
    )
    made = Welcome(
        request=RequestId(1),
        protocol=PROTOCOL_VERSION,
        software="0.1.0",
        worker=WorkerId(worker),
        fingerprint=Fingerprint("f" * 64),
        model_name="gemma",
        numerics=NUMERICS,
        stages=offers,
    )
    return msgspec.structs.replace(made, **changes)


def drafting(worker: str = "d", **changes: object) -> Welcome:
    """A worker that serves the draft alone."""
    draft = DraftOffer(model_name="small", num_bytes=3, kv_capacity_tokens=50, context_length=4096)
    return msgspec.structs.replace(welcome(worker=worker), **{"draft": draft, **changes})


def other(**changes: object) -> Numerics:
    return msgspec.structs.replace(NUMERICS, **changes)


def test_workers_in_any_order_form_the_chain() -> None:
    chain = assemble({B: welcome(1, worker="b"), A: welcome(0, worker="a")})
    assert [(stage.stage_idx, stage.address, stage.worker, str(stage.span), stage.num_bytes) for stage in chain.stages] == [
        (0, A, "a", "0-1", 10),
        (1, B, "b", "2-3", 11),
    ]
    assert [(hop.worker, hop.address) for hop in chain.hops] == [("a", A), ("b", B)]
    assert (chain.model_name, chain.num_stages, chain.first.address, chain.tightest(100).stage_idx) == ("gemma", 2, A, 1)


def test_the_draft_is_taken_where_it_disturbs_least() -> None:
    both = {A: welcome(0, worker="a"), B: welcome(1, worker="b", draft=drafting().draft)}
    assert assemble({A: both[A], B: welcome(1, worker="b")}).draft is None
    chain = assemble(both)
    assert chain.draft is not None
    assert (chain.draft.address, chain.draft.context_length) == (B, 4096)
    # Its own numerics class does not matter, and it is no part of the chain.
    chain = assemble({**both, C: drafting(numerics=other(dynamic_quantization_group_size=64))})
    assert chain.draft is not None
    assert chain.draft.address == C
    assert (chain.addresses, [hop.address for hop in chain.hops], chain.stages_at(C)) == ((A, B), [A, B], ())


def test_a_worker_may_serve_several_stages() -> None:
    chain = assemble({A: welcome(0, 2, worker="a", num_stages=3), B: welcome(1, worker="b", num_stages=3)})
    assert [stage.address for stage in chain.stages] == [A, B, A]
    assert chain.stages_at(A) == (0, 2)


@pytest.mark.parametrize(
    ("welcomes", "message"),
    [
        ({A: welcome(0, worker="a")}, rf"2 stages; missing: 1; served: 0 at {A}"),
        ({A: welcome(0, worker="a"), B: welcome(0, worker="b")}, rf"stage 0 is served twice, at {A} and at {B}"),
        ({A: welcome(0, worker="a"), B: welcome(1, worker="b"), C: welcome(1, worker="c")}, rf"stage 1 is served twice, at {B} and at {C}"),
        ({A: welcome(0, worker="a"), B: welcome(0, worker="a")}, rf"{A} and {B} lead to the same worker"),
        (
            {A: welcome(0, worker="a"), B: welcome(1, worker="b", fingerprint=Fingerprint("e" * 64), model_name="llama")},
            rf"fingerprints differ: gemma ffffffffffff at {A}; llama eeeeeeeeeeee at {B}.*same export",
        ),
        (
            {A: welcome(0, worker="a"), B: welcome(1, worker="b", software="0.2.0")},
            rf"software versions differ: 0\.1\.0 at {A}; 0\.2\.0 at {B}.*install",
        ),
        (
            {A: welcome(0, worker="a", protocol=9), B: welcome(1, worker="b")},
            rf"protocol versions differ: 9 at {A}; {PROTOCOL_VERSION} at {B}",
        ),
        ({A: welcome(0, 1, worker="a", protocol=9)}, rf"{A} speaks protocol version 9 .* this client {PROTOCOL_VERSION}"),
        (
            {A: welcome(0, worker="a"), B: welcome(1, worker="b", numerics=other(name="exact"))},
            rf"numerics is fast at {A} and exact at {B}; .*--numerics",
        ),
        (
            {A: welcome(0, worker="a"), B: welcome(1, worker="b", numerics=other(boundary=DType.I8))},
            rf"boundary is f32 at {A} and i8 at {B}; .*--activation",
        ),
        (
            {A: welcome(0, worker="a"), B: welcome(1, worker="b", numerics=other(openvino="2026.3"))},
            rf"openvino is 2026\.4\.1 at {A} and 2026\.3 at {B}; install the same version of openvino",
        ),
        ({A: welcome(0, 1, worker="a"), B: drafting(fingerprint=Fingerprint("e" * 64))}, "fingerprints differ"),
        ({A: drafting()}, rf"no worker serves a stage, only the draft is at {A}"),
        ({A: welcome(0, worker="a"), B: welcome(1, worker="b", num_stages=3)}, r"disagree on the number of stages: \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_named(welcomes: dict[str, Welcome], message: str) -> None:
    with pytest.raises(FleetMismatchError, match=message):
        assemble(welcomes)
