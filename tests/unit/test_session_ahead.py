"""A session while the chain goes on by itself: what is sent, and what becomes of streams that end in the middle."""

from __future__ import annotations

import msgspec
import pytest

from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.errors import DeadlineError, ProtocolError, WorkerLostError
from langchain_pshard.core.messages import (
    Epoch,
    Join,
    Joined,
    MicroBatch,
    Open,
    SliceResult,
    StepFailed,
    StepId,
    StepResult,
    StreamFailure,
    StreamId,
)
from tests.support.caller import Caller
from tests.unit.test_chain import A, B
from tests.unit.test_session import Fleet, expected
from tests.unit.test_stream import EOS


def until_steps(fleet: Fleet) -> None:
    while fleet.sent:
        fleet.handle_one()


def running(fleet: Fleet, *numbers: int, max_tokens: int = 200) -> list[Caller]:
    """Streams that the chain goes on with by itself, two tokens or more into their texts, all in one step.

    The numbers are those of texts without an early end token.
    """
    callers = [fleet.submit(number, max_tokens) for number in numbers]
    until_steps(fleet)
    while not all(len(caller.tokens) >= 2 for caller in callers) or any(not piece.num_ahead for piece in fleet.steps[0].slices):
        fleet.answer_step()
        until_steps(fleet)
    assert not any(caller.ends for caller in callers)
    assert len(fleet.steps) == 1
    assert sorted(piece.stream for piece in fleet.steps[0].slices) == sorted(numbers)
    return callers


def long_texts(count: int) -> list[int]:
    """Numbers of streams whose texts have no end token among their first 30."""
    return [number for number in range(1, 60) if EOS not in expected(number, 30)][:count]


def is_idle(fleet: Fleet) -> bool:
    return not fleet.session._turns._flights and not fleet.reserved


@pytest.mark.parametrize(("max_steps_ahead", "num_sent"), [(0, 30), (7, 1 + 4), (64, 1 + 1), (1, 1 + 15)])
def test_one_message_for_many_tokens(max_steps_ahead: int, num_sent: int) -> None:
    fleet = Fleet(max_steps_ahead=max_steps_ahead)
    [number] = long_texts(1)
    caller = fleet.submit(number, 30)
    batches = 0
    while fleet.sent or fleet.steps:
        if fleet.sent:
            batches += isinstance(fleet.sent[0][1], MicroBatch)
            fleet.handle_one()
        else:
            fleet.answer_step()
    assert caller.tokens == expected(number, 30)
    assert batches == num_sent
    assert is_idle(fleet)


def test_the_fleet_is_told_of_the_ring_and_of_what_ends_a_text() -> None:
    for max_steps_ahead, is_ring in ((7, True), (0, False)):
        fleet = Fleet(max_steps_ahead=max_steps_ahead)
        fleet.submit(1)
        said: list[object] = []
        while not fleet.steps:
            said.append(fleet.sent[0][1])
            fleet.handle_one()
        assert [message.is_ring for message in said if isinstance(message, Join)] == [is_ring] * 2
        assert [message.end_tokens for message in said if isinstance(message, Open)] == [(EOS,)] * 2


def test_a_text_that_ends_in_the_middle_leaves_nothing_behind() -> None:
    fleet = Fleet()
    numbers = range(1, 14)
    ended_early = 0
    for number in numbers:
        caller = fleet.submit(number, 60)
        fleet.settle()
        assert caller.tokens == expected(number, 60)
        ended_early += len(caller.tokens) < 60
        assert is_idle(fleet)
    assert ended_early > 5


def test_a_cancel_in_the_middle_takes_the_stream_out_and_the_other_goes_on() -> None:
    fleet = Fleet()
    one, two = long_texts(2)
    gone, there = running(fleet, one, two)
    num_tokens = len(gone.tokens)
    fleet.do(fleet.session.cancel(StreamId(one), fleet.now))
    fleet.settle()
    assert len(gone.tokens) == num_tokens
    assert not gone.ends
    assert there.tokens == expected(two, 200)
    assert is_idle(fleet)


@pytest.mark.parametrize("num_answered", [0, 1, 3])
def test_a_failure_in_the_middle_ends_its_stream_alone(num_answered: int) -> None:
    fleet = Fleet()
    one, two = long_texts(2)
    failing, there = running(fleet, one, two)
    for _ in range(num_answered):
        fleet.answer_step()
    fleet.held.pop(StreamId(one))
    fleet.settle()
    assert [type(end).__name__ for end in failing.ends] == ["StateLostError"]
    assert failing.tokens == expected(one, 200)[: len(failing.tokens)]
    assert there.tokens == expected(two, 200)
    assert is_idle(fleet)


def test_a_link_that_is_gone_is_told_before_the_token_that_would_have_gone_over_it() -> None:
    fleet = Fleet()
    [number] = long_texts(1)
    [caller] = running(fleet, number)
    num_tokens = len(caller.tokens)
    step = fleet.steps.pop()
    failure = StreamFailure(StreamId(number), "worker-lost", "cannot reach the next one")
    fleet.reply(B, StepFailed(epoch=step.epoch, step_id=StepId(step.step_id + 1), stage_idx=0, failures=(failure,)))
    [error] = caller.ends
    assert isinstance(error, WorkerLostError)
    late = SliceResult(StreamId(number), pack_tokens([1]))
    fleet.reply(B, StepResult(epoch=step.epoch, step_id=step.step_id, results=(late,), timings=()))
    fleet.settle()
    assert len(caller.tokens) == num_tokens
    assert is_idle(fleet)
    again = fleet.submit(number, 20)
    fleet.settle()
    assert again.tokens == expected(number, 20)


