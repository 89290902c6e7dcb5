"""Liveness and membership with fake time: exact instructions, exact moments."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from langchain_pshard.core.errors import FleetMismatchError, ProtocolError, WorkerLostError, WorkerUnreachableError
from langchain_pshard.core.messages import (
    PROTOCOL_VERSION,
    ClientId,
    Epoch,
    Hello,
    Join,
    Joined,
    Leave,
    Ping,
    Pong,
    Refused,
    RequestId,
    WorkerId,
)
from langchain_pshard.pipeline.instructions import Dial, Instruction, Send, Warn
from langchain_pshard.pipeline.membership import Membership, Phase
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.recovery import Liveness
from tests.unit.test_chain import A, B, C, drafting, welcome

ME = ClientId("me")


def liveness() -> Liveness:
    return Liveness([A, B], 0.0, timeout_s=8.0, interval_s=2.0)


def test_a_silent_worker_is_lost_after_the_timeout_and_no_sooner() -> None:
    watch = liveness()
    now = 0.0
    while now < 7.9:
        now += 0.1
        watch.due_pings(now)
        watch.heard(A, now)
        assert watch.check(now) == {}
    assert list(watch.check(8.1)) == [B]


def test_pings_go_out_at_their_interval() -> None:
    watch = liveness()
    assert watch.due_pings(1.9) == []
    assert watch.due_pings(2.0) == [A, B]
    assert watch.due_pings(2.1) == []
    assert watch.due_pings(4.0) == [A, B]


def test_a_broken_connection_is_given_half_a_second() -> None:
    watch = liveness()
    watch.check(1.0)
    watch.broke(A, 1.0)
    assert watch.is_doubtful
    assert watch.check(1.4) == {}
    assert watch.check(1.5) == {A: "its connection broke and nobody answers there"}


def test_a_sleep_of_this_machine_is_not_held_against_the_workers() -> None:
    watch = liveness()
    watch.check(2.0)
    watch.due_pings(2.0)
    assert watch.check(302.0) == {}
    assert watch.check(302.5) == {}


# --- membership ------------------------------------------------------------------------------------------------------


def membership(*more: str) -> Membership:
    counter = itertools.count(1)
    return Membership(
        ME,
        [A, B, *more],
        software="0.1.0",
        connect_timeout_s=30.0,
        options=ClientOptions(),
        new_request=lambda: RequestId(next(counter)),
        now=0.0,
    )


def hello(address: str, request: int) -> Send:
    return Send(address, Hello(request=RequestId(request), protocol=PROTOCOL_VERSION, software="0.1.0"))


def join(way: Membership, address: str, request: int) -> Send:
    assert way.chain is not None
    return Send(address, Join(request=RequestId(request), client=ME, epoch=way.epoch, chain=way.chain.hops, is_ring=True))


def joined_by(instruction: Instruction) -> Joined:
    assert isinstance(instruction, Send)
    assert isinstance(instruction.message, Join)
    return Joined(request=instruction.message.request, is_ring=True)


def ready(way: Membership, now: float = 0.0) -> None:
    way.connect(now)
    way.on_message(A, welcome(0, worker="a"), now)
    for instruction in way.on_message(B, welcome(1, worker="b"), now):
        assert isinstance(instruction, Send)
        way.on_message(instruction.address, joined_by(instruction), now)
    assert way.phase is Phase.READY
    assert way.is_steady


@pytest.mark.parametrize(("at_a", "at_b"), [(True, True), (True, False), (False, True)])
def test_a_chain_is_a_ring_where_every_worker_says_so_and_what_is_missing_is_told_once(at_a: bool, at_b: bool) -> None:
    way = membership()
    texts: list[str] = []
    for now in (0.0, 10.0):
        way.connect(now)
        way.on_message(A, welcome(0, worker="a"), now)
        for instruction in way.on_message(B, welcome(1, worker="b"), now):
            assert isinstance(instruction, Send)
            answer = msgspec.structs.replace(joined_by(instruction), is_ring=at_a if instruction.address == A else at_b)
            texts += [each.text for each in way.on_message(instruction.address, answer, now) if isinstance(each, Warn)]
        assert way.is_steady
        assert way.has_ring is (at_a and at_b)
        way.drop(WorkerLostError("gone"))
    if at_a and at_b:
        assert texts == []
        return
    [text] = texts
    assert f"the worker at {B} cannot reach the one at {A}" in text
    assert "max_steps_ahead=0" in text


def test_greeting_and_joining_repeat_until_answered() -> None:
    way = membership()
    assert way.connect(0.0) == [Dial(A), Dial(B), hello(A, 1), hello(B, 2)]
    assert way.on_message(B, welcome(1, worker="b"), 0.1) == []
    assert way.tick(0.9) == []
    assert way.tick(1.0) == [hello(A, 1)]
    assert way.on_message(A, welcome(0, worker="a"), 1.5) == [join(way, A, 3), join(way, B, 4)]
    assert way.phase is Phase.JOINING
    assert way.on_message(A, Joined(request=RequestId(3), is_ring=True), 1.6) == []
    assert way.tick(2.5) == [join(way, B, 4)]
    assert way.on_message(B, Joined(request=RequestId(4), is_ring=True), 2.6) == []
    assert way.phase is Phase.READY
    assert way.epoch == Epoch(1)
    assert way.tick(4.7) == [Send(A, Ping(request=RequestId(5), client=ME)), Send(B, Ping(request=RequestId(6), client=ME))]
    assert way.leave() == [Send(A, Leave(client=ME)), Send(B, Leave(client=ME))]


def test_silent_workers_are_named_at_the_deadline() -> None:
    way = membership()
    way.connect(0.0)
    way.on_message(A, welcome(0, worker="a"), 0.1)
    way.tick(30.0)
    assert way.phase is Phase.OFFLINE
    assert isinstance(way.failure, WorkerUnreachableError)
    assert way.failure.addresses == (B,)


def test_a_worker_restarted_between_welcome_and_join_is_joined_as_what_it_is_now() -> None:
    way = membership()
    way.connect(0.0)
    way.on_message(A, welcome(0, worker="a"), 0.0)
    way.on_message(B, welcome(1, worker="b"), 0.0)
    out = way.on_message(B, welcome(1, worker="b2"), 0.5)
    assert way.phase is Phase.JOINING
    assert way.epoch == Epoch(2)
    assert [hop.worker for hop in way.chain.hops] == ["a", "b2"] if way.chain else False
    assert len(out) == 2


@pytest.mark.parametrize("worker", ["b", "b2"])
def test_whoever_answers_after_a_broken_connection_the_chain_is_lost(worker: str) -> None:
    way = membership()
    ready(way)
    assert way.on_lost(B, 1.0) == [hello(B, 4)]
    assert not way.is_steady
    way.on_message(B, welcome(1, worker=worker), 1.1)
    assert way.phase is Phase.OFFLINE
    assert isinstance(way.failure, WorkerLostError)
    assert "restarted" in str(way.failure) if worker == "b2" else "it is back" in str(way.failure)
    ready(way, 2.0)
    assert way.epoch == Epoch(2)


def test_nobody_answers_after_a_broken_connection() -> None:
    way = membership()
    ready(way)
    way.tick(1.0)
    way.on_lost(B, 1.0)
    way.tick(1.2)
    assert way.phase is Phase.READY
    way.tick(1.5)
    assert isinstance(way.failure, WorkerLostError)
    assert str(way.failure).startswith(f"the worker at {B} (stage 1) is lost: its connection broke")


def test_answered_pings_keep_the_chain_for_hours() -> None:
    way = membership()
    ready(way)
    for tick in range(1, 7200):
        now = tick * 0.5
        for instruction in way.tick(now):
            assert isinstance(instruction, Send)
            assert isinstance(instruction.message, Ping)
            way.on_message(instruction.address, Pong(request=instruction.message.request), now)
    assert way.is_steady


def test_refusals_and_another_model_end_the_way() -> None:
    way = membership()
    way.connect(0.0)
    way.on_message(A, Refused(request=RequestId(1), code="protocol", message="you speak 2"), 0.0)
    assert isinstance(way.failure, ProtocolError)
    assert A in str(way.failure)
    ready(way)
    way.on_message(A, welcome(0, worker=WorkerId("other")), 1.0)
    way.connect(2.0)
    way.on_message(A, welcome(0, worker="a", fingerprint="e" * 64), 2.0)
    way.on_message(B, welcome(1, worker="b", fingerprint="e" * 64), 2.0)
    assert isinstance(way.failure, FleetMismatchError)
    assert "another bundle" in str(way.failure)


# --- a worker that only drafts -------------------------------------------------------------------------------------------


def with_draft() -> Membership:
    way = membership(C)
    way.connect(0.0)
    way.on_message(C, drafting(), 0.0)
    ready_again(way)
    assert way.draft is not None
    return way


def ready_again(way: Membership, now: float = 0.0) -> None:
    """Those with stages answer everything; so does the one that drafts, if it is asked to join."""
    way.on_message(A, welcome(0, worker="a"), now)
    for instruction in way.on_message(B, welcome(1, worker="b"), now):
        assert isinstance(instruction, Send)
        if isinstance(instruction.message, Join):
            way.on_message(instruction.address, joined_by(instruction), now)
    assert way.phase is Phase.READY


def warned(out: list[Instruction]) -> str:
    return "; ".join(each.text for each in out if isinstance(each, Warn))


@pytest.mark.parametrize("worker", ["d", "another"])
def test_it_goes_away_and_comes_back_and_the_chain_stays(worker: str) -> None:
    way = with_draft()
    chain = way.chain
    assert f"{C}, which drafts, is lost: its connection broke" in warned(way.on_lost(C, 1.0))
    assert way.is_steady
    assert way.draft is None
    assert way.on_lost(C, 1.1) == []
    assert way.tick(1.9) == []
    [again] = way.tick(2.05)[:1]
    assert isinstance(again, Send)
    assert (again.address, type(again.message)) == (C, Hello)
    out = way.on_message(C, drafting(worker=worker), 2.1)
    assert out == [join(way, C, again.message.request)]  # type: ignore[union-attr]
    assert way.draft is None
    way.on_message(C, joined_by(out[0]), 2.2)
    assert way.draft is not None
    assert (way.epoch, way.chain) == (Epoch(1), chain)
    assert C in [each.address for each in way.tick(5.0) if isinstance(each, Send)]  # it is pinged again


def test_whoever_has_another_bundle_is_not_taken_back() -> None:
    way = with_draft()
    way.on_lost(C, 1.0)
    [told] = way.on_message(C, drafting(fingerprint="e" * 64), 1.5)
    assert isinstance(told, Warn)
    assert C in told.text
    assert way.on_message(C, welcome(1, worker="x"), 1.5) == []  # and it is told once
    assert way.is_steady


def test_it_hangs_and_only_its_drafts_are_lost() -> None:
    way = with_draft()
    now = 0.0
    text = ""
    while now < 9.0:
        now += 0.5
        out = way.tick(now)
        text += warned(out)
        for each in out:
            if isinstance(each, Send) and isinstance(each.message, Ping) and each.address != C:
                way.on_message(each.address, Pong(request=each.message.request), now)
    assert "has not answered for 8 s" in text
    assert way.is_steady
    assert way.draft is None


def test_a_new_chain_does_not_wait_for_it() -> None:
    way = with_draft()
    way.tick(0.9)
    way.on_lost(C, 1.0)
    way.on_lost(B, 1.0)
    way.tick(1.2)
    way.tick(1.6)
    assert isinstance(way.failure, WorkerLostError)
    assert C not in str(way.failure)
    way.connect(2.0)
    ready_again(way, 2.0)
    assert (way.epoch, way.draft) == (Epoch(2), None)
    assert way.chain is not None
    assert way.chain.draft is not None  # known, and asked to come back
    [again] = [each for each in way.tick(3.1) if isinstance(each, Send) and each.address == C]
    assert isinstance(again.message, Hello)
    out = way.on_message(C, drafting(), 3.2)
    way.on_message(C, joined_by(out[0]), 3.2)
    assert way.draft is not None


def test_the_first_chain_waits_for_it() -> None:
    way = membership(C)
    way.connect(0.0)
    way.on_message(A, welcome(0, worker="a"), 0.0)
    way.on_message(B, welcome(1, worker="b"), 0.0)
    assert way.phase is Phase.GREETING
    way.tick(30.0)
    assert isinstance(way.failure, WorkerUnreachableError)
    assert way.failure.addresses == (C,)
