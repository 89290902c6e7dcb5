"""The chain goes on by itself: what the last stage makes of a sampled step, and where it sends it, as exact lists of instructions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.errors import InferenceError
from langchain_pshard.core.messages import (
    MAX_STEP_ID,
    MAX_STEPS_AHEAD,
    ClientId,
    Close,
    Epoch,
    Leave,
    MicroBatch,
    Slice,
    SliceKind,
    SliceResult,
    StageTiming,
    Step,
    StepFailed,
    StepId,
    StepResult,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.numerics import DType
from langchain_pshard.transport.hub import Link
from tests.support.fake_stages import HIDDEN, VOCAB, make_identity, row, step
from tests.support.worker_bench import ANN, BOB, ME, NEXT, RING_TWO, Bench, join, key, request
from workers.instructions import CloseStream, Forward, Instruction, Reply
from workers.stage import Stage, StageShape

ALONE = ((ME, "tcp://127.0.0.1:1"),)
NO_LOGITS = np.zeros((0, VOCAB), np.float32)
AT_ONCE = StageTiming(0, 0)


def said(stream: int, *tokens: int) -> SliceResult:
    return SliceResult(StreamId(stream), pack_tokens(tokens))


def result(step_id: int, *results: SliceResult, timings: tuple[StageTiming, ...] = (AT_ONCE,)) -> StepResult:
    return StepResult(epoch=Epoch(1), step_id=StepId(step_id), results=results, timings=timings)


def failures(out: list[Instruction]) -> list[tuple[int, int, str]]:
    """(step, stream, code) of everything that failed; nothing else is among `out`."""
    found: list[tuple[int, int, str]] = []
    for each in out:
        assert isinstance(each, Reply)
        assert isinstance(each.message, StepFailed)
        found += [(each.message.step_id, failure.stream, failure.code) for failure in each.message.failures]
    return found


def answer(bench: Bench, *results: SliceResult) -> list[Instruction]:
    """The last stage computes what waits, and says this."""
    return bench.worker.sampled(bench.run(), results, NO_LOGITS, started_s=bench.now_s, ended_s=bench.now_s)


def alone(num_stages: int = 1) -> Bench:
    """One worker that serves every stage."""
    bench = Bench(num_stages, range(num_stages))
    bench.join_alone(ALONE * num_stages, is_ring=True)
    return bench


def last_of_two() -> Bench:
    """The second of two workers; what comes from the first brings its rows along."""
    bench = Bench(2, (1,))
    bench.join_ring()
    return bench


def rows(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.zeros((count, HIDDEN), np.float32)


# --- what follows a step ---------------------------------------------------------------------------------------------


def last_stage(*end_tokens: int) -> Stage:
    stage = Stage(StageShape(stage_idx=0, is_last=True, vocab_size=VOCAB, row_width=HIDDEN, boundary=DType.F32))
    for stream in (1, 2, 3):
        stage.open(key(stream), 32, end_tokens=end_tokens)
    return stage


def test_the_token_that_was_sampled_is_the_row_that_follows() -> None:
    stage = last_stage(2, 9)
    sampled = step(
        7,
        row(1, 4, [5], num_ahead=3),
        row(2, 0, [3, 4, 5], kind=SliceKind.PREFILL, num_ahead=1),  # a prompt's last chunk may as well
        row(3, 8, [1]),
    )
    assert stage.step_ahead(sampled, [said(1, 40), said(2, 41), said(3, 42)]) == Step(
        client=ClientId("ann"),
        epoch=Epoch(1),
        step_id=StepId(8),
        slices=(row(1, 5, [40], num_ahead=2), row(2, 3, [41])),
    )


@pytest.mark.parametrize("step_id", [-1, MAX_STEP_ID + 1, 2**64 - 1])
def test_a_step_whose_successors_could_not_be_numbered_is_refused(step_id: int) -> None:
    bench = alone()
    bench.open()
    assert failures(bench.send(step(step_id, row(1, 0, [5], num_ahead=1)))) == [(step_id, 1, "protocol")]
    assert bench.send(step(MAX_STEP_ID - 1, row(1, 0, [5], num_ahead=1))) == []
    answer(bench, said(1, 6))
    assert bench.run().steps[0].step.step_id == MAX_STEP_ID


def test_it_ends_where_the_client_said_and_at_every_end_token() -> None:
    stage = last_stage(2, 9)
    assert stage.step_ahead(step(1, row(1, 4, [5])), [said(1, 40)]) is None
    assert stage.step_ahead(step(2, row(1, 4, [5], num_ahead=3), row(2, 4, [5], num_ahead=3)), [said(1, 2), said(2, 9)]) is None
    following = stage.step_ahead(step(3, row(1, 4, [2], num_ahead=3), row(2, 4, [5], num_ahead=3)), [said(1, 40), said(2, 9)])
    assert following is not None
    assert following.slices == (row(1, 5, [40], num_ahead=2),)  # what was sent does not count, only what was said


def test_a_stream_without_end_tokens_goes_on_past_anything() -> None:
    stage = last_stage()
    assert stage.step_ahead(step(1, row(1, 4, [5], num_ahead=1)), [said(1, 2)]) is not None


def test_end_tokens_of_several_bytes() -> None:
    wide = Stage(StageShape(stage_idx=0, is_last=True, vocab_size=1 << 20, row_width=HIDDEN, boundary=DType.F32))
    wide.open(key(1), 32, end_tokens=(0x10203,))
    assert wide.step_ahead(step(1, row(1, 4, [5], num_ahead=1)), [said(1, 0x10203)]) is None
    assert wide.step_ahead(step(2, row(1, 4, [5], num_ahead=1)), [said(1, 0x203)]) is not None


def test_a_repeated_step_goes_on_once() -> None:
    stage = last_stage()
    first = step(5, row(1, 4, [5], num_ahead=3))
    assert stage.step_ahead(first, [said(1, 40)]) is not None
    assert stage.step_ahead(first, [said(1, 40)]) is None
    assert stage.step_ahead(step(4, row(1, 3, [5], num_ahead=3)), [said(1, 40)]) is None
    assert stage.step_ahead(step(6, row(1, 5, [40], num_ahead=2)), [said(1, 41)]) is not None


# --- one worker serves all stages ------------------------------------------------------------------------------------


def test_a_worker_alone_goes_on_without_a_message() -> None:
    bench = alone()
    bench.open(1)
    assert bench.send(step(1, row(1, 0, [3, 4], kind=SliceKind.PREFILL, num_ahead=2))) == []
    for step_id, (start, tokens), says in ((1, (0, [3, 4]), 10), (2, (2, [10]), 11), (3, (3, [11]), 12)):
        run = bench.run()
        assert [(piece.start, list(piece.tokens)) for piece in run.slices] == [(start, tokens)]
        out = bench.worker.sampled(run, [said(1, says)], NO_LOGITS, started_s=bench.now_s, ended_s=bench.now_s)
        assert out == [Reply(link=ANN, message=result(step_id, said(1, says)))]
    assert bench.worker.next_run() == []
    assert not bench.worker.has_work


def test_its_timings_begin_anew_and_it_waits_from_when_it_was_made() -> None:
    bench = alone(2)
    bench.open(1)
    bench.send(step(1, row(1, 0, [3], num_ahead=1)))
    assert bench.worker.computed(bench.run(), rows(1), started_s=100.0, ended_s=100.25) == []
    out = bench.worker.sampled(bench.run(), [said(1, 10)], NO_LOGITS, started_s=100.5, ended_s=101.0)
    assert out == [Reply(link=ANN, message=result(1, said(1, 10), timings=(StageTiming(0, 250_000), StageTiming(250_000, 500_000))))]
    run = bench.run()
    assert run.stage_idx == 0
    assert run.steps[0].step.timings == ()
    assert run.steps[0].arrived_s == 101.0


def test_steps_of_several_clients_go_on_together_each_by_its_own_rules() -> None:
    bench = alone()
    bench.join_alone(ALONE, client="bob", link=BOB, is_ring=True)
    bench.open(1, end_tokens=[9])
    bench.open(2, end_tokens=[9])
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [3], num_ahead=5), row(2, 0, [4], num_ahead=5)))
    bench.send(step(30, row(1, 0, [5], num_ahead=1), client="bob"), link=BOB)
    answer(bench, said(1, 10), said(2, 9), said(1, 9))
    run = bench.run()
    assert [(one.step.client, one.step.step_id) for one in run.steps] == [("ann", 2), ("bob", 31)]
    assert [(piece.key, piece.start, list(piece.tokens)) for piece in run.slices] == [(key(1), 1, [10]), (key(1, "bob"), 1, [9])]
    out = bench.worker.sampled(run, [said(1, 11), said(1, 12)], NO_LOGITS, started_s=bench.now_s, ended_s=bench.now_s)
    assert out == [Reply(link=ANN, message=result(2, said(1, 11))), Reply(link=BOB, message=result(31, said(1, 12)))]
    [left] = bench.run().steps  # bob's has ended
    assert (left.step.client, left.step.step_id, left.step.slices) == ("ann", 3, (row(1, 2, [11], num_ahead=3),))


def test_more_than_was_set_aside_is_told_and_ends_there() -> None:
    bench = alone()
    bench.open(1, num_tokens=3)
    bench.send(step(1, row(1, 0, [3, 4], kind=SliceKind.PREFILL, num_ahead=9)))
    for step_id in (1, 2):
        assert answer(bench, said(1, 10)) == [Reply(link=ANN, message=result(step_id, said(1, 10)))]
    assert failures(bench.worker.next_run()) == [(3, 1, "protocol")]
    assert not bench.worker.has_work


def test_an_inference_that_fails_ends_it_and_one_that_is_run_again_does_not() -> None:
    bench = alone()
    bench.join_alone(ALONE, client="bob", link=BOB, is_ring=True)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [3], num_ahead=2)))
    bench.send(step(1, row(1, 0, [4], num_ahead=2), client="bob"), link=BOB)
    answer(bench, said(1, 10), said(1, 11))
    assert bench.worker.failed(bench.run(), InferenceError("broken")) == []  # both, merged
    assert failures(bench.worker.failed(bench.run(), InferenceError("broken"))) == [(2, 1, "inference")]  # ann's, alone
    assert answer(bench, said(1, 12)) == [Reply(link=BOB, message=result(2, said(1, 12)))]
    assert [one.step.client for one in bench.run().steps] == ["bob"]


def test_a_stream_closed_in_the_middle_is_dropped_and_the_others_go_on() -> None:
    bench = alone()
    for stream in (1, 2):
        bench.open(stream)
    bench.send(step(1, row(1, 0, [3], num_ahead=5), row(2, 0, [4], num_ahead=5)))
    answer(bench, said(1, 10), said(2, 11))
    assert bench.hear(Close(client=ClientId("ann"), epoch=Epoch(1), streams=(StreamId(1),))) == [CloseStream(stage_idx=0, key=key(1))]
    assert answer(bench, said(2, 12)) == [Reply(link=ANN, message=result(2, said(2, 12)))]
    bench.hear(Close(client=ClientId("ann"), epoch=Epoch(1), streams=(StreamId(2),)))
    assert bench.worker.next_run() == []
    assert (bench.worker.num_streams, bench.worker.has_work, bench.worker.stage(0).num_streams) == (0, False, 0)


@pytest.mark.parametrize("message", [Leave(client=ClientId("ann")), join(2, ALONE, is_ring=True)])
def test_a_client_that_leaves_or_begins_anew_takes_its_steps_along(message: Leave) -> None:
    bench = alone()
    bench.open(1)
    bench.send(step(1, row(1, 0, [3], num_ahead=5)))
    answer(bench, said(1, 10))
    assert CloseStream(stage_idx=0, key=key(1)) in bench.hear(message)
    assert bench.worker.next_run() == []
    assert not bench.worker.has_work


def test_a_worker_that_drains_lets_open_streams_go_on() -> None:
    bench = alone()
    bench.open(1)
    bench.send(step(1, row(1, 0, [3], num_ahead=2)))
    bench.worker.drain()
    for step_id in (1, 2, 3):
        assert answer(bench, said(1, 10)) == [Reply(link=ANN, message=result(step_id, said(1, 10)))]
    assert bench.worker.next_run() == []


# --- two workers -----------------------------------------------------------------------------------------------------


def test_the_next_step_leaves_for_the_first_worker_before_the_client_hears_of_this_one() -> None:
    bench = last_of_two()
    bench.join_ring("bob", BOB)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(4, row(1, 2, [3], num_ahead=2)), step(9, row(1, 0, [4], num_ahead=1), client="bob"), stage_idx=1, tensor=rows(2))
    assert failures(bench.worker.next_run()[:1]) == [(4, 1, "state-lost")]  # it holds nothing yet
    bench.send(step(5, row(1, 0, [3], num_ahead=2)), step(9, row(1, 0, [4], num_ahead=1), client="bob"), stage_idx=1, tensor=rows(2))
    forward, *replies = answer(bench, said(1, 10), said(1, 11))
    assert isinstance(forward, Forward)
    assert (forward.link, forward.hidden) == (NEXT, None)
    assert forward.message == MicroBatch(
        stage_idx=0, steps=(step(6, row(1, 1, [10], num_ahead=1)), step(10, row(1, 1, [11]), client="bob")), hidden=None
    )
    assert replies == [Reply(link=ANN, message=result(5, said(1, 10))), Reply(link=BOB, message=result(9, said(1, 11)))]


def test_steps_part_where_their_clients_have_other_first_workers() -> None:
    bench = last_of_two()
    third = Link(8)
    bench.hear(join(chain=(("third", "tcp://127.0.0.1:3"), RING_TWO[1]), client="bob", is_ring=True), BOB)
    bench.worker.dialled("tcp://127.0.0.1:3", third, bench.now_s)
    bench.hear(make_identity("third", 2, 0).welcome(request(2)), third)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    slices = (row(1, 0, [3], num_ahead=1),)
    bench.send(step(1, *slices), step(5, *slices, client="bob"), stage_idx=1, tensor=rows(2))
    out = answer(bench, said(1, 10), said(1, 11))
    for each, link, following in zip(
        out[:2], (NEXT, third), (step(2, row(1, 1, [10])), step(6, row(1, 1, [11]), client="bob")), strict=True
    ):
        assert isinstance(each, Forward)
        assert (each.link, each.message, each.hidden) == (link, MicroBatch(stage_idx=0, steps=(following,), hidden=None), None)
    assert [reply.link for reply in out[2:] if isinstance(reply, Reply)] == [ANN, BOB]


def test_nobody_goes_on_nothing_is_sent() -> None:
    bench = last_of_two()
    bench.open(1)
    bench.send(step(1, row(1, 0, [3])), stage_idx=1, tensor=rows(1))
    assert answer(bench, said(1, 10)) == [Reply(link=ANN, message=result(1, said(1, 10)))]


def test_a_first_worker_that_cannot_be_reached_is_told_to_each_client() -> None:
    bench = last_of_two()
    bench.join_ring("bob", BOB)
    bench.open(1)
    bench.open(2)
    bench.open(1, client="bob", link=BOB)
    slices = (row(1, 0, [3], num_ahead=2), row(2, 0, [3], num_ahead=2))
    bench.send(step(1, *slices), step(7, row(1, 0, [4], num_ahead=1), client="bob"), stage_idx=1, tensor=rows(3))
    forward = answer(bench, said(1, 10), said(2, 11), said(1, 12))[0]
    assert isinstance(forward, Forward)
    told = bench.worker.not_sent(forward)
    assert [reply.link for reply in told if isinstance(reply, Reply)] == [ANN, BOB]
    assert failures(told) == [(2, 1, "worker-lost"), (2, 2, "worker-lost"), (8, 1, "worker-lost")]
    text = f"worker {ME} cannot reach the next one, which serves stage 0"
    assert isinstance(told[0], Reply)
    assert isinstance(told[0].message, StepFailed)
    assert told[0].message.failures[0] == StreamFailure(StreamId(1), "worker-lost", text)


def test_on_the_first_worker_a_row_of_a_closed_stream_is_refused_and_one_of_an_old_epoch_vanishes() -> None:
    bench = Bench(2)
    bench.join_via_next()
    bench.reached(bench.hear(join(2, is_ring=True)), 2, 1)
    bench.open(1, epoch=2)
    assert bench.send(step(8, row(1, 4, [5], num_ahead=3)), link=NEXT) == []  # of epoch 1
    out = bench.send(step(9, row(1, 0, [5], num_ahead=3), row(2, 4, [6], num_ahead=3), epoch=2), link=NEXT)
    assert failures(out) == [(9, 2, "state-lost")]
    assert [piece.key for piece in bench.run().slices] == [key(1)]


def test_the_same_worker_at_both_ends_hands_over_to_itself() -> None:
    bench = Bench(3, (0, 2))
    chain = ((ME, RING_TWO[0][1]), ("other", RING_TWO[1][1]), (ME, RING_TWO[0][1]))
    bench.reached(bench.hear(join(chain=chain, is_ring=True)), 3, 1)
    bench.open(1)
    bench.send(step(1, row(1, 0, [3], num_ahead=1)))
    [forward] = bench.worker.computed(bench.run(), rows(1), started_s=bench.now_s, ended_s=bench.now_s)
    assert isinstance(forward, Forward)
    bench.send(*forward.message.steps, stage_idx=2, tensor=rows(1), link=NEXT)
    timings = (AT_ONCE, AT_ONCE)
    assert answer(bench, said(1, 10)) == [Reply(link=ANN, message=result(1, said(1, 10), timings=timings))]
    run = bench.run()
    assert (run.stage_idx, [list(piece.tokens) for piece in run.slices]) == (0, [[10]])


# --- nonsense --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        row(1, 0, [3], num_ahead=-1),
        row(1, 0, [3], num_ahead=MAX_STEPS_AHEAD + 1),
        row(1, 0, [3], num_sampled=0, num_ahead=1),
        row(1, 0, [3, 4], num_sampled=2, num_ahead=1),
    ],
)
def test_a_malformed_number_of_steps_ahead_is_refused_and_its_neighbours_go_on(bad: Slice) -> None:
    bench = alone()
    bench.open(1)
    bench.open(2)
    assert failures(bench.send(step(1, bad, row(2, 0, [4], num_ahead=MAX_STEPS_AHEAD)))) == [(1, 1, "protocol")]
    assert answer(bench, said(2, 10)) == [Reply(link=ANN, message=result(1, said(2, 10)))]
    assert [list(piece.tokens) for piece in bench.run().slices] == [[10]]


@pytest.mark.parametrize("num_ahead", [1, -1])
def test_a_chain_that_is_no_ring_takes_no_steps_by_itself(num_ahead: int) -> None:
    bench = Bench(1)
    bench.join_alone(ALONE)
    bench.join_alone(ALONE, client="bob", link=BOB, is_ring=True)
    bench.open(1)
    bench.open(2)
    bench.open(1, client="bob", link=BOB)
    bad, good = step(1, row(1, 0, [3], num_ahead=num_ahead), row(2, 0, [4])), step(1, row(1, 0, [5], num_ahead=1), client="bob")
    assert failures(bench.send(bad, good)) == [(1, 1, "protocol"), (1, 2, "protocol")]
    assert [piece.key for piece in bench.run().slices] == [key(1, "bob")]
    bench.send(msgspec.structs.replace(bad, slices=bad.slices[1:]))
    assert [piece.key for piece in bench.run().slices] == [key(2)]


def test_a_last_stage_refuses_what_was_not_joined_as_a_ring_there() -> None:
    """Whatever the first worker was told."""
    bench = Bench(2, (1,))
    bench.join_alone(RING_TWO)
    bench.open(1)
    assert failures(bench.send(step(1, row(1, 0, [3], num_ahead=1)), stage_idx=1, tensor=rows(1))) == [(1, 1, "protocol")]