def test_a_lost_answer_is_a_deadline_and_what_comes_behind_it_is_not_taken_for_it() -> None:
    fleet = Fleet(step_timeout_s=10.0)
    [number] = long_texts(1)
    [caller] = running(fleet, number)
    step = fleet.steps[0]
    num_tokens = len(caller.tokens)
    fleet.do_not_tell = True
    fleet.answer_step()
    fleet.do_not_tell = False
    fleet.settle()  # the rest of the run
    assert len(caller.tokens) == num_tokens
    assert fleet.seen >= {(step.epoch, StepId(step.step_id + later)) for later in range(step.slices[0].num_ahead + 1)}
    while not caller.ends:
        fleet.pass_time(1.0)
        fleet.settle()
    assert isinstance(caller.ends[0], DeadlineError)
    assert caller.tokens == expected(number, 200)[:num_tokens]
    assert is_idle(fleet)


def test_an_answer_out_of_the_vocabulary_ends_its_stream_and_the_run_of_the_other_goes_on() -> None:
    fleet = Fleet()
    one, two = long_texts(2)
    failing, there = running(fleet, one, two)
    step = fleet.steps[0]
    bad = tuple(SliceResult(piece.stream, pack_tokens([999])) for piece in step.slices if piece.stream == one)
    good = tuple(fleet._run(piece) for piece in step.slices if piece.stream == two)
    fleet.do_not_tell = True
    fleet.answer_step()
    fleet.do_not_tell = False
    fleet.reply(B, StepResult(epoch=step.epoch, step_id=step.step_id, results=(*bad, *good), timings=()))
    fleet.settle()
    assert isinstance(failing.ends[0], ProtocolError)
    assert there.tokens == expected(two, 200)
    assert is_idle(fleet)


def test_a_new_epoch_in_the_middle_begins_anew_and_old_answers_count_for_nothing() -> None:
    fleet = Fleet()
    one, two = long_texts(2)
    [lost] = running(fleet, one)
    old = fleet.steps[0]
    fleet.do(fleet.session.on_lost(A, fleet.now))
    until_steps(fleet)
    assert isinstance(lost.ends[0], WorkerLostError)
    caller = fleet.submit(two, 60)
    while fleet.epoch != Epoch(2) or not any(step.epoch == 2 for step in fleet.steps):
        fleet.handle_one()
    ids = [step.step_id for step in fleet.steps if step.epoch == 2]
    assert min(ids) > old.step_id + old.slices[0].num_ahead  # not even ids are used again
    fleet.settle()
    assert caller.tokens == expected(two, 60)
    assert is_idle(fleet)


def ring_breaks(fleet: Fleet) -> None:
    """The last worker says that it cannot reach the first any more."""
    fleet.reply(B, Joined(request=fleet.session._membership._members[B].request, is_ring=False))


@pytest.mark.parametrize("comes_late", [False, True])
def test_when_the_way_to_the_first_worker_breaks_texts_go_on_over_the_client(comes_late: bool) -> None:
    fleet = Fleet()
    numbers = long_texts(2)
    callers = running(fleet, *numbers, max_tokens=30)
    [lost] = fleet.steps
    fleet.steps.clear()
    ring_breaks(fleet)
    until_steps(fleet)
    [sent] = fleet.steps
    assert sent.step_id > lost.step_id + lost.slices[0].num_ahead  # every stage takes what is still on its way for a late duplicate
    assert [piece.num_ahead for piece in sent.slices] == [0, 0]
    if comes_late:
        fleet.steps.insert(0, msgspec.structs.replace(lost, slices=tuple(msgspec.structs.replace(one, num_ahead=0) for one in lost.slices)))
    fleet.settle()
    assert [caller.tokens for caller in callers] == [expected(number, 30) for number in numbers]
    later = fleet.submit(numbers[0], 12)
    fleet.settle()
    assert later.tokens == expected(numbers[0], 12)
    assert is_idle(fleet)


def test_a_chain_in_which_every_stream_is_stuck_is_joined_anew() -> None:
    fleet = Fleet(step_timeout_s=5.0)
    numbers = long_texts(2)
    callers = running(fleet, *numbers)
    fleet.steps.clear()
    epoch = fleet.epoch
    for _ in range(4):
        fleet.pass_time(1.5)
        until_steps(fleet)
    assert [type(caller.ends[0]) for caller in callers] == [DeadlineError, DeadlineError]
    later = fleet.submit(numbers[0], 12)
    fleet.settle()
    assert later.tokens == expected(numbers[0], 12)
    assert fleet.epoch == epoch + 1


def test_a_stuck_stream_beside_others_that_get_on_costs_them_nothing() -> None:
    fleet = Fleet(step_timeout_s=5.0)
    [number, other] = long_texts(2)
    [caller] = running(fleet, number)
    fleet.steps.clear()
    epoch = fleet.epoch
    beside = fleet.submit(other, 200)
    for _ in range(8):
        fleet.pass_time(1.0)
        until_steps(fleet)
        fleet.answer_step()
    assert [type(end) for end in caller.ends] == [DeadlineError]
    fleet.settle()
    assert beside.tokens == expected(other, 200)
    assert fleet.epoch == epoch
