"""Rows of logits to results, stream by stream."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_pshard.core.errors import InferenceError
from langchain_pshard.core.messages import ClientId, SliceKind, SliceResult, StreamId
from langchain_pshard.core.sampling import History, SamplingParams, sample, token_logprobs
from workers.head import Head
from workers.runners.runner import RunSlice, StreamKey

VOCAB = 50
rng = np.random.default_rng(7)


def key(number: int) -> StreamKey:
    return StreamKey(ClientId("c"), StreamId(number))


def piece(stream: int, start: int, tokens: list[int], kind: SliceKind, num_sampled: int) -> RunSlice:
    return RunSlice(key=key(stream), start=start, tokens=np.array(tokens, dtype=np.int32), kind=kind, num_sampled=num_sampled)


def tokens(result: SliceResult) -> list[int]:
    return np.frombuffer(result.tokens, "<i4").tolist()


def logits(num_rows: int) -> np.ndarray:
    return rng.standard_normal((num_rows, VOCAB)).astype(np.float32)


def test_greedy_streams_take_the_highest_of_their_own_rows() -> None:
    head = Head()
    for stream in (1, 2, 3):
        head.open(key(stream), SamplingParams())
    rows = logits(4)
    slices = [
        piece(1, 0, [1, 2, 3], SliceKind.PREFILL, 1),
        piece(2, 0, [1, 2], SliceKind.PREFILL, 0),
        piece(3, 9, [1, 2, 3], SliceKind.ROWS, 3),
    ]
    results = head.sample(rows, slices)
    assert [result.stream for result in results] == [1, 2, 3]
    assert [tokens(result) for result in results] == [[int(rows[0].argmax())], [], [int(row.argmax()) for row in rows[1:]]]
    assert all(result.logprobs is None for result in results)


def test_a_batch_that_samples_nothing() -> None:
    head = Head()
    head.open(key(1), SamplingParams())
    assert head.sample(np.empty((0, VOCAB), np.float32), [piece(1, 0, [1, 2], SliceKind.PREFILL, 0)]) == [SliceResult(StreamId(1), b"")]


def test_the_draw_belongs_to_the_position_not_to_the_batch() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    rows = logits(3)
    together, alone = Head(), Head()
    for head in (together, alone):
        head.open(key(1), params)
    [result] = together.sample(rows, [piece(1, 10, [4, 5, 6], SliceKind.ROWS, 3)])
    expected = [sample(rows[idx], params, position=10 + idx, history=History(prompt=(), generated=())) for idx in range(3)]
    assert tokens(result) == expected
    singles = [alone.sample(rows[idx : idx + 1], [piece(1, 10 + idx, [4 + idx], SliceKind.ROWS, 1)])[0] for idx in range(3)]
    assert [tokens(single)[0] for single in singles] == expected


def test_log_probabilities_when_asked() -> None:
    params = SamplingParams(top_logprobs=2)
    head = Head()
    head.open(key(1), params)
    rows = logits(2)
    [result] = head.sample(rows, [piece(1, 0, [1, 2], SliceKind.PREFILL, 2)])
    nothing = History(prompt=(), generated=())
    assert result.logprobs == tuple(token_logprobs(row, int(row.argmax()), params, nothing) for row in rows)


@pytest.mark.parametrize("params", [SamplingParams(repetition_penalty=1.7), SamplingParams(frequency_penalty=0.8, presence_penalty=0.4)])
def test_penalties_see_prompt_and_rows_apart_and_forget_what_is_rewound(params: SamplingParams) -> None:
    head = Head()
    head.open(key(1), params)
    rows = np.zeros((1, VOCAB), np.float32)
    rows[0, [3, 4, 8]] = [1.0, 0.9, 0.8]

    def expected(prompt: list[int], generated: list[int]) -> int:
        return sample(rows[0], params, position=0, history=History(prompt=prompt, generated=generated))

    def step(start: int, ids: list[int], kind: SliceKind) -> int:
        return tokens(head.sample(rows, [piece(1, start, ids, kind, 1)])[0])[0]

    assert step(0, [1, 3], SliceKind.PREFILL) == expected([1, 3], [])
    assert step(2, [4, 4, 4], SliceKind.ROWS) == expected([1, 3], [4, 4, 4])
    assert step(2, [8], SliceKind.ROWS) == expected([1, 3], [8])  # the three were drafts, and rejected
    assert step(3, [3], SliceKind.ROWS) == expected([1, 3], [8, 3])
    head.close_stream(key(1))
    head.close_stream(key(1))
    head.open(key(1), params)
    assert step(0, [1], SliceKind.PREFILL) == expected([1], [])


def test_each_row_of_a_verification_sees_the_tokens_before_it() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    head = Head()
    head.open(key(1), params)
    rows = np.tile(np.linspace(0, 1, VOCAB, dtype=np.float32), (3, 1))
    [result] = head.sample(rows, [piece(1, 0, [49, 48, 47], SliceKind.ROWS, 3)])
    assert tokens(result) == [48, 47, 46]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.5)])
def test_rows_that_are_no_numbers_are_an_error_of_their_stream(value: float, params: SamplingParams) -> None:
    head = Head()
    for stream in (1, 2, 3):
        head.open(key(stream), params)
    rows = logits(3)
    rows[1] = value
    slices = [
        piece(1, 0, [1, 2], SliceKind.PREFILL, 1),
        piece(2, 0, [1, 2], SliceKind.PREFILL, 0),
        piece(3, 0, [1, 2], SliceKind.PREFILL, 2),
    ]
    with pytest.raises(InferenceError, match="logits of stream 3"):
        head.sample(rows, slices)
    rows[1:] = logits(2)
    assert len(head.sample(rows, slices)) == 3  # the failed try left no history behind


def test_tokens_that_a_mask_forbids_are_no_error() -> None:
    head = Head()
    head.open(key(1), SamplingParams(temperature=1.0))
    row = np.full((1, VOCAB), -np.inf, np.float32)
    row[0, 7] = 1.0
    assert tokens(head.sample(row, [piece(1, 0, [1, 2], SliceKind.PREFILL, 1)])[0]) == [7]


def test_a_prompt_that_is_there_already_is_history_too() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    rows = np.zeros((1, VOCAB), np.float32)
    rows[0, [3, 4]] = [1.0, 0.9]
    head = Head()
    head.open(key(1), params, np.array([3, 7, 8, 9], dtype=np.int32))
    assert tokens(head.sample(rows, [piece(1, 2, [8, 9], SliceKind.PREFILL, 1)])[0]) == [4]
