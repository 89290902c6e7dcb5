"""Chains of real worker loops that go on by themselves, over real sockets and over a network that loses and holds messages."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from langchain_pshard.core.errors import DeadlineError
from langchain_pshard.core.messages import Message, MicroBatch, SliceKind, StepFailed, StepResult
from langchain_pshard.pipeline.generation import FinishReason, GenerationParams
from langchain_pshard.transport.memory import Fate, MemoryNetwork
from tests.support.fake_fleet import EOS, PROMPT, FakeFleet, connect, connect_memory, params, plain_tokens
from tests.support.fake_stages import row, step, tokens_of
from tests.wire.test_worker import client_of, plain, running


def ended(fleet: FakeFleet, num_tokens: int) -> list[int]:
    """A prompt whose text ends with an end token after so many tokens, and not before."""
    for prompt in itertools.product(range(3, 20), repeat=3):
        found = plain_tokens(prompt, fleet.num_stages, num_tokens + 1)
        if len(found) == num_tokens and found[-1] == EOS:
            return list(prompt)
    raise AssertionError(f"no text of {num_tokens} tokens")


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("max_steps_ahead", [0, 1, 7, 64])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, num_stages: int, max_steps_ahead: int) -> None:
    with FakeFleet(tmp_path, num_stages) as fleet, connect(fleet, tmp_path, max_steps_ahead=max_steps_ahead) as client:
        found = client.complete(PROMPT, params(41))
        assert list(found.token_ids) == plain_tokens(PROMPT, num_stages, 41, ignore_eos=True)
        assert found.stats.num_steps == 41
        num_own = 1 + -(-40 // (max_steps_ahead + 1))  # steps of the client: the prompt, and one for each run
        assert found.stats.num_hops == num_own * (num_stages + 1) + (41 - num_own) * (num_stages if num_stages > 1 else 0)
        fleet.wait_until_free()


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_tokens", range(1, 11))
def test_an_end_token_anywhere_in_a_run_ends_the_text_and_the_work(tmp_path: Path, num_stages: int, num_tokens: int) -> None:
    with FakeFleet(tmp_path, num_stages) as fleet, connect(fleet, tmp_path) as client:
        prompt = ended(fleet, num_tokens)
        found = client.complete(prompt, GenerationParams(max_tokens=60, draft=None))
        assert list(found.token_ids) == plain_tokens(prompt, num_stages, 60)
        assert found.finish_reason is FinishReason.STOP
        fleet.wait_until_free()
        # The chain stopped there by itself: not even one row more was computed.
        assert sum(len(batch) for batch in fleet.workers[-1].runners[num_stages - 1].batches) == num_tokens
        assert list(client.complete(PROMPT, params(20)).token_ids) == plain_tokens(PROMPT, num_stages, 20, ignore_eos=True)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_many_streams_of_many_clients_at_once(tmp_path: Path, num_stages: int) -> None:
    jobs = [([3 + idx, 4, 5 + idx % 7], 5 + 7 * idx % 40, bool(idx % 2)) for idx in range(24)]
    with FakeFleet(tmp_path, num_stages, capacity=4096, delay_s=0.0005) as fleet, ExitStack() as stack:
        clients = [stack.enter_context(connect(fleet, tmp_path, max_steps_ahead=ahead)) for ahead in (7, 7, 0, 64)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [
                pool.submit(clients[idx % 4].complete, prompt, GenerationParams(max_tokens=count, ignore_eos=not has_eos, draft=None))
                for idx, (prompt, count, has_eos) in enumerate(jobs)
            ]
            found = [list(future.result().token_ids) for future in futures]
        assert found == [plain_tokens(prompt, num_stages, count, ignore_eos=not has_eos) for prompt, count, has_eos in jobs]
        fleet.wait_until_free()
        # Clients shared inferences.
        assert max(len({piece.key.client for piece in batch}) for batch in fleet.workers[0].runners[0].batches) > 1


def test_whoever_begins_while_others_are_ahead_decodes_along(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, delay_s=0.004) as fleet, connect(fleet, tmp_path, max_steps_ahead=64) as client:
        first = client.generate(PROMPT, params(200))
        next(first)
        for idx in range(4):
            prompt = [8 + idx, 9]
            assert list(client.complete(prompt, params(12)).token_ids) == plain_tokens(prompt, 2, 12, ignore_eos=True)
        rest = [token for chunk in first for token in chunk.token_ids]
        assert rest == plain_tokens(PROMPT, 2, 200, ignore_eos=True)[1:]
        fleet.wait_until_free()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_cancel_in_the_middle_frees_everything(tmp_path: Path, num_stages: int) -> None:
    with FakeFleet(tmp_path, num_stages, delay_s=0.002) as fleet, connect(fleet, tmp_path, max_steps_ahead=64) as client:
        other = client.generate([9, 8], params(120))
        for num_tokens in (1, 2, 5, 9):
            chunks = client.generate(PROMPT, params(400))
            for _ in range(num_tokens):
                next(chunks)
            chunks.close()
        assert [token for chunk in other for token in chunk.token_ids] == plain_tokens([9, 8], num_stages, 120, ignore_eos=True)
        fleet.wait_until_free()


def test_a_stop_string_in_the_middle_ends_the_work(tmp_path: Path) -> None:
    with FakeFleet(tmp_path) as fleet, connect(fleet, tmp_path) as client:
        text = client.tokenizer.decode(plain_tokens(PROMPT, 2, 40, ignore_eos=True))
        found = client.complete(PROMPT, params(300, stop=(text[12:15],)))
        assert found.text == text[: text.find(text[12:15])]
        fleet.wait_until_free()


@pytest.mark.parametrize("idx", [0, 1])
def test_a_worker_that_drains_in_the_middle_lets_the_text_come_to_its_end(tmp_path: Path, idx: int) -> None:
    with FakeFleet(tmp_path, delay_s=0.002) as fleet, connect(fleet, tmp_path) as client:
        chunks = client.generate(PROMPT, params(60))
        next(chunks)
        fleet.workers[idx].drain()
        assert [token for chunk in chunks for token in chunk.token_ids] == plain_tokens(PROMPT, 2, 60, ignore_eos=True)[1:]


def test_a_client_that_vanishes_leaves_no_more_than_it_granted() -> None:
    with running("first", 2, 0) as first, running("last", 2, 1) as last, client_of("bob", first, last) as bob:
        with client_of("ann", first, last) as ann:
            ann.join(first, last, is_ring=True)
            ann.open(1)
            ann.send(MicroBatch(stage_idx=0, steps=(step(1, row(1, 0, [1, 2, 3], kind=SliceKind.PREFILL, num_ahead=5)),)))
        deadline = time.monotonic() + 5
        while len(last.runners[1].batches) < 6 and time.monotonic() < deadline:
            bob.status()
        for turn in range(6):  # what either of them still had to do is done before it answers, or soon after
            bob.status(turn % 2)
        assert len(last.runners[1].batches) == 6
        assert bob.status().stages[0].num_streams == 1  # until the lease runs out, as ever


# --- as messages -----------------------------------------------------------------------------------------------------


def test_one_message_is_answered_step_by_step() -> None:
    with running("first", 2, 0) as first, running("last", 2, 1) as last, client_of("ann", first, last) as ann:
        ann.join(first, last, is_ring=True)
        ann.open(1)
        ann.open(2)
        slices = (row(1, 0, [1, 2, 3], kind=SliceKind.PREFILL, num_ahead=4), row(2, 0, [7], num_ahead=2))
        ann.send(MicroBatch(stage_idx=0, steps=(step(1, *slices),)))
        told = [ann.receive(StepResult, lambda result, number=number: result.step_id == number) for number in range(1, 6)]  # type: ignore[misc]
        for idx, (prompt, count) in enumerate((([1, 2, 3], 5), ([7], 3))):
            assert [tokens_of(one.results[idx])[0] for one in told[:count]] == plain(prompt, count, 2)
        assert [len(one.results) for one in told] == [2, 2, 2, 1, 1]
        assert all(len(one.timings) == 2 for one in told)
        assert ann.leftovers() == []


def test_a_stream_closed_in_the_middle_fails_at_most_once_and_the_other_goes_on() -> None:
    with running("first", 2, 0) as first, running("last", 2, 1) as last, client_of("ann", first, last) as ann:
        ann.join(first, last, is_ring=True)
        ann.open(1)
        ann.open(2)
        slices = (row(1, 0, [1, 2, 3], kind=SliceKind.PREFILL, num_ahead=40), row(2, 0, [7], num_ahead=40))
        ann.send(MicroBatch(stage_idx=0, steps=(step(1, *slices),)))
        ann.close_stream(1)
        tokens = []
        for number in range(1, 42):
            result = ann.receive(StepResult, lambda result, number=number: result.step_id == number)  # type: ignore[misc]
            tokens += [tokens_of(one)[0] for one in result.results if one.stream == 2]
        assert tokens == plain([7], 41, 2)
        failures = [message for message in ann.leftovers() if isinstance(message, StepFailed)]
        assert len(failures) <= 1
        assert [failure.code for one in failures for failure in one.failures] == ["state-lost"] * len(failures)
        assert [worker.runners[idx].num_streams for idx, worker in enumerate((first, last))] == [1, 1]


# --- over a network that loses and holds -----------------------------------------------------------------------------


def is_step_ahead(message: Message) -> bool:
    """Of the chain's own making: the client grants seven."""
    return isinstance(message, MicroBatch) and any(0 < piece.num_ahead < 6 for step in message.steps for piece in step.slices)


