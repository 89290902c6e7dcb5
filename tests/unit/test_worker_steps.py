"""The way of steps through a worker, as exact lists of instructions."""

from __future__ import annotations

import msgspec
import numpy as np

from langchain_pshard.core.codec import pack_tokens, tensor_spec
from langchain_pshard.core.errors import InferenceError
from langchain_pshard.core.messages import (
    Epoch,
    MicroBatch,
    Slice,
    SliceResult,
    StageTiming,
    Step,
    StepFailed,
    StepResult,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.numerics import DType, TensorSpec
from langchain_pshard.transport.hub import Link
from tests.support.fake_stages import HIDDEN, VOCAB, make_identity, row, step
from tests.support.worker_bench import ANN, BOB, CHAIN_TWO, NEXT, Bench, join, key, request
from workers.instructions import Forward, Instruction, Reply

NO_LOGITS = np.zeros((0, VOCAB), np.float32)


def failed(out: list[Instruction]) -> StepFailed:
    assert len(out) == 1
    assert isinstance(out[0], Reply)
    assert isinstance(out[0].message, StepFailed)
    return out[0].message


def test_steps_of_strangers_and_old_epochs_vanish_and_of_new_epochs_have_lost_state() -> None:
    bench = Bench(1)
    assert bench.send(step(1, row(1, 0, [1]))) == []
    bench.join_alone([CHAIN_TWO[0]], epoch=2)
    assert bench.send(step(1, row(1, 0, [1]), epoch=1)) == []
    assert bench.worker.next_run() == []
    told = failed(bench.send(step(4, row(1, 0, [1]), epoch=3)))
    assert (told.epoch, told.step_id, told.stage_idx, told.failures[0].code) == (3, 4, 0, "state-lost")


def test_a_stage_not_served_or_a_wrong_tensor_fails_the_whole_step() -> None:
    bench = Bench(2)
    bench.join_via_next()
    bench.open(1)
    assert failed(bench.send(step(1, row(1, 0, [1])), stage_idx=1)).failures[0].code == "protocol"
    tensor = np.zeros((1, HIDDEN), np.float32)
    assert failed(bench.send(step(2, row(1, 0, [1])), tensor=tensor)).failures[0].code == "protocol"
    assert bench.worker.next_run() == []
    assert bench.worker.num_malformed == 2


def test_merged_results_go_on_together_with_their_timings() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    bench.hear(join(client="bob"), BOB)
    bench.hear(make_identity("other", 2, 1).welcome(request(2)), NEXT)
    bench.open(1, client="bob", link=BOB)
    ann, bob = step(1, row(1, 0, [1, 2])), step(8, row(1, 0, [3]), client="bob")
    bench.send(ann)
    bench.now_s += 0.25
    bench.send(bob, link=BOB)
    run = bench.run()
    assert [piece.key for piece in run.slices] == [key(1), key(1, "bob")]
    hidden = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    out = bench.worker.computed(run, hidden, started_s=100.5, ended_s=101.0)
    assert len(out) == 1
    assert isinstance(out[0], Forward)
    assert out[0].link == NEXT
    assert out[0].hidden is hidden
    assert out[0].message == MicroBatch(
        stage_idx=1,
        steps=(
            Step(client=ann.client, epoch=ann.epoch, step_id=ann.step_id, slices=ann.slices, timings=(StageTiming(500_000, 500_000),)),
            Step(client=bob.client, epoch=bob.epoch, step_id=bob.step_id, slices=bob.slices, timings=(StageTiming(250_000, 500_000),)),
        ),
        hidden=tensor_spec(hidden),
    )
    told = bench.worker.not_sent(out[0])
    assert [reply.link for reply in told if isinstance(reply, Reply)] == [ANN, BOB]
    assert failed(told[:1]).failures[0].code == "worker-lost"


def test_steps_part_where_their_clients_chains_do() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    bench.hear(join(1, [CHAIN_TWO[0], ("third", "tcp://127.0.0.1:3")], client="bob"), BOB)
    third = Link(8)
    bench.worker.dialled("tcp://127.0.0.1:3", third, bench.now_s)
    bench.hear(make_identity("third", 2, 1).welcome(request(2)), third)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [1])), step(2, row(1, 0, [2, 3]), client="bob"))
    hidden = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    out = bench.worker.computed(bench.run(), hidden, started_s=100.0, ended_s=100.0)
    assert [forward.link for forward in out if isinstance(forward, Forward)] == [NEXT, third]
    for forward, rows in zip(out, (hidden[:1], hidden[1:]), strict=True):
        assert isinstance(forward, Forward)
        np.testing.assert_array_equal(forward.hidden, rows)


