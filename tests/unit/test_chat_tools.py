"""Tools, structured output, reasoning and log-probabilities on the chat model, over a scripted client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain_core.exceptions import (
    ModelConnectionError,
    ModelInvalidRequestError,
    ModelRateLimitError,
    ModelTimeoutError,
    OutputParserException,
)
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from langchain_pshard.chat_models import ChatPShard
from langchain_pshard.constraints import finite
from langchain_pshard.core.errors import CapacityError, DeadlineError, InvalidOptionError, PShardError, WorkerUnreachableError
from langchain_pshard.core.grammar import GrammarKind
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import FinishReason
from tests.support.fake_client import FakeClient
from tests.support.tokenizers import byte_level_tokenizer

WORKERS = ["tcp://127.0.0.1:7001"]
HERMES = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
HERMES += "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}<tool_call>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
Serve = Callable[..., FakeClient]


@tool
def add(a: int, b: str = "x") -> str:
    """Add."""
    return f"{a}{b}"


@tool
def look_up(word: str) -> str:
    """Look up."""
    return word


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def start(*scripts: Any, chat_template: str | None = HERMES, end: str = "", reason: FinishReason = FinishReason.STOP) -> FakeClient:
        client = FakeClient(byte_level_tokenizer(chat_template=chat_template), *scripts)
        client.end_text, client.finish_reason = end, reason
        monkeypatch.setattr(PipelineClient, "connect", lambda workers, **options: client)
        return client

    return start


def both_ways(model: Any, prompt: str = "Hi") -> AIMessage:
    """The reply, after checking that the streamed one says the same."""
    whole = model.invoke(prompt)
    chunks = list(model.stream(prompt))
    joined = add_ai_message_chunks(chunks[0], *chunks[1:])
    assert joined.content == whole.content
    assert [(call["name"], call["args"]) for call in joined.tool_calls] == [(call["name"], call["args"]) for call in whole.tool_calls]
    assert [call["name"] for call in joined.invalid_tool_calls] == [call["name"] for call in whole.invalid_tool_calls]
    assert joined.additional_kwargs == whole.additional_kwargs
    assert joined.response_metadata == whole.response_metadata
    return whole


def grammar(client: FakeClient) -> Any:
    found = client.params[-1].grammar
    assert found is not None
    assert found.kind is GrammarKind.JSON_SCHEMA
    return json.loads(found.text)


def test_calls_beside_text_in_any_pieces(serve: Serve) -> None:
    client = serve(["Let me", " see.\n", *CALL, "\n", CALL])
    with ChatPShard(workers=WORKERS) as model:
        message = both_ways(model.bind_tools([add, look_up]))
        chunks = [chunk for chunk in model.bind_tools([add]).stream("Hi") if chunk.tool_call_chunks]
    assert message.content == "Let me see."
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("add", {"a": 1, "b": "ü"})] * 2
    assert len({call["id"] for call in message.tool_calls}) == 2
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert {part["index"] for chunk in chunks for part in chunk.tool_call_chunks} == {0, 1}
    assert len(chunks) > 10, "arguments come as they are written"
    assert '"name": "look_up"' in client.prompts[0]
    assert client.params[0].grammar is None
    assert "<tool_call>" in client.params[0].marks


def test_at_most_one_call(serve: Serve) -> None:
    serve([CALL, CALL, "more"])
    with ChatPShard(workers=WORKERS) as model:
        message = both_ways(model.bind_tools([add], parallel_tool_calls=False))
    assert (len(message.tool_calls), message.content) == (1, "")


def test_choices(serve: Serve) -> None:
    client = serve(['{"name": "add", "arguments": {"a": 1}}'])
    with ChatPShard(workers=WORKERS) as model:
        for choice in ("any", "required", True, {"type": "any"}):
            [call] = both_ways(model.bind_tools([add, look_up], tool_choice=choice)).tool_calls
            assert (call["name"], call["args"]) == ("add", {"a": 1})
            names = [one["properties"]["name"]["const"] for one in grammar(client)["anyOf"]]
            assert names == ["add", "look_up"]
            assert client.prompts[-1].endswith("<tool_call>\n")
            assert client.params[-1].stop == ()
        for named in ("add", {"type": "function", "function": {"name": "add"}}):
            both_ways(model.bind_tools([add, look_up], tool_choice=named))
            assert grammar(client)["properties"]["name"] == {"const": "add"}
        free = model.bind_tools([add], tool_choice="none").invoke("Hi")
        assert (free.tool_calls, client.params[-1].grammar) == ([], None)
        assert '"add"' not in client.prompts[-1]
        for wrong in ("sub", 3, {"x": 1}):
            with pytest.raises(ModelInvalidRequestError, match="tool_choice"):
                model.bind_tools([add], tool_choice=wrong).invoke("Hi")
        with pytest.raises(InvalidOptionError, match="needs tools"):
            model.invoke("Hi", tool_choice="any")
        with pytest.raises(InvalidOptionError, match="two tools are called 'add'"):
            model.invoke("Hi", tools=[add, add])
        with pytest.raises(InvalidOptionError, match="cannot be a tool"):
            model.bind_tools([3])
        with pytest.raises(InvalidOptionError, match="unknown option 'tool_chioce'"):
            model.bind_tools([add], tool_chioce="any")
        with pytest.raises(InvalidOptionError, match="contradict"):
            model.bind_tools([add], tool_choice="any", response_format={"type": "json_object"}).invoke("Hi")


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"name": "f", "description": "d"}, "no schema; .*parameters="),
        ({"type": "function", "function": {"name": "f", "parameters": None}}, "no schema"),
        ({"name": "f", "parameters": "x"}, "'x' is no JSON schema of an object"),
        ({"name": "f", "parameters": {"type": "string"}}, "no JSON schema of an object"),
        ({"name": 3, "parameters": {}}, "no name"),
        ({"type": "web_search"}, "cannot be a tool"),
        ("look_up", "cannot be a tool"),
    ],
)
def test_a_tool_without_a_name_or_schema_is_refused_when_it_is_bound(wrong: Any, part: str) -> None:
    with ChatPShard(workers=WORKERS) as model, pytest.raises(ModelInvalidRequestError, match=part) as caught:  # never connects
        model.bind_tools([add, wrong])
    assert isinstance(caught.value, InvalidOptionError)
    with pytest.raises(ValidationError, match=part):
        ChatPShard(workers=WORKERS, tools=[wrong])


def test_tools_that_take_nothing(serve: Serve) -> None:
    def ping() -> str:
        """Ping."""
        return "pong"

    class Stop(BaseModel):
        """Stop."""

    client = serve(['{"name": "ping", "arguments": {}}'])
    bare = {"title": "bare", "type": "object"}
    with ChatPShard(workers=WORKERS) as model:
        [call] = model.bind_tools([ping, Stop, bare], tool_choice="any").invoke("Hi").tool_calls
        assert (call["name"], call["args"]) == ("ping", {})
    assert [schema["properties"] for schema in grammar(client)["$defs"].values()] == [{}, {}, {}]


def test_references_inside_a_tool_stay_its_own(serve: Serve) -> None:
    client = serve(['{"name": "f", "arguments": {}}'])
    parameters = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/T"}},
        "$defs": {"T": {"type": "object", "properties": {"u": {"$ref": "#"}}}},
    }
    with ChatPShard(workers=WORKERS) as model:
        model.bind_tools([{"name": "f", "description": "d", "parameters": parameters}], tool_choice="f").invoke("Hi")
    own = grammar(client)["$defs"]["tool_0"]
    assert own["properties"]["t"] == {"$ref": "#/$defs/tool_0/$defs/T"}
    assert own["$defs"]["T"]["properties"]["u"] == {"$ref": "#/$defs/tool_0"}
    assert own["additionalProperties"] is False


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("end", range(12, len(CALL) - 14, 5))
def test_a_cut_call_is_never_a_call(serve: Serve, size: int, end: int) -> None:
    cut = CALL[:end]
    serve([cut[at : at + size] for at in range(0, len(cut), size)], reason=FinishReason.LENGTH)
    with ChatPShard(workers=WORKERS) as model:
        message = both_ways(model.bind_tools([add]))
    [broken] = message.invalid_tool_calls
    assert message.tool_calls == []
    assert "ends before" in str(broken["error"])
    assert message.response_metadata["finish_reason"] == "length"


def test_a_call_or_an_answer_of_a_form(serve: Serve) -> None:
    client = serve(['{"name": "add", "arguments": {"a": 1}}'], ['{"city": "Rome"}'])
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    with ChatPShard(workers=WORKERS) as model:
        bound = model.bind_tools([add], response_format=schema)
        assert bound.invoke("Hi").tool_calls[0]["name"] == "add"
        answer = bound.invoke("Hi")
    assert (json.loads(answer.text), answer.tool_calls) == ({"city": "Rome"}, [])
    assert [next(iter(one)) for one in grammar(client)["anyOf"]] == ["$ref", "type"]


class Person(BaseModel):
    """Somebody."""

    name: str
    kind: Literal["a", "b"] = "a"
    friends: list[Person] = []  # pydantic copies it


class City(TypedDict):
    """A city."""

    name: str


def test_structured_output_by_every_method(serve: Serve) -> None:
    client = serve(['{"name": "Ann", ', '"kind": "b", "friends": [{"name": "Bob"}]}'])
    with ChatPShard(workers=WORKERS) as model:
        for method in ("json_schema", "json_mode"):
            bound = model.with_structured_output(Person, method=method)  # type: ignore[arg-type]
            assert bound.invoke("Hi") == Person(name="Ann", kind="b", friends=[Person(name="Bob")])
            assert list(bound.stream("Hi"))[-1] == bound.invoke("Hi")
            assert asyncio.run(bound.ainvoke("Hi")) == bound.invoke("Hi")
            assert grammar(client)["$defs"]["Person"]["additionalProperties"] is False
        for schema in (City, {"type": "object", "properties": {"name": {"type": "string"}}}):
            assert model.with_structured_output(schema).invoke("Hi")["name"] == "Ann"
        assert model.with_structured_output(method="json_mode").invoke("Hi")["kind"] == "b"
        assert grammar(client) == {"type": "object"}
        client.scripts = [['{"name": "City", "arguments": {"name": "Rome"}}']]
        for schema in (City, {"title": "City", "type": "object", "properties": {"name": {"type": "string"}}}):
            assert model.with_structured_output(schema, method="function_calling").invoke("Hi") == {"name": "Rome"}
        raw = model.with_structured_output(City, method="function_calling", include_raw=True).invoke("Hi")
        assert (raw["parsed"], raw["parsing_error"], type(raw["raw"])) == ({"name": "Rome"}, None, AIMessage)
        for wrong in ({"method": "xml"}, {"temprature": 1}):
            with pytest.raises(InvalidOptionError):
                model.with_structured_output(City, **wrong)
        with pytest.raises(InvalidOptionError, match="needs a schema"):
            model.with_structured_output()


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Person, City])
def test_a_cut_answer_raises_and_says_why(serve: Serve, method: Any, schema: Any) -> None:
    text = '{"name": "An' if method == "json_schema" else f'{{"name": "{schema.__name__}", "arguments": {{"name": "An'
    serve([text[:7], text[7:]], reason=FinishReason.LENGTH)
    with ChatPShard(workers=WORKERS) as model:
        bound = model.with_structured_output(schema, method=method)
        with pytest.raises(OutputParserException, match=r"max_tokens|ends before"):
            bound.invoke("Hi")
        with pytest.raises(OutputParserException, match=r"max_tokens|ends before"):
            list(bound.stream("Hi"))
        raw = model.with_structured_output(schema, method=method, include_raw=True).invoke("Hi")
        assert raw["parsed"] is None
        assert isinstance(raw["parsing_error"], OutputParserException)


def test_regular_expressions_and_lark(serve: Serve) -> None:
    client = serve(["yes"])
    with ChatPShard(workers=WORKERS) as model:
        model.invoke("Hi", response_format={"type": "regex", "regex": "yes|no"})
        assert client.params[-1].grammar is not None
        assert client.params[-1].grammar.kind is GrammarKind.REGEX
        model.bind(response_format={"type": "lark", "lark": 'start: "yes"'}).invoke("Hi")
        assert client.params[-1].grammar.kind is GrammarKind.LARK


def test_reasoning_stays_apart(serve: Serve) -> None:
    serve(["<thi", "nk>\nHm", "m.</think>\n\n", "Yes", "."])
    with ChatPShard(workers=WORKERS) as model:
        message = both_ways(model)
        assert (message.content, message.additional_kwargs) == ("Yes.", {"reasoning_content": "Hmm."})
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
        newer = model.model_copy(update={"output_version": "v1"}).invoke("Hi")
        assert [block["type"] for block in newer.content] == ["reasoning", "text"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DeadlineError("x"), ModelTimeoutError),
        (CapacityError("x"), ModelRateLimitError),
        (WorkerUnreachableError("x", addresses=("a",)), ModelConnectionError),
    ],
)
def test_errors_are_langchains_own_too(serve: Serve, error: PShardError, kind: type[Exception]) -> None:
    serve([error])
    with ChatPShard(workers=WORKERS) as model, pytest.raises(kind) as caught:
        model.invoke("Hi")
    assert isinstance(caught.value, type(error))
    assert caught.value.is_retryable
    assert getattr(caught.value, "addresses", ("a",)) == ("a",)


def test_token_counts_know_tools(serve: Serve) -> None:
    serve(["x"])
    with ChatPShard(workers=WORKERS) as model:
        bare = model.get_num_tokens_from_messages([HumanMessage("Hi")])
        bound = model.get_num_tokens_from_messages([HumanMessage("Hi")], tools=[add])
        assert bound == model.bind_tools([add]).invoke("Hi").usage_metadata["input_tokens"] > bare  # type: ignore[index]


def test_the_profile_knows_the_context_once_connected(serve: Serve) -> None:
    serve(["x"])
    with ChatPShard(workers=WORKERS) as model:
        assert model.profile is not None
        assert (model.profile["tool_calling"], model.profile.get("max_input_tokens")) == (True, None)
        model.invoke("Hi")
        assert model.profile["max_input_tokens"] == 2048
    with ChatPShard(workers=WORKERS, profile={"max_input_tokens": 5}) as model:
        model.invoke("Hi")
        assert model.profile == {"max_input_tokens": 5}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}),
        ({"type": ["integer", "null"], "minimum": 0}, {"type": ["integer", "null"], "minimum": 0, "maximum": 2**53 - 1}),
        ({"type": "number", "exclusiveMaximum": 1}, {"type": "number", "exclusiveMaximum": 1, "minimum": -(10**15), "multipleOf": 1e-9}),
        ({"type": "number", "minimum": 10**20}, {"type": "number", "minimum": 10**20}),
        ({"type": "integer", "enum": [1]}, {"type": "integer", "enum": [1]}),
        ({"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object", "additionalProperties": True}, {"type": "object", "additionalProperties": True}),
        ({"allOf": [{"type": "object", "properties": {}}]}, {"allOf": [{"type": "object", "properties": {}}]}),
        ({"enum": [{"type": "object"}]}, {"enum": [{"type": "object"}]}),
    ],
)
def test_schemas_are_narrowed_where_a_model_would_not_stop(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert finite(schema) == expected
