"""A chain joined as a ring: the last worker reaches the first one, as long as some client needs it, and nobody else does anything more."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.messages import (
    PROTOCOL_VERSION,
    ClientId,
    Hello,
    Joined,
    Leave,
    Refused,
    SliceResult,
    StepResult,
    StreamId,
)
from tests.support.fake_stages import HIDDEN, VOCAB, make_identity, row, step
from tests.support.worker_bench import ANN, BOB, CHAIN_TWO, ME, NEXT, RING_TWO, Bench, join, refusal, request
from workers.instructions import Dial, Forward, HangUp, Instruction, Reply
from workers.membership import JOIN_TIMEOUT_S, LEASE_S, RING_TIMEOUT_S

FIRST = RING_TWO[0][1]


def hello(number: int) -> Reply:
    return Reply(link=NEXT, message=Hello(request=request(number), protocol=PROTOCOL_VERSION, software="1.0"))


def joined(number: int, *, is_ring: bool = True) -> Reply:
    return Reply(link=ANN, message=Joined(request=request(number), is_ring=is_ring))


def last_worker() -> Bench:
    return Bench(2, (1,))


def asking_worker() -> Bench:
    """The last worker of a ring, which has asked the first who it is."""
    bench = last_worker()
    assert bench.hear(join(chain=RING_TWO, is_ring=True)) == [Dial(address=FIRST)]
    assert bench.worker.dialled(FIRST, NEXT, bench.now_s) == [hello(1)]
    return bench


def test_the_last_worker_has_joined_when_the_first_has_said_who_it_is() -> None:
    bench = asking_worker()
    assert bench.hear(make_identity("other", 2, 0).welcome(request(1)), NEXT) == [joined(10)]


def test_without_a_ring_the_last_worker_needs_nobody() -> None:
    assert last_worker().hear(join(chain=RING_TWO)) == [joined(10, is_ring=False)]


def test_where_another_worker_answers_for_the_first_the_chain_is_no_ring() -> None:
    bench = asking_worker()
    assert bench.hear(make_identity("stranger", 2, 0).welcome(request(1)), NEXT) == [HangUp(link=NEXT), joined(10, is_ring=False)]
    assert bench.hear(join(chain=RING_TWO, number=11, is_ring=True)) == [joined(11, is_ring=False)]


def test_where_the_first_worker_speaks_another_protocol_the_chain_is_no_ring() -> None:
    bench = asking_worker()
    refused = Refused(request=request(1), code="protocol", message="upgrade")
    assert bench.hear(refused, NEXT) == [HangUp(link=NEXT), joined(10, is_ring=False)]


def sampled(bench: Bench, step_id: int, num_ahead: int) -> list[Instruction]:
    """What follows from a row of stream 1 at the last stage."""
    rows = np.zeros((1, HIDDEN), dtype=np.float32)
    assert bench.send(step(step_id, row(1, 0, [5], num_ahead=num_ahead)), stage_idx=1, tensor=rows) == []
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    return bench.worker.sampled(bench.run(), [SliceResult(StreamId(1), pack_tokens([6]))], logits, started_s=1.0, ended_s=2.0)


def test_where_the_first_worker_cannot_be_reached_the_chain_is_no_ring_and_does_not_go_on_by_itself() -> None:
    bench = asking_worker()
    assert bench.worker.time_passed(bench.now_s + RING_TIMEOUT_S) == [HangUp(link=NEXT), joined(10, is_ring=False)]
    bench.open()
    [told] = sampled(bench, 1, num_ahead=1)
    assert isinstance(told, Reply)
    assert isinstance(told.message, StepResult)


def test_clients_hear_that_the_way_to_the_first_worker_broke_and_what_was_granted_before_is_answered() -> None:
    bench = last_worker()
    bench.join_ring()
    bench.hear(join(chain=RING_TWO, client="cat"), BOB)  # asked for no ring, and hears nothing
    bench.open()
    forward, _ = sampled(bench, 1, num_ahead=3)
    assert isinstance(forward, Forward)
    assert bench.worker.lost(NEXT) == [HangUp(link=NEXT), joined(10, is_ring=False)]
    assert bench.worker.lost(NEXT) == []
    [told] = sampled(bench, 2, num_ahead=2)
    assert isinstance(told, Reply)
    assert isinstance(told.message, StepResult)


def test_a_broken_way_to_the_next_stage_is_the_clients_to_notice() -> None:
    bench = Bench()
    bench.join_via_next()
    assert bench.worker.lost(NEXT) == []


def test_a_next_worker_that_is_also_the_first_is_needed_all_the_same() -> None:
    """The last worker hands stage 2 to the first one: without it there is no chain."""
    other, me = ("other", "tcp://127.0.0.1:1"), (ME, "tcp://127.0.0.1:2")
    bench = Bench(4, (1, 3))
    bench.hear(join(chain=(other, me, other, me), is_ring=True))
    bench.worker.dialled("tcp://127.0.0.1:1", NEXT, bench.now_s)
    told, *rest = bench.worker.time_passed(bench.now_s + JOIN_TIMEOUT_S)
    assert refusal([told]).code == "worker-unreachable"
    assert rest == [HangUp(link=NEXT)]


@pytest.mark.parametrize("leaves", [True, False])
def test_the_link_is_hung_up_when_no_client_needs_the_ring(leaves: bool) -> None:
    bench = last_worker()
    bench.join_ring()
    bench.join_ring("bob", BOB)  # over the same link
    bench.hear(join(chain=RING_TWO, client="cat"), BOB)  # no ring: it needs no link
    if not leaves:
        assert bench.worker.time_passed(bench.now_s + LEASE_S) == [HangUp(link=NEXT)]
        return
    assert bench.hear(Leave(client=ClientId("ann"))) == []
    assert bench.hear(Leave(client=ClientId("bob"))) == [HangUp(link=NEXT)]
    assert bench.worker.num_clients == 1


def test_a_new_epoch_without_a_ring_hangs_up() -> None:
    bench = last_worker()
    bench.join_ring()
    assert bench.hear(join(2, RING_TWO, number=11)) == [HangUp(link=NEXT), joined(11, is_ring=False)]


@pytest.mark.parametrize("was_ring", [True, False])
def test_an_equal_epoch_is_answered_again_and_refused_when_it_says_otherwise_of_the_ring(was_ring: bool) -> None:
    bench = last_worker()
    if was_ring:
        bench.join_ring()
    else:
        bench.join_alone(RING_TWO)
    again = bench.hear(join(chain=RING_TWO, number=11, is_ring=was_ring))
    assert again == [joined(11, is_ring=was_ring)]
    refused = refusal(bench.hear(join(chain=RING_TWO, number=12, is_ring=not was_ring)))
    assert (refused.code, refused.message) == ("protocol", "another chain under the same epoch 1: raise the epoch")
    assert bench.worker.num_clients == 1


def test_the_first_worker_dials_its_next_one_and_nobody_else() -> None:
    bench = Bench()
    assert bench.hear(join(is_ring=True)) == [Dial(address=CHAIN_TWO[1][1])]


def test_a_worker_in_the_middle_dials_its_next_one_and_nobody_else() -> None:
    chain = (("x", "tcp://127.0.0.1:8"), (ME, "tcp://127.0.0.1:9"), ("y", "tcp://127.0.0.1:7"))
    assert Bench(3, (1,)).hear(join(chain=chain, is_ring=True)) == [Dial(address="tcp://127.0.0.1:7")]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_worker_that_serves_all_stages_needs_no_link(num_stages: int) -> None:
    Bench(num_stages, range(num_stages)).join_alone(CHAIN_TWO[:1] * num_stages, is_ring=True)


def test_a_worker_at_both_ends_needs_the_one_between_and_that_one_needs_it() -> None:
    ends, middle = (ME, "tcp://127.0.0.1:1"), ("other", "tcp://127.0.0.1:2")
    assert Bench(3, (0, 2)).hear(join(chain=(ends, middle, ends), is_ring=True)) == [Dial(address="tcp://127.0.0.1:2")]
    assert Bench(3, (1,)).hear(join(chain=(middle, ends, middle), is_ring=True)) == [Dial(address="tcp://127.0.0.1:2")]


def test_two_workers_at_the_ends_of_four_stages_share_one_link_for_both_ways() -> None:
    """The last worker serves stage 1 too, whose next one is the first worker as well."""
    other, me = ("other", "tcp://127.0.0.1:1"), (ME, "tcp://127.0.0.1:2")
    bench = Bench(4, (1, 3))
    assert bench.hear(join(chain=(other, me, other, me), is_ring=True)) == [Dial(address="tcp://127.0.0.1:1")]
    assert bench.worker.dialled("tcp://127.0.0.1:1", NEXT, bench.now_s) == [hello(1)]
    welcome = make_identity("other", 4, 0, 2).welcome(request(1))
    assert bench.hear(welcome, NEXT) == [joined(10)]
    assert bench.hear(Leave(client=ClientId("ann"))) == [HangUp(link=NEXT)]