@pytest.mark.parametrize("what", ["step", "result"])
def test_what_gets_lost_in_the_middle_ends_in_a_deadline_and_the_next_call_works(
    memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path, what: str
) -> None:
    lost: list[Message] = []

    def lose_one(address: str, message: Message) -> Fate:
        is_it = is_step_ahead(message) if what == "step" else isinstance(message, StepResult) and message.step_id == 6
        if lost or not is_it:
            return Fate.DELIVER
        lost.append(message)
        return Fate.DROP

    with connect_memory(memory_fleet, network, tmp_path, step_timeout_s=0.4) as client:
        network.rule = lose_one
        with pytest.raises(DeadlineError, match="a step brought no answer"):
            client.complete(PROMPT, params(40))
        assert len(lost) == 1
        assert list(client.complete(PROMPT, params(40)).token_ids) == plain_tokens(PROMPT, 2, 40, ignore_eos=True)
        memory_fleet.wait_until_free()


def test_a_step_that_is_held_up_longer_than_its_stream_lives_disturbs_nobody(
    memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path
) -> None:
    held = threading.Event()

    def hold_one(address: str, message: Message) -> Fate:
        if held.is_set() or not is_step_ahead(message):
            return Fate.DELIVER
        held.set()
        return Fate.HOLD

    with connect_memory(memory_fleet, network, tmp_path) as client:
        network.rule = hold_one
        chunks = client.generate(PROMPT, params(40))
        next(chunks)
        assert held.wait(5)
        chunks.close()
        later = client.generate([9, 8], params(40))
        found = list(next(later).token_ids)
        network.release()
        found += [token for chunk in later for token in chunk.token_ids]
        assert found == plain_tokens([9, 8], 2, 40, ignore_eos=True)
        memory_fleet.wait_until_free()
