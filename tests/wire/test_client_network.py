"""The client over a network that doubles, loses and holds messages: real worker loops around a fake engine, over the in-memory hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from langchain_pshard.core.errors import DeadlineError, WorkerLostError
from langchain_pshard.core.messages import Hello, Message, MicroBatch, Pong, StepResult
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.transport.memory import Fate, MemoryNetwork
from tests.support.fake_fleet import FakeFleet, connect_memory, plain_tokens

PROMPT = [5, 6, 7]


def params(max_tokens: int) -> GenerationParams:
    return GenerationParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("max_steps_ahead", [0, 7, 64])
def test_doubled_messages_change_nothing(memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path, max_steps_ahead: int) -> None:
    network.rule = lambda address, message: Fate.DOUBLE
    with connect_memory(memory_fleet, network, tmp_path, max_steps_ahead=max_steps_ahead) as client:
        plain = replace(params(80), draft=None)
        assert list(client.complete(PROMPT, plain).token_ids) == plain_tokens(PROMPT, 2, 80, ignore_eos=True)
    memory_fleet.wait_until_free()
    # A step that goes on twice because it came twice would be four times there one step later, and 16,000 times after seven.
    batches = [len(worker.runners[idx].batches) for idx, worker in enumerate(memory_fleet.workers)]
    assert batches[0] <= 2 * 80
    assert batches[1] <= 4 * 80


def test_lost_control_messages_are_repeated(memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()

    def drop_first_of_each(address: str, message: Message) -> Fate:
        kind = (address, type(message).__name__)
        if kind in seen or kind[1] not in ("Hello", "Welcome", "Join", "Joined", "Open", "Opened"):
            return Fate.DELIVER
        seen.add(kind)
        return Fate.DROP

    network.rule = drop_first_of_each
    with PipelineClient.connect(
        memory_fleet.addresses, options=ClientOptions(cache_dir=tmp_path / "cache"), hub_factory=network.hub, connect_timeout_s=20
    ) as client:
        assert list(client.complete(PROMPT, params(6)).token_ids) == plain_tokens(PROMPT, 2, 6, ignore_eos=True)
    assert len(seen) == 12


def test_lost_step_ends_in_a_deadline(memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path) -> None:
    with connect_memory(memory_fleet, network, tmp_path, step_timeout_s=0.4) as client:
        network.rule = lambda address, message: Fate.DROP if isinstance(message, MicroBatch) else Fate.DELIVER
        with pytest.raises(DeadlineError, match="a step brought no answer"):
            client.complete(PROMPT, params(6))
        network.rule = lambda address, message: Fate.DELIVER
        assert list(client.complete(PROMPT, params(6)).token_ids) == plain_tokens(PROMPT, 2, 6, ignore_eos=True)


def test_hung_worker_is_lost_after_the_liveness_timeout_and_its_late_answers_count_for_nothing(
    memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path
) -> None:
    hung = memory_fleet.addresses[1]
    with connect_memory(memory_fleet, network, tmp_path, liveness_timeout_s=0.8, ping_interval_s=0.2) as client:
        chunks = client.generate(PROMPT, params(400))
        next(chunks)
        network.rule = lambda address, message: Fate.HOLD if address == hung and isinstance(message, StepResult | Pong) else Fate.DELIVER
        with pytest.raises(WorkerLostError, match=f"{hung} \\(stage 1\\) is lost: it has not answered"):
            list(chunks)
        network.rule = lambda address, message: Fate.DELIVER
        later = client.generate(PROMPT, params(20))
        network.release()
        assert [token for chunk in later for token in chunk.token_ids] == plain_tokens(PROMPT, 2, 20, ignore_eos=True)
    memory_fleet.wait_until_free()


def test_a_first_worker_that_the_last_cannot_reach_costs_speed_and_a_warning(
    memory_fleet: FakeFleet, network: MemoryNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = memory_fleet.addresses[0]
    num_hellos = 0
    granted: list[int] = []

    def rule(address: str, message: Message) -> Fate:
        nonlocal num_hellos
        if isinstance(message, Hello) and address == first:
            num_hellos += 1
            return Fate.DELIVER if num_hellos == 1 else Fate.DROP  # the client's comes before anybody joins
        if isinstance(message, MicroBatch):
            granted.extend(piece.num_ahead for step in message.steps for piece in step.slices)
        return Fate.DELIVER

    network.rule = rule
    options = ClientOptions(cache_dir=tmp_path / "cache")
    with PipelineClient.connect(memory_fleet.addresses, options=options, hub_factory=network.hub, connect_timeout_s=20) as client:
        assert list(client.complete(PROMPT, replace(params(20), draft=None)).token_ids) == plain_tokens(PROMPT, 2, 20, ignore_eos=True)
    assert granted
    assert set(granted) == {0}
    warnings = [record.getMessage() for record in caplog.records if "max_steps_ahead=0" in record.getMessage()]
    assert len(warnings) == 1
    assert f"the worker at {memory_fleet.addresses[1]} cannot reach the one at {first}" in warnings[0]
    memory_fleet.wait_until_free()
