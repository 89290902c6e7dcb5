"""The scheduler's choice, as exact plans and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.messages import StreamId
from langchain_pshard.pipeline.scheduler import (
    MAX_CHUNK_TOKENS,
    PREFILL_BUDGET_TOKENS,
    Chunk,
    Plan,
    Prefilling,
    Situation,
    chunk_length,
    num_decode_groups,
    plan,
)


def ids(*numbers: int) -> tuple[StreamId, ...]:
    return tuple(StreamId(number) for number in numbers)


def situation(
    *,
    ready: tuple[StreamId, ...] = (),
    prefilling: tuple[tuple[int, int], ...] = (),
    num_decoding: int | None = None,
    in_flight: int = 0,
    decode_in_flight: int = 0,
    num_stages: int = 2,
) -> Situation:
    return Situation(
        num_stages=num_stages,
        num_in_flight=in_flight,
        num_decode_in_flight=decode_in_flight,
        num_decoding=len(ready) if num_decoding is None else num_decoding,
        ready=ready,
        prefilling=[Prefilling(stream=StreamId(stream), num_left=left) for stream, left in prefilling],
    )


def chunks(*pairs: tuple[int, int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(stream=StreamId(stream), num_tokens=count) for stream, count in pairs)


def test_nothing_to_do() -> None:
    assert plan(situation()) is None


def test_few_streams_decode_together() -> None:
    assert plan(situation(ready=ids(1, 2, 3))) == Plan(rows=ids(1, 2, 3), max_drafts=41, chunks=())


def test_a_stream_that_gets_ready_waits_for_its_group() -> None:
    assert plan(situation(ready=ids(3), num_decoding=3, in_flight=1, decode_in_flight=1)) is None


def test_many_streams_alternate_in_as_many_groups_as_stages() -> None:
    first = plan(situation(ready=ids(*range(1, 17))))
    assert first is not None
    assert first.rows == ids(*range(1, 9))
    second = plan(situation(ready=ids(*range(9, 17)), num_decoding=16, in_flight=1, decode_in_flight=1))
    assert second is not None
    assert second.rows == ids(*range(9, 17))
    assert plan(situation(ready=ids(1), num_decoding=16, in_flight=2, decode_in_flight=2)) is None


def test_decode_rows_and_a_bounded_piece_of_a_prompt_share_a_micro_batch() -> None:
    found = plan(situation(ready=ids(1), prefilling=((2, 1000), (3, 10))))
    assert found == Plan(rows=ids(1), max_drafts=127, chunks=chunks((2, 256)))


def test_prompts_are_filled_in_order_of_arrival() -> None:
    found = plan(situation(prefilling=((4, 100), (5, 300), (6, 300), (7, 20))))
    assert found is not None
    assert found.chunks == chunks((4, 100), (5, 256), (6, 156))


def test_no_more_micro_batches_in_flight_than_stages_and_one() -> None:
    busy = situation(prefilling=((1, 1000),), in_flight=2)
    assert plan(busy) is not None
    assert plan(situation(prefilling=((1, 1000),), in_flight=3)) is None


@pytest.mark.parametrize(
    ("num_decoding", "num_stages", "expected"), [(1, 3, 1), (7, 3, 1), (8, 1, 1), (8, 2, 2), (8, 3, 2), (12, 3, 3), (64, 2, 2)]
)
def test_decode_groups(num_decoding: int, num_stages: int, expected: int) -> None:
    assert num_decode_groups(num_decoding, num_stages) == expected


@pytest.mark.parametrize(
    ("num_left", "room", "expected"),
    [(1, 256, 1), (256, 256, 256), (257, 256, 255), (258, 256, 256), (300, 512, 256), (3, 2, 0), (5, 1, 0), (5, 4, 3), (4, 2, 2)],
)
def test_chunk_length(num_left: int, room: int, expected: int) -> None:
    assert chunk_length(num_left, room) == expected


@given(length=st.integers(2, 3000), rooms=st.lists(st.integers(1, PREFILL_BUDGET_TOKENS), min_size=1, max_size=20))
def test_no_prompt_is_ever_cut_into_a_single_token(length: int, rooms: list[int]) -> None:
    left, turn = length, 0
    while left:
        room = rooms[turn % len(rooms)] if turn < 2 * len(rooms) else PREFILL_BUDGET_TOKENS  # a turn with room comes in the end
        count = chunk_length(left, room)
        assert count <= min(room, MAX_CHUNK_TOKENS)
        assert count != 1
        left -= count
        turn += 1


@given(
    ready=st.lists(st.integers(1, 200), unique=True, max_size=60),
    prefilling=st.lists(st.tuples(st.integers(201, 400), st.integers(2, 2000)), unique_by=lambda pair: pair[0], max_size=20),
    more_decoding=st.integers(0, 40),
    in_flight=st.integers(0, 5),
    num_stages=st.integers(1, 4),
)
def test_plans_keep_their_bounds(
    ready: list[int], prefilling: list[tuple[int, int]], more_decoding: int, in_flight: int, num_stages: int
) -> None:
    now = situation(
        ready=ids(*ready),
        prefilling=tuple(prefilling),
        num_decoding=len(ready) + more_decoding,
        in_flight=in_flight,
        decode_in_flight=min(in_flight, more_decoding),
        num_stages=num_stages,
    )
    found = plan(now)
    if in_flight == 0 and (ready or prefilling):
        assert found is not None  # the fleet never idles while there is work
    if found is None:
        return
    assert in_flight <= num_stages
    assert found.rows or found.chunks
    assert list(found.rows) == ready[: len(found.rows)]
    assert sum(chunk.num_tokens for chunk in found.chunks) <= PREFILL_BUDGET_TOKENS
    assert len(found.rows) * (1 + found.max_drafts) <= 128
