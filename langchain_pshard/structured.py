"""`with_structured_output`: binding a schema to the model, and reading the answer strictly.

LangChain's own parsers complete cut JSON. That is right in the middle of a stream and wrong at its end, where an answer that a limit has
cut would pass for a whole one: these parsers raise then, and say why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.tools import as_tool, schema_of

METHODS = ("json_schema", "function_calling", "json_mode")


def binding_of(schema: Any, method: str, strict: bool | None) -> dict[str, Any]:
    """The options that make an answer follow `schema`.

    Raises:
        InvalidOptionError: an unknown method, a missing schema, or something that is none.
    """
    if method not in METHODS:
        raise InvalidOptionError(f"method={method!r} is unknown; valid: {', '.join(METHODS)}")
    if schema is None:
        if method != "json_mode":
            raise InvalidOptionError(f"method={method!r} needs a schema; only json_mode goes without")
        return {"response_format": {"type": "json_object"}, "ls_structured_output_format": {"kwargs": {"method": method}, "schema": None}}
    own = schema_of(schema, strict=strict)
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": _traced(schema, own, strict)}
    if method == "function_calling":
        tool = _tool(schema, strict)
        return {"tools": [tool], "tool_choice": tool["function"]["name"], "ls_structured_output_format": traced}
    response_format = {"type": "json_schema", "json_schema": {"name": str(own.get("title", "answer")), "schema": own}}
    return {"response_format": response_format, "ls_structured_output_format": traced}


def parser_of(schema: Any, method: str) -> BaseCumulativeTransformOutputParser[Any]:
    """What makes an instance of `schema` out of an answer, or a dict where `schema` is no pydantic class."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_class:
            return _ToolParser(tools=[schema], first_tool_only=True)
        return _KeyToolParser(key_name=_tool(schema, None)["function"]["name"], first_tool_only=True)
    return _PydanticParser(pydantic_object=schema) if is_class else _JsonParser()


def with_raw(
    model: Runnable[LanguageModelInput, AIMessage], parser: BaseCumulativeTransformOutputParser[Any]
) -> Runnable[LanguageModelInput, Any]:
    """A dict of `raw`, `parsed` and `parsing_error`, of which one of the last two is None."""
    parsed = RunnablePassthrough.assign(parsed=RunnableLambda(itemgetter("raw")) | parser, parsing_error=lambda _: None)
    broken = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([broken], exception_key="parsing_error")


def _tool(schema: Any, strict: bool | None) -> dict[str, Any]:
    is_nameless = isinstance(schema, dict) and not {"title", "name", "function"} & schema.keys()
    return as_tool({"title": "answer", **schema} if is_nameless else schema, strict=strict)


def _traced(schema: Any, own: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    """As other integrations report it to tracers."""
    try:
        return dict(convert_to_json_schema(schema, strict=strict))
    except ValueError:  # a bare JSON schema without a title is good enough for us
        return own


# --- parsers ----------------------------------------------------------------------------------------------------------


def _is_whole(result: Sequence[Generation], partial: bool) -> bool:
    """Whether all of the answer is there: a stream is parsed in part until its last chunk, which tells the finish reason."""
    return not partial or _finish_reason(result) is not None


def _finish_reason(result: Sequence[Generation]) -> str | None:
    generation = result[0]
    return generation.message.response_metadata.get("finish_reason") if isinstance(generation, ChatGeneration) else None


def _cut(result: Sequence[Generation]) -> str:
    return "max_tokens cut the answer: raise it" if _finish_reason(result) == "length" else "the answer is not what was asked for"


def _loaded(result: list[Generation]) -> Any:
    text = result[0].text
    try:
        return json.loads(text)
    except ValueError as error:
        raise OutputParserException(f"no whole JSON in the answer ({_cut(result)}): {error}", llm_output=text) from error


class _JsonParser(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return _loaded(result) if _is_whole(result, partial) else super().parse_result(result, partial=True)


class _PydanticParser(PydanticOutputParser):  # type: ignore[type-arg]  # the class is the caller's
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return self._parse_obj(_loaded(result)) if _is_whole(result, partial) else super().parse_result(result, partial=True)


def _check_call(result: list[Generation], partial: bool) -> None:
    """Raise when the whole answer holds no valid call."""
    message = result[0].message if isinstance(result[0], ChatGeneration) else None
    if not isinstance(message, AIMessage) or not _is_whole(result, partial):
        return
    for call in message.invalid_tool_calls:
        reason = call.get("error") or _cut(result)
        raise OutputParserException(f"the call of {call.get('name')!r} is broken ({reason})", llm_output=call.get("args") or "")
    if not message.tool_calls:
        raise OutputParserException(f"no call in the answer ({_cut(result)})", llm_output=message.text)


class _ToolParser(PydanticToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_call(result, partial)
        return super().parse_result(result, partial=partial)


class _KeyToolParser(JsonOutputKeyToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_call(result, partial)
        return super().parse_result(result, partial=partial)