def test_a_worker_hands_over_to_itself_and_the_last_stage_answers_each_client() -> None:
    bench = Bench(2, (0, 1))
    bench.join_alone([CHAIN_TWO[0]] * 2)
    bench.join_alone([CHAIN_TWO[0]] * 2, client="bob", link=BOB)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [1, 2])), step(5, row(1, 0, [3]), client="bob"))
    hidden = np.zeros((3, HIDDEN), np.float32)
    assert bench.worker.computed(bench.run(), hidden, started_s=100.0, ended_s=100.001) == []
    run = bench.run()
    assert run.stage_idx == 1
    results = [SliceResult(StreamId(1), pack_tokens([7])), SliceResult(StreamId(1), pack_tokens([8]))]
    timings = (StageTiming(0, 1000), StageTiming(1000, 1000))
    assert bench.worker.sampled(run, results, NO_LOGITS, started_s=100.002, ended_s=100.003) == [
        Reply(link=ANN, message=StepResult(epoch=Epoch(1), step_id=step(1).step_id, results=(results[0],), timings=timings)),
        Reply(link=BOB, message=StepResult(epoch=Epoch(1), step_id=step(5).step_id, results=(results[1],), timings=timings)),
    ]


def test_logits_go_to_those_who_asked_for_them() -> None:
    """Two steps in one inference, slices that ask beside slices that do not, each with rows of its own."""
    bench = Bench(2, (0, 1), allows_logits=True)
    bench.join_alone([CHAIN_TWO[0]] * 2)
    bench.join_alone([CHAIN_TWO[0]] * 2, client="bob", link=BOB)
    for stream in (1, 2, 3):
        bench.open(stream)
    bench.open(1, client="bob", link=BOB)
    slices = [asking(row(1, 0, [1, 2], num_sampled=2)), row(2, 0, [3, 4], num_sampled=1), asking(row(3, 0, [5], num_sampled=1))]
    bench.send(step(1, *slices), step(5, row(1, 0, [6]), client="bob"))
    assert bench.worker.computed(bench.run(), np.zeros((6, HIDDEN), np.float32), started_s=100.0, ended_s=100.0) == []
    run = bench.run()
    results = [SliceResult(piece.key.stream, pack_tokens([7] * piece.num_sampled)) for piece in run.slices]
    logits = np.arange(5 * VOCAB, dtype=np.float32).reshape(5, VOCAB)
    ann, bob = bench.worker.sampled(run, results, logits, started_s=100.0, ended_s=100.0)
    assert isinstance(ann, Reply)
    assert isinstance(ann.message, StepResult)
    assert ann.message.logits == TensorSpec(DType.F32, (3, VOCAB))
    assert ann.message.logits_of == (StreamId(1), StreamId(3))
    np.testing.assert_array_equal(ann.tensor, logits[[0, 1, 3]])
    assert isinstance(bob, Reply)
    assert isinstance(bob.message, StepResult)
    assert (bob.message.logits, bob.tensor) == (None, None)


def asking(piece: Slice) -> Slice:
    return msgspec.structs.replace(piece, returns_logits=True)


def test_a_failed_inference_reaches_only_the_client_whose_step_fails_alone() -> None:
    bench = Bench(1)
    bench.join_alone([CHAIN_TWO[0]])
    bench.join_alone([CHAIN_TWO[0]], client="bob", link=BOB)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [1])), step(2, row(1, 0, [2]), client="bob"))
    assert bench.worker.failed(bench.run(), InferenceError("broken")) == []
    failure = StreamFailure(StreamId(1), "inference", "stage 0: broken")
    assert bench.worker.failed(bench.run(), InferenceError("broken")) == [
        Reply(link=ANN, message=StepFailed(epoch=Epoch(1), step_id=step(1).step_id, stage_idx=0, failures=(failure,)))
    ]
    result = [SliceResult(StreamId(1), pack_tokens([8]))]
    out = bench.worker.sampled(bench.run(), result, NO_LOGITS, started_s=100.0, ended_s=100.0)
    assert [reply.link for reply in out if isinstance(reply, Reply)] == [BOB]
