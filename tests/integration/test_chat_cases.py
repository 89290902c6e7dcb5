"""What goes wrong elsewhere, end to end: a chat model on two real workers whose texts are known, because a grammar allows nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelConnectionError, ModelError, ModelInvalidRequestError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage

from langchain_pshard import ChatPShard, PipelineClient
from langchain_pshard.core.errors import PShardError
from tests.support.texts import cut_at_stop, random_stop, random_text


@pytest.fixture
def model(tiny_fleet: list[str]) -> Iterator[ChatPShard]:
    with ChatPShard(workers=tiny_fleet) as model:
        yield model


def exactly(text: str) -> dict[str, Any]:
    """The option that makes an answer this text."""
    return {"response_format": {"type": "regex", "regex": "".join(f"\\x{{{ord(char):X}}}" for char in text) or "()"}}


async def astreamed(model: ChatPShard, prompt: str, **options: Any) -> list[AIMessageChunk]:
    return [chunk async for chunk in model.astream(prompt, **options)]


def text_of(chunks: list[AIMessageChunk]) -> str:
    return "".join(str(chunk.content) for chunk in chunks)


# --- texts --------------------------------------------------------------------------------------------------------------------


def test_three_hundred_texts_are_the_same_whole_or_in_pieces_and_stop_at_the_same_place(model: ChatPShard) -> None:
    texts = [random_text(random.Random(seed)) for seed in range(300)]
    stops = [random_stop(random.Random(seed)) for seed in range(300)]
    options = [exactly(text) | {"stop": stop or None} for text, stop in zip(texts, stops, strict=True)]
    expected = [cut_at_stop(text, stop) for text, stop in zip(texts, stops, strict=True)]
    assert len([1 for text, shown in zip(texts, expected, strict=True) if text != shown]) > 50

    def both(one: dict[str, Any]) -> tuple[str, str]:
        return model.invoke("Say it.", **one).text, text_of(list(model.bind(**one).stream("Say it.")))

    async def all_of_them() -> list[tuple[str, str]]:
        async def both(one: dict[str, Any]) -> tuple[str, str]:
            return (await model.ainvoke("Say it.", **one)).text, text_of(await astreamed(model, "Say it.", **one))

        return await asyncio.gather(*(both(one) for one in options))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(both, options)) == [(text, text) for text in expected]
    assert asyncio.run(all_of_them()) == [(text, text) for text in expected]


def test_no_token_at_all_is_an_empty_message(model: ChatPShard) -> None:
    whole = [model.invoke("Say nothing.", **exactly("")), asyncio.run(model.ainvoke("Say nothing.", **exactly("")))]
    streamed = [list(model.stream("Say nothing.", **exactly(""))), asyncio.run(astreamed(model, "Say nothing.", **exactly("")))]
    for message in whole:
        assert (type(message), message.content, message.tool_calls) == (AIMessage, "", [])
        assert message.response_metadata["finish_reason"] == "stop"
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == 1  # the end token
    for chunks in streamed:
        assert [(chunk.content, chunk.chunk_position) for chunk in chunks] == [("", "last")]


def test_usage_reaches_callbacks_once_in_every_way_of_calling(model: ChatPShard) -> None:
    async def drain(config: Any) -> None:
        async for _ in model.astream("Say it.", config, **exactly("abc")):
            pass

    ways: list[Callable[[Any], object]] = [
        lambda config: model.invoke("Say it.", config, **exactly("abc")),
        lambda config: list(model.stream("Say it.", config, **exactly("abc"))),
        lambda config: asyncio.run(model.ainvoke("Say it.", config, **exactly("abc"))),
        lambda config: asyncio.run(drain(config)),
    ]
    found = []
    for way in ways:
        heard = UsageMetadataCallbackHandler()
        way({"callbacks": [heard]})
        [usage] = heard.usage_metadata.values()
        found.append((usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]))
    num_prompt = model.get_num_tokens_from_messages([HumanMessage("Say it.")])
    assert found == [(num_prompt, 4, num_prompt + 4)] * 4


# --- loops and threads ----------------------------------------------------------------------------------------------------------


def test_loops_one_after_another_and_loops_in_threads(model: ChatPShard) -> None:
    expected = model.invoke("Hello", max_tokens=12).text
    assert [asyncio.run(model.ainvoke("Hello", max_tokens=12)).text for _ in range(2)] == [expected] * 2

    async def several() -> list[str]:
        calls = (model.ainvoke("Hello", max_tokens=12) for _ in range(3))
        return [message.text for message in await asyncio.gather(*calls)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: asyncio.run(several()), range(4))) == [[expected] * 3] * 4


# --- what cannot be asked -----------------------------------------------------------------------------------------------------

LONG = "A sentence of a good many bytes. " * 100


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths_before_any_work(model: ChatPShard, tiny_fleet: list[str]) -> None:
    num_tokens = model.get_num_tokens_from_messages([HumanMessage(LONG)])
    assert num_tokens > 3_000
    with PipelineClient.connect(tiny_fleet) as observer:

        def num_steps() -> list[int]:
            return [stage.num_steps for worker in observer.status().workers if worker.status for stage in worker.status.stages]

        before = num_steps()
        for call in (model.invoke, lambda text: next(model.stream(text)), lambda text: asyncio.run(model.ainvoke(text))):
            with pytest.raises(ContextOverflowError, match=rf"{num_tokens} tokens.* 2048"):
                call(LONG)
        assert num_steps() == before


IMAGE = HumanMessage([{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
AUDIO = HumanMessage([{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}])
UNIQUE = {"title": "T", "type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("ask", "part"),
    [
        (lambda model: model.invoke([IMAGE]), "'image_url' is not supported: this model reads text only"),
        (lambda model: model.invoke([AUDIO]), "'audio' is not supported"),
        (lambda model: model.invoke([]), "list of messages is empty"),
        (lambda model: next(model.stream([])), "list of messages is empty"),
        (lambda model: model.bind_tools([{"name": "f", "description": "d"}]), "has no schema"),
        (lambda model: model.with_structured_output(UNIQUE).invoke("Hi"), "uniqueItems.*#/properties/a/uniqueItems.* Supported: "),
        (lambda model: model.invoke("Hi", response_format={"type": "regex", "regex": "a(?=b)"}), "look-ahead"),
        (lambda model: model.invoke("Hi", tool_choice="any"), "needs tools"),
        (lambda model: model.bind_tools([UNIQUE], tool_choice="any", response_format={"type": "json_object"}).invoke("Hi"), "contradict"),
        (lambda model: model.invoke("Hi", max_tokens=0), "max_tokens=0"),
        (lambda model: model.invoke("Hi", stop=[""]), "empty string"),
    ],
)
def test_bad_input_is_one_typed_error_that_names_it(model: ChatPShard, ask: Callable[[ChatPShard], object], part: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match=part) as caught:
        ask(model)
    assert isinstance(caught.value, PShardError)
    assert not caught.value.is_retryable
    assert model.invoke("Hi", max_tokens=2).usage_metadata is not None  # nothing was hurt


def test_a_fleet_that_is_down_is_named() -> None:
    with ChatPShard(workers=["tcp://127.0.0.1:9"], connect_timeout=0.5) as model, pytest.raises(ModelConnectionError) as caught:
        model.invoke("Hi")
    assert "tcp://127.0.0.1:9: no connection" in str(caught.value)
    assert isinstance(caught.value, ModelError)
    assert caught.value.is_retryable  # type: ignore[attr-defined]
