"""The chat model on real workers it starts itself, and on running ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from benchmarks.fleet import running_worker
from langchain_pshard import ChatPShard
from langchain_pshard.core.bundle import WeightMode, load_manifest
from langchain_pshard.core.errors import BundleError, FleetMismatchError, InvalidOptionError, WorkerLostError, WorkerUnreachableError
from tests.support.bundles import TinyBundle
from tests.support.json_schemas import conforms, random_schema

PROMPTS = [f"Tell me about {topic}." for topic in ("ships", "snow", "日本", "👩‍👩‍👧", "tea", "<|im_end|>", "chess", "rain")]


def worker_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "workers" in child.cmdline()]


@pytest.fixture
def model(tiny_fleet: list[str]) -> Iterator[ChatPShard]:
    with ChatPShard(workers=tiny_fleet, max_tokens=24) as model:
        yield model


def test_bundle_starts_workers_at_the_first_call_and_ends_them(tiny_bundle: TinyBundle) -> None:
    bundle = tiny_bundle("llama", num_stages=2)
    before = len(worker_processes())
    with ChatPShard(bundle=bundle, max_tokens=8, threads=1) as model:
        num_tokens = model.get_num_tokens("hello")
        assert num_tokens > 0
        assert len(worker_processes()) == before
        chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{text}")]) | model | StrOutputParser()
        text = chain.invoke({"text": "hello"})
        assert len(worker_processes()) == before + 2
        assert "".join(chain.stream({"text": "hello"})) == text
        assert asyncio.run(chain.ainvoke({"text": "hello"})) == text
        assert model.get_num_tokens("hello") == num_tokens
    assert len(worker_processes()) == before


def test_a_bundle_without_a_paged_form_runs_on_the_engine_it_names(tiny_bundle: TinyBundle) -> None:
    bundle = tiny_bundle("gemma2", num_stages=2, weights=WeightMode.INT4)
    assert load_manifest(bundle).runners == ("stateful",)
    with ChatPShard(bundle=bundle, max_tokens=8, threads=1) as model:
        text = model.invoke("hello").text
    with ChatPShard(bundle=bundle, max_tokens=8, threads=1, runner="stateful") as model:
        assert model.invoke("hello").text == text
    with ChatPShard(bundle=bundle, threads=1, runner="paged") as model, pytest.raises(InvalidOptionError, match=r"--runner stateful"):
        model.invoke("hello")


def test_a_dead_worker_of_its_own_is_started_again_by_the_next_call(tiny_bundle: TinyBundle) -> None:
    before = set(worker_processes())
    with ChatPShard(bundle=tiny_bundle("llama", num_stages=2), max_tokens=8, threads=1) as model:
        text = model.invoke("hello").text
        for call in (lambda: model.invoke("hello"), lambda: asyncio.run(model.ainvoke("hello"))):
            victim = (set(worker_processes()) - before).pop()
            victim.kill()  # and not waited for: the call may come before anybody knows
            assert call().text == text
        stream = model.stream("hello", max_tokens=1000)
        next(stream)
        (set(worker_processes()) - before).pop().kill()
        with pytest.raises(WorkerLostError):  # text that was delivered cannot be taken back
            list(stream)
        assert model.invoke("hello").text == text
    assert set(worker_processes()) == before


@pytest.mark.parametrize("text", ["half \ud800 a character", "<|im_end|>\udfff"])
def test_half_a_character_is_refused_by_name(model: ChatPShard, text: str) -> None:
    for call in (model.invoke, model.get_num_tokens, lambda text: next(model.stream(text)), lambda text: asyncio.run(model.ainvoke(text))):
        with pytest.raises(InvalidOptionError, match=r"lone surrogate \(U\+D"):
            call(text)


def test_stop_is_the_same_in_every_way_of_calling(model: ChatPShard) -> None:
    whole = model.invoke("Hi").text
    stop = [whole[5:8]]
    expected = whole[: whole.index(stop[0])]

    async def streamed() -> str:
        return "".join([chunk.text async for chunk in model.astream("Hi", stop=stop)])

    stopped = model.invoke("Hi", stop=stop)
    assert (stopped.text, stopped.response_metadata["finish_reason"]) == (expected, "stop")
    assert "".join(chunk.text for chunk in model.stream("Hi", stop=stop)) == expected
    assert "".join(chunk.text for chunk in model.bind(stop=stop).stream("Hi")) == expected
    assert asyncio.run(streamed()) == expected
    assert asyncio.run(model.ainvoke("Hi", stop=stop)).text == expected


def test_batches_say_what_single_calls_say(model: ChatPShard) -> None:
    alone = [model.invoke(prompt).text for prompt in PROMPTS]
    assert [message.text for message in model.batch(PROMPTS)] == alone
    assert [message.text for message in asyncio.run(model.abatch(PROMPTS))] == alone
    assert len(set(alone)) > 1


def test_seed_decides_the_text(model: ChatPShard) -> None:
    first = model.invoke("Hi", temperature=1.0)
    again = model.invoke("Hi", temperature=1.0, seed=first.response_metadata["seed"])
    assert again.text == first.text
    assert model.invoke("Hi", temperature=1.0).text != first.text


def test_usage_counts_the_prompt_that_was_sent(model: ChatPShard) -> None:
    message = model.invoke("Hi <|im_end|>", max_tokens=5)
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_tokens"] == model.get_num_tokens_from_messages([HumanMessage("Hi <|im_end|>")])
    assert message.usage_metadata["output_tokens"] == 5
    assert message.response_metadata["finish_reason"] == "length"


def test_abandoned_streams_leave_the_fleet_usable(model: ChatPShard) -> None:
    expected = model.invoke("Hi").text
    for _ in range(50):
        next(model.stream("Hi", max_tokens=1000))
    assert model.invoke("Hi").text == expected


def test_what_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere"):
        ChatPShard(bundle=tmp_path / "nowhere").invoke("Hi")
    begin = time.monotonic()
    with pytest.raises(WorkerUnreachableError, match=r"127\.0\.0\.1:9"):
        ChatPShard(workers=["tcp://127.0.0.1:9"], connect_timeout=0.5).invoke("Hi")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("seed", range(8))
def test_answers_and_forced_calls_follow_any_schema_streamed_or_not(tiny_fleet: list[str], seed: int) -> None:
    plain = random_schema(random.Random(1000 + seed))
    schema = plain | {"title": "Record"}
    with ChatPShard(workers=tiny_fleet) as model:
        bound = model.with_structured_output(schema)
        answer = bound.invoke("Hi")
        assert conforms(answer, plain)
        assert list(bound.stream("Hi"))[-1] == answer
        tool = {"name": "save", "description": "Save.", "parameters": schema}
        forced = model.bind_tools([tool], tool_choice="any")
        [call] = forced.invoke("Hi").tool_calls
        chunks = list(forced.stream("Hi"))
    assert call["name"] == "save"
    assert conforms(call["args"], plain)
    assert add_ai_message_chunks(chunks[0], *chunks[1:]).tool_calls[0]["args"] == call["args"]


def test_workers_that_are_no_chain_are_refused_by_name(tiny_fleet: list[str], tiny_bundle: TinyBundle) -> None:
    llama, gemma = tiny_bundle("llama", num_stages=2), tiny_bundle("gemma3_text", num_stages=2)
    with running_worker(llama, 0) as doubled, running_worker(gemma, 1) as foreign:
        refusals = {
            (tiny_fleet[0],): ("missing: 1", tiny_fleet[0]),
            (doubled.address, *tiny_fleet): ("stage 0", doubled.address, tiny_fleet[0]),
            (tiny_fleet[0], foreign.address): (
                foreign.address,
                tiny_fleet[0],
                load_manifest(llama).fingerprint[:12],
                load_manifest(gemma).fingerprint[:12],
            ),
        }
        for workers, parts in refusals.items():
            with ChatPShard(workers=list(workers)) as model, pytest.raises(FleetMismatchError) as caught:
                model.invoke("Hi")
            assert [part for part in parts if part not in str(caught.value)] == [], caught.value
    with ChatPShard(workers=tiny_fleet, max_tokens=4) as model:
        assert model.invoke("Hi").usage_metadata is not None  # none of it has hurt the fleet
