"""The scheduler's choice, as exact plans and as properties."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.messages import StageTiming, StreamId
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.prompt_costs import PromptLoad
from langchain_pshard.pipeline.scheduler import (
    CHUNK_STEP,
    MAX_CHUNK_TOKENS,
    MAX_CHUNKS_IN_FLIGHT,
    MAX_GROUPS,
    MIN_CHUNK_LIMIT,
    MIN_CHUNK_TOKENS,
    PREFILL_BUDGET_TOKENS,
    ROW_BUDGET,
    STALL_MS,
    Chunk,
    Prefilling,
    Situation,
    best_turn_ms,
    chunk_length,
    num_decode_groups,
    plan,
)
from langchain_pshard.pipeline.step_costs import StepCosts


def ids(*numbers: int) -> tuple[StreamId, ...]:
    return tuple(StreamId(number) for number in numbers)


def costs(*stages: tuple[float, float], way_ms: float = 1.0, prompt: tuple[float, float] = (8.0, 0.5)) -> StepCosts:
    """What was learned from stages that take `base + slope x rows`, and `prompt` likewise over prompt tokens."""
    made = StepCosts(len(stages))

    def timings(lines: list[tuple[float, float]], count: int) -> list[StageTiming]:
        return [StageTiming(0, round(1e3 * (base + slope * count))) for base, slope in lines]

    for turn in range(200):
        for num_rows, num_prompt_tokens in ((1 + 4 * (turn % 5), 0), (0, 32 * (1 + turn % 5))):
            found = timings([prompt] * len(stages), num_prompt_tokens) if num_prompt_tokens else timings(list(stages), num_rows)
            spent_ms = sum(timing.compute_us for timing in found) / 1e3
            made.observe(num_rows=num_rows, prompt=PromptLoad.of(0, num_prompt_tokens), timings=found, round_trip_ms=spent_ms + way_ms)
    return made


MEMORY_BOUND = costs((10.0, 0.05), (10.0, 0.05))
COMPUTE_BOUND = costs((1.0, 1.0), (1.0, 1.0))
FAR = costs((1.0, 2.0), (1.0, 2.0), way_ms=100.0)


def situation(
    *,
    ready: tuple[StreamId, ...] = (),
    prefilling: tuple[tuple[int, int], ...] = (),
    num_decoding: int | None = None,
    in_flight: int = 0,
    decode_in_flight: int = 0,
    turn: int = 0,
    max_chunk_tokens: int = MAX_CHUNK_TOKENS,
    starts: Mapping[int, int] | None = None,
) -> Situation:
    return Situation(
        num_in_flight=in_flight,
        num_decode_in_flight=decode_in_flight,
        num_decoding=len(ready) if num_decoding is None else num_decoding,
        ready=ready,
        prefilling=[
            Prefilling(stream=StreamId(stream), begin=0, start=(starts or {}).get(stream, 0), num_left=left) for stream, left in prefilling
        ],
        turn=turn,
        max_chunk_tokens=max_chunk_tokens,
    )


def chunks(*pairs: tuple[int, int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(stream=StreamId(stream), num_tokens=count) for stream, count in pairs)


def test_nothing_to_do() -> None:
    assert plan(situation(), MEMORY_BOUND) is None


def test_stages_that_read_weights_get_one_large_group() -> None:
    found = plan(situation(ready=ids(*range(1, 9))), MEMORY_BOUND)
    assert found is not None
    assert (found.rows, found.num_groups, found.max_drafts) == (ids(*range(1, 9)), 1, ROW_BUDGET - 8)


def test_a_stream_that_gets_ready_waits_for_its_group() -> None:
    assert plan(situation(ready=ids(3), num_decoding=3, in_flight=1, decode_in_flight=1), MEMORY_BOUND) is None


def test_stages_that_compute_get_alternating_groups() -> None:
    first = plan(situation(ready=ids(*range(1, 17))), COMPUTE_BOUND)
    assert first is not None
    assert (first.rows, first.num_groups) == (ids(*range(1, 9)), 2)
    second = plan(situation(ready=ids(*range(9, 17)), num_decoding=16, in_flight=1, decode_in_flight=1), COMPUTE_BOUND)
    assert second is not None
    assert second.rows == ids(*range(9, 17))
    assert plan(situation(ready=ids(1), num_decoding=16, in_flight=2, decode_in_flight=2), COMPUTE_BOUND) is None


def test_groups() -> None:
    assert [num_decode_groups(count, MEMORY_BOUND) for count in (1, 2, 8, 16)] == [1, 1, 1, 1]
    assert num_decode_groups(1, COMPUTE_BOUND) == 1
    assert num_decode_groups(300, MEMORY_BOUND) >= 3  # a micro-batch holds no more than ROW_BUDGET rows
    assert num_decode_groups(64, FAR) > num_decode_groups(64, costs((1.0, 2.0), (1.0, 2.0), way_ms=1.0))
    assert num_decode_groups(2, StepCosts(2)) == 1  # nothing measured yet
    assert num_decode_groups(64, StepCosts(1)) == 1  # one stage has nobody to alternate with


@given(
    num_decoding=st.integers(1, 300),
    lines=st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 5)), min_size=1, max_size=4),
    way_ms=st.floats(0, 300),
)
def test_no_other_number_of_groups_is_much_better(num_decoding: int, lines: list[tuple[float, float]], way_ms: float) -> None:
    learned = StepCosts(len(lines))
    for count in (1, 8, 1, 8, 64):
        found = [StageTiming(0, round(1e3 * (base + slope * count))) for base, slope in lines]
        learned.observe(
            num_rows=count, prompt=PromptLoad(), timings=found, round_trip_ms=sum(timing.compute_us for timing in found) / 1e3 + way_ms
        )
    num_groups = num_decode_groups(num_decoding, learned)
    assert 1 <= num_groups <= min(num_decoding, MAX_GROUPS)
    size = -(-num_decoding // num_groups)
    assert size <= ROW_BUDGET
    for other in range(1, num_groups):
        if -(-num_decoding // other) <= ROW_BUDGET:  # more groups are only for a gain
            assert learned.cycle_ms(size, num_groups) < learned.cycle_ms(-(-num_decoding // other), other)


def test_decode_rows_and_a_piece_of_a_prompt_that_does_not_stall_them_share_a_micro_batch() -> None:
    found = plan(situation(ready=ids(1), prefilling=((2, 1000), (3, 10))), MEMORY_BOUND)
    assert found is not None
    assert found.rows == ids(1)
    assert [chunk.stream for chunk in found.chunks] == [2]
    load = PromptLoad.of(0, found.chunks[0].num_tokens)
    assert 0.9 * STALL_MS < MEMORY_BOUND.prompt_prices(load)[0].at(load) <= STALL_MS


def test_the_oldest_and_the_shortest_prompt_go_first_in_turn() -> None:
    waiting = ((4, 1000), (5, 900), (6, 20))
    even, odd = (plan(situation(ready=ids(1), prefilling=waiting, turn=turn), MEMORY_BOUND) for turn in (0, 1))
    assert even is not None
    assert odd is not None
    assert even.chunks[0].stream == 4
    assert odd.chunks[0] == Chunk(stream=StreamId(6), num_tokens=20)


def test_prompts_fill_the_budget_while_nobody_decodes() -> None:
    found = plan(situation(prefilling=((4, 100), (5, 200), (6, 300), (7, 20))), costs((10.0, 0.05)))
    assert found is not None
    assert found.chunks == chunks((4, 100), (5, 200), (6, 212))


def test_short_prompts_that_wait_together_are_not_cut_and_share_micro_batches() -> None:
    alone = plan(situation(prefilling=((1, 40),)), MEMORY_BOUND)
    assert alone is not None
    assert alone.chunks == chunks((1, 40))  # 32 and 8 would be three turns
    together = plan(situation(prefilling=tuple((stream, 40) for stream in range(1, 17))), MEMORY_BOUND)
    assert together is not None
    total = sum(chunk.num_tokens for chunk in together.chunks)
    assert [chunk.num_tokens for chunk in together.chunks[:2]] == [40, 40]
    rest = PromptLoad(640, 16 * 40 * 20)
    price, _ = MEMORY_BOUND.prompt_prices(rest)
    spare_ms = best_turn_ms(rest, rest, MEMORY_BOUND) - price.at(PromptLoad.of(0, total))
    assert -price.slope_ms * CHUNK_STEP <= spare_ms < price.slope_ms * MIN_CHUNK_TOKENS
    last = plan(situation(prefilling=((1, 14), (2, 14), (3, 14))), MEMORY_BOUND)
    assert last is not None
    assert last.chunks == chunks((1, 14), (2, 14), (3, 14))  # no turn of its own for so few


@pytest.mark.parametrize("num_tokens", [2, 4, 5, 100])
def test_no_chunk_is_longer_than_the_client_allows_and_every_prompt_gets_through(num_tokens: int) -> None:
    left = num_tokens
    for _ in range(num_tokens):
        found = plan(situation(prefilling=((4, left),), max_chunk_tokens=MIN_CHUNK_LIMIT), MEMORY_BOUND)
        assert found is not None
        assert 2 <= found.chunks[0].num_tokens <= MIN_CHUNK_LIMIT
        left -= found.chunks[0].num_tokens
        if not left:
            return
    pytest.fail(f"{left} tokens were never sent")


@pytest.mark.parametrize("length", [1, 2, 257])
def test_chunk_lengths_out_of_range_are_refused(length: int) -> None:
    with pytest.raises(InvalidOptionError, match=f"max_chunk_tokens={length} is out of range; valid: 3 to 256"):
        ClientOptions(max_chunk_tokens=length)


def test_in_flight_chunks_are_bounded_and_more_where_the_way_is_long() -> None:
    def most(learned: StepCosts, *, ready: bool = False) -> int:
        more = {"num_decoding": 1, "decode_in_flight": 1} if ready else {}
        return next(count for count in range(100) if plan(situation(prefilling=((1, 1000),), in_flight=count, **more), learned) is None)

    assert most(MEMORY_BOUND) == 4  # two stages, one waiting, one on the way
    assert most(MEMORY_BOUND, ready=True) == 3
    assert most(MEMORY_BOUND) < most(costs((1.0, 0.5), (1.0, 0.5), way_ms=200.0)) <= MAX_CHUNKS_IN_FLIGHT + 1
    assert most(costs((1.0, 0.5), way_ms=1e6)) == MAX_CHUNKS_IN_FLIGHT + 1


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
    learned=st.sampled_from([MEMORY_BOUND, COMPUTE_BOUND, FAR, StepCosts(1), StepCosts(4)]),
    turn=st.integers(0, 1),
)
def test_plans_keep_their_bounds(
    ready: list[int], prefilling: list[tuple[int, int]], more_decoding: int, in_flight: int, learned: StepCosts, turn: int
) -> None:
    now = situation(
        ready=ids(*ready),
        prefilling=tuple(prefilling),
        num_decoding=len(ready) + more_decoding,
        in_flight=in_flight,
        decode_in_flight=min(in_flight, more_decoding),
        turn=turn,
    )
    found = plan(now, learned)
    if in_flight == 0 and (ready or prefilling):
        assert found is not None  # the fleet never idles while there is work
    if found is None:
        return
    assert found.rows or found.chunks
    assert list(found.rows) == ready[: len(found.rows)]
    assert sum(chunk.num_tokens for chunk in found.chunks) <= PREFILL_BUDGET_TOKENS
    assert len({chunk.stream for chunk in found.chunks}) == len(found.chunks)
    assert len(found.rows) + found.max_drafts <= ROW_BUDGET


@given(
    observed=st.lists(
        st.tuples(
            st.integers(0, 130),
            st.integers(0, 10**5),
            st.integers(0, 300),
            st.lists(st.integers(0, 10**7), min_size=2, max_size=2),
            st.floats(0, 1e5),
        ),
        max_size=40,
    ),
    prefilling=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    num_decoding=st.integers(0, 200),
)
def test_whatever_was_measured_there_is_a_plan(
    observed: list[tuple[int, int, int, list[int], float]], prefilling: list[int], num_decoding: int
) -> None:
    learned = StepCosts(2)
    for num_rows, start, num_prompt_tokens, compute_us, round_trip_ms in observed:
        timings = [StageTiming(0, us) for us in compute_us]
        prompt = PromptLoad.of(start, num_prompt_tokens)
        learned.observe(num_rows=num_rows, prompt=prompt, timings=timings, round_trip_ms=round_trip_ms)
    found = plan(situation(ready=ids(*range(1, num_decoding + 1)), prefilling=tuple(enumerate(prefilling, start=1000))), learned)
    assert found is not None
    assert found.chunks or num_decoding
    assert all(chunk.num_tokens != 1 or prefilling[chunk.stream - 1000] == 1 for chunk in found.chunks)


@given(
    lengths=st.lists(st.integers(2, 800), min_size=1, max_size=12),
    arrivals=st.integers(0, 40),
    learned=st.sampled_from([MEMORY_BOUND, COMPUTE_BOUND, FAR]),
)
def test_nobody_starves(lengths: list[int], arrivals: int, learned: StepCosts) -> None:
    """Prompts all come through, the first within a bound, though new short ones keep coming and others decode."""
    waiting = dict(enumerate(lengths, start=1))
    first_at: int | None = None
    for turn in range(2000):
        if turn < arrivals:
            waiting[1000 + turn] = 2
        starts = {stream: lengths[stream - 1] - left for stream, left in waiting.items() if stream <= len(lengths)}
        found = plan(situation(ready=ids(5000), prefilling=tuple(waiting.items()), turn=turn, starts=starts), learned)
        assert found is not None
        for chunk in found.chunks:
            waiting[chunk.stream] -= chunk.num_tokens
            if not waiting[chunk.stream]:
                del waiting[chunk.stream]
        if first_at is None and 1 not in waiting:
            first_at = turn
        if not waiting and turn >= arrivals:
            break
    assert not waiting
    assert first_at is not None
    assert first_at <= 2 * (lengths[0] // (MIN_CHUNK_TOKENS - 1) + 1)
