"""The one step rule, the checks before it, and the merging of steps, as one stage applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from langchain_pshard.core.codec import MAX_LOGITS_BYTES
from langchain_pshard.core.messages import Slice, SliceKind, StreamFailure, StreamId
from langchain_pshard.core.numerics import DType
from tests.support.fake_stages import HIDDEN, VOCAB, row, step
from workers.instructions import Run
from workers.runners.runner import StreamKey
from workers.stage import MAX_STEP_TOKENS, MAX_WAITING_STEPS, Dropped, Stage, StageShape, Verdict


def make_stage(stage_idx: int = 0, *, streams: Sequence[int] = (1, 2, 3), reserved: int = 32, token_budget: int = 1024) -> Stage:
    shape = StageShape(stage_idx=stage_idx, is_last=False, vocab_size=VOCAB, row_width=HIDDEN, boundary=DType.F32)
    stage = Stage(shape, token_budget=token_budget)
    for stream in streams:
        stage.open(key(stream), reserved)
    return stage


def key(stream: int, client: str = "ann") -> StreamKey:
    return StreamKey(client, StreamId(stream))  # type: ignore[arg-type]


def put(stage: Stage, step_id: int, *slices: Slice) -> None:
    assert stage.enqueue(step(step_id, *slices), None, 0.0).failures == ()


def advance(stage: Stage, step_id: int, *slices: Slice) -> Run:
    put(stage, step_id, *slices)
    verdict = stage.next_run()
    assert verdict.run is not None
    assert verdict.dropped == ()
    stage.succeeded(verdict.run, 0.001)
    return verdict.run


def ids(verdict: Verdict) -> list[int]:
    return [waiting.step.step_id for waiting in verdict.run.steps] if verdict.run else []


def failures(dropped: Sequence[Dropped]) -> list[tuple[int, str]]:
    return [(failure.stream, failure.code) for one in dropped for failure in one.failures]


def test_a_slice_at_the_length_continues_and_one_below_rewinds() -> None:
    stage = make_stage()
    advance(stage, 1, row(1, 0, [5, 6, 7], kind=SliceKind.PREFILL))
    assert stage.length(key(1)) == 3
    advance(stage, 2, row(1, 3, [8, 9, 10]))
    assert stage.length(key(1)) == 6
    advance(stage, 3, row(1, 4, [11]))
    assert stage.length(key(1)) == 5


def test_a_slice_beyond_the_length_has_lost_state_and_says_both_numbers() -> None:
    stage = make_stage()
    advance(stage, 1, row(1, 0, [5, 6]))
    put(stage, 2, row(1, 3, [7]), row(2, 0, [7]))
    verdict = stage.next_run()
    text = "stage 0 holds 2 positions of stream 1, the slice starts at 3: send it again from there"
    assert verdict.dropped == (Dropped(step=verdict.dropped[0].step, failures=(StreamFailure(StreamId(1), "state-lost", text),)),)
    assert verdict.run is not None
    assert [piece.key for piece in verdict.run.slices] == [key(2)]


def test_an_older_step_is_dropped_silently_and_an_equal_one_computed_again() -> None:
    stage = make_stage()
    advance(stage, 5, row(1, 0, [5, 6]))
    put(stage, 4, row(1, 0, [9]))
    assert stage.next_run() == Verdict(run=None, dropped=())
    assert stage.length(key(1)) == 2
    advance(stage, 5, row(1, 0, [5, 6]))
    assert stage.length(key(1)) == 2


def test_a_slice_beyond_the_reservation_and_an_unknown_stream_are_refused() -> None:
    stage = make_stage(reserved=3)
    dropped = stage.enqueue(step(1, row(1, 0, [1, 2, 3, 4]), row(9, 0, [1]), row(2, 0, [1, 2, 3])), None, 0.0)
    assert failures([dropped]) == [(9, "state-lost")]
    verdict = stage.next_run()
    assert failures(verdict.dropped) == [(1, "protocol")]
    assert verdict.run is not None
    assert [piece.key for piece in verdict.run.slices] == [key(2)]


@pytest.mark.parametrize(
    "bad",
    [
        Slice(stream=StreamId(1), start=0, tokens=b"abc", kind=SliceKind.ROWS, num_sampled=0),
        Slice(stream=StreamId(1), start=0, tokens=b"abcde", kind=SliceKind.ROWS, num_sampled=0),
        row(1, 0, [], num_sampled=0),
        row(1, 0, [1], num_sampled=2),
        row(1, 0, [1], num_sampled=-1),
        row(1, -1, [1]),
        row(1, 0, [VOCAB]),
        row(1, 0, [-1]),
        row(1, 4, [1], kind=SliceKind.PREFILL),
    ],
)
def test_a_malformed_slice_never_reaches_the_engine_and_its_neighbours_do(bad: Slice) -> None:
    stage = make_stage()
    dropped = stage.enqueue(step(1, row(2, 0, [4]), bad, row(3, 0, [5])), None, 0.0)
    assert failures([dropped]) == [(1, "protocol")]
    run = stage.next_run().run
    assert run is not None
    assert [piece.key for piece in run.slices] == [key(2), key(3)]


def test_a_stream_twice_in_one_step_is_refused_once() -> None:
    stage = make_stage()
    dropped = stage.enqueue(step(1, row(1, 0, [4]), row(2, 0, [4]), row(1, 1, [5])), None, 0.0)
    assert failures([dropped]) == [(1, "protocol")]
    run = stage.next_run().run
    assert run is not None
    assert [piece.key for piece in run.slices] == [key(2)]


def test_logits_are_for_workers_that_were_started_for_them_and_bounded() -> None:
    asking = msgspec.structs.replace(row(1, 0, [4, 5], num_sampled=2), returns_logits=True)
    for is_last, allows_logits, expected in ((False, False, []), (True, False, [(1, "invalid-option")]), (True, True, [])):
        shape = StageShape(
            stage_idx=0, is_last=is_last, vocab_size=VOCAB, row_width=HIDDEN, boundary=DType.F32, allows_logits=allows_logits
        )
        stage = Stage(shape)
        for stream in (1, 2):
            stage.open(key(stream), 32)
        assert failures([stage.enqueue(step(1, asking, row(2, 0, [4])), None, 0.0)]) == expected
        run = stage.next_run().run
        assert run is not None
        assert [(piece.key, piece.returns_logits) for piece in run.slices] == [(key(1), True), (key(2), False)][len(expected) :]
    huge = Stage(dataclasses.replace(shape, vocab_size=MAX_LOGITS_BYTES // 4 // 2 + 1))
    huge.open(key(1), 32)
    assert failures([huge.enqueue(step(1, asking), None, 0.0)]) == [(1, "protocol")]


def test_steps_and_queues_are_bounded() -> None:
    stage = make_stage()
    assert failures([stage.enqueue(step(1, row(1, 0, [1] * (MAX_STEP_TOKENS + 1))), None, 0.0)]) == [(1, "protocol")]
    for step_id in range(MAX_WAITING_STEPS):
        put(stage, step_id, row(1, 0, [1]))
    assert failures([stage.enqueue(step(5000, row(1, 0, [1])), None, 0.0)]) == [(1, "capacity")]


def test_rows_follow_their_slices_when_others_are_dropped() -> None:
    stage = make_stage(1)
    hidden = np.arange(6 * HIDDEN, dtype=np.float32).reshape(6, HIDDEN)
    slices = (row(1, 0, [1]), row(9, 0, [1, 2]), row(2, 0, [VOCAB]), row(3, 0, [1, 2]))
    assert stage.tensor_fault([step(1, *slices)], hidden) is None
    assert failures([stage.enqueue(step(1, *slices), hidden, 0.0)]) == [(9, "state-lost"), (2, "protocol")]
    run = stage.next_run().run
    assert run is not None
    assert run.hidden is not None
    np.testing.assert_array_equal(run.hidden, hidden[[0, 4, 5]])


def test_a_single_step_is_not_copied() -> None:
    stage = make_stage(1)
    hidden = np.zeros((2, HIDDEN), dtype=np.float32)
    stage.enqueue(step(1, row(1, 0, [1]), row(2, 0, [1])), hidden, 0.0)
    run = stage.next_run().run
    assert run is not None
    assert run.hidden is hidden


@pytest.mark.parametrize(
    ("stage_idx", "hidden", "is_fine"),
    [
        (0, None, True),
        (0, np.zeros((2, HIDDEN), np.float32), False),
        (1, None, False),
        (1, np.zeros((2, HIDDEN), np.float32), True),
        (1, np.zeros((3, HIDDEN), np.float32), False),
        (1, np.zeros((2, HIDDEN + 1), np.float32), False),
        (1, np.zeros((2 * HIDDEN,), np.float32), False),
        (1, np.zeros((2, HIDDEN), np.uint16), False),
    ],
)
def test_the_tensor_must_be_what_the_slices_say(stage_idx: int, hidden: np.ndarray | None, is_fine: bool) -> None:  # type: ignore[type-arg]
    fault = make_stage(stage_idx).tensor_fault([step(1, row(1, 0, [1, 2]))], hidden)
    assert (fault is None) == is_fine


def test_waiting_steps_merge_in_order_up_to_the_budget() -> None:
    stage = make_stage(token_budget=4)
    put(stage, 1, row(1, 0, [1, 2]))
    put(stage, 2, row(2, 0, [1, 2]))
    put(stage, 3, row(3, 0, [1]))
    assert ids(stage.next_run()) == [1, 2]
    assert ids(stage.next_run()) == [3]
    assert not stage.has_work


def test_one_step_always_goes() -> None:
    stage = make_stage(token_budget=1)
    put(stage, 1, row(1, 0, [1, 2, 3]))
    assert ids(stage.next_run()) == [1]


def test_a_stream_that_is_in_the_batch_waits_for_the_next_turn_in_order() -> None:
    stage = make_stage()
    put(stage, 1, row(1, 0, [1, 2]))
    put(stage, 2, row(1, 2, [3, 4]), row(2, 0, [1, 2]))
    put(stage, 3, row(2, 2, [3]))
    put(stage, 4, row(3, 0, [9]))
    first = stage.next_run()
    assert ids(first) == [1, 4]
    assert first.run is not None
    stage.succeeded(first.run, 0.0)
    second = stage.next_run()
    assert ids(second) == [2]
    assert second.run is not None
    stage.succeeded(second.run, 0.0)
    assert ids(stage.next_run()) == [3]


def test_what_waited_for_its_stream_keeps_its_place_when_the_budget_ends_a_batch() -> None:
    stage = make_stage(token_budget=2)
    put(stage, 1, row(1, 0, [1]))
    put(stage, 2, row(1, 1, [2]))
    put(stage, 3, row(2, 0, [1, 2]))
    put(stage, 4, row(1, 2, [3]))
    for expected in ([1], [2], [3], [4]):
        verdict = stage.next_run()
        assert ids(verdict) == expected
        assert verdict.run is not None
        stage.succeeded(verdict.run, 0.0)


def test_a_failed_batch_runs_again_one_by_one_and_a_lone_failure_is_told() -> None:
    stage = make_stage()
    put(stage, 1, row(1, 0, [1, 2]))
    put(stage, 2, row(2, 0, [1]))
    put(stage, 3, row(3, 0, [1]))
    both = stage.next_run().run
    assert both is not None
    assert stage.failed(both, "inference", "bad") == ()
    alone = stage.next_run()
    assert ids(alone) == [1]
    assert alone.run is not None
    assert failures(stage.failed(alone.run, "inference", "bad")) == [(1, "inference")]
    assert stage.length(key(1)) == 0
    put(stage, 4, row(1, 2, [1]))
    for expected in ([2], [3]):
        verdict = stage.next_run()
        assert ids(verdict) == expected
        assert verdict.run is not None
        stage.succeeded(verdict.run, 0.0)
    assert failures(stage.next_run().dropped) == [(1, "state-lost")]


def test_a_closed_stream_leaves_nothing_behind() -> None:
    stage = make_stage(1)
    stage.open(key(1, "bob"), 8)
    hidden = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    stage.enqueue(step(1, row(1, 0, [1, 2]), row(2, 0, [1])), hidden, 0.0)
    stage.enqueue(step(1, row(1, 0, [1])), hidden[:1], 0.0)
    stage.enqueue(step(1, row(1, 0, [1]), client="bob"), hidden[:1], 0.0)
    stage.close(key(1))
    run = stage.next_run().run
    assert run is not None
    assert [piece.key for piece in run.slices] == [key(2), key(1, "bob")]
    assert run.hidden is not None
    np.testing.assert_array_equal(run.hidden, hidden[[2, 0]])
    assert stage.num_streams == 3
