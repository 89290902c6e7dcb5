"""Who goes along with a group that the chain is ahead with: for how many steps, and that nobody is held up by it; without a fleet."""

from __future__ import annotations

import pytest

from langchain_pshard.core.messages import SliceKind, StreamId
from langchain_pshard.pipeline.scheduler import Prefilling, Situation, plan
from tests.support.client_turns import Client, granted
from tests.unit.test_scheduler import COMPUTE_BOUND, MEMORY_BOUND, ids


def situation(*ready: int, least_ahead: int = 0, in_flight: int = 0, num_decoding: int = 3, prefilling: int = 0) -> Situation:
    return Situation(
        num_in_flight=in_flight,
        num_decode_in_flight=in_flight,
        least_ahead=least_ahead,
        num_decoding=num_decoding,
        ready=ids(*ready),
        prefilling=[Prefilling(stream=StreamId(9), begin=0, start=0, num_left=prefilling, max_tokens=256)] if prefilling else [],
        max_steps_ahead=7,
    )


@pytest.mark.parametrize(("least_ahead", "expected"), [(7, 6), (3, 2), (1, 0), (0, None), (64, 7)])
def test_a_stream_that_gets_ready_goes_along_for_one_step_less(least_ahead: int, expected: int | None) -> None:
    found = plan(situation(3, least_ahead=least_ahead, in_flight=1), MEMORY_BOUND)
    assert (None if found is None else (found.rows, found.max_ahead)) == (None if expected is None else (ids(3), expected))


def test_a_group_that_has_its_turn_needs_no_regard() -> None:
    found = plan(situation(*range(9, 17), least_ahead=0, in_flight=1, num_decoding=16), COMPUTE_BOUND)
    assert found is not None
    assert (found.num_groups, found.rows, found.max_ahead) == (2, ids(*range(9, 17)), 7)


def test_a_plan_with_a_prompt_grants_none() -> None:
    found = plan(situation(1, prefilling=400), MEMORY_BOUND)
    assert found is not None
    assert found.chunks
    assert (found.rows, found.max_ahead) == (ids(1), 0)


def test_who_goes_along_is_back_first_and_then_all_go_together() -> None:
    client = Client(3)
    client.decoding(1)
    first = client.turn()  # steps 2 to 5
    assert (first.step_id, granted(first)) == (2, [(1, 3)])
    client.add(2)
    prompt = client.turn()
    client.land(first.step_id)
    client.land(prompt.step_id)
    second = client.turn()  # steps 7 and 8, as far as the first still goes
    assert (second.step_id, granted(second)) == (7, [(2, 1)])
    for step_id in (3, 7, 4, 8):
        client.land(step_id)
        assert client.waits
    client.land(5)
    assert granted(client.turn()) == [(1, 3), (2, 3)]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_one_after_another_goes_along_and_no_prompt_has_to_wait_for_them(num_stages: int) -> None:
    """Runs that go along with their group count as it does: a new prompt is held up no more than behind a single one."""
    client = Client(num_stages=num_stages)
    client.decoding(1)
    assert granted(client.turn()) == [(1, 7)]
    for number, expected in ((2, 6), (3, 5), (4, 4)):
        client.add(number)
        prompt = client.turn()
        assert [(piece.stream, piece.kind) for piece in prompt.slices] == [(number, SliceKind.PREFILL)]
        client.land(prompt.step_id)
        assert granted(client.turn()) == [(number, expected)]  # less than any of those that are ahead
