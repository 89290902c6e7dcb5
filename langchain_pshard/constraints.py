"""What a call's tools, tool choice and response format ask of the text: a grammar, and how the answer is to be read. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.grammar import Grammar, GrammarKind
from langchain_pshard.tool_formats import ToolFormat
from langchain_pshard.turn import TurnPlan

Schema = dict[str, Any]
Tool = Mapping[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name": .., "description": .., "parameters": {..}}}`."""

_FORMATS = (
    "{'type': 'text'}, {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': {'schema': ..}}, {'type': 'regex', 'regex': ..}"
)
_FORMATS += " or {'type': 'lark', 'lark': ..}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """How one answer is bound and read."""

    tools: tuple[Tool, ...]
    """Those that the prompt shows."""
    grammar: Grammar | None
    plan: TurnPlan
    lead_in: str = ""
    """Added to the prompt: the answer begins behind it."""


def constraint_of(
    *,
    tools: Sequence[Tool],
    tool_choice: str,
    response_format: Mapping[str, Any] | None,
    form: ToolFormat,
    is_parallel: bool,
) -> Constraint:
    """
    Args:
        tools: all that are bound.
        tool_choice: `auto`, `none`, `required`, or the name of a tool.
        response_format: in OpenAI's form, or `regex` and `lark` as ours.
        form: how the model writes calls.
        is_parallel: whether one answer may hold several calls.

    Raises:
        InvalidOptionError: the options contradict one another or are not of a known form.
    """
    names = tuple(str(tool["function"]["name"]) for tool in tools)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidOptionError(f"two tools are called {twice!r}; give each a name of its own")
    grammar = _grammar_of(response_format)
    if tool_choice not in ("auto", "none", "required", *names):
        raise InvalidOptionError(
            f"tool_choice={tool_choice!r} is no bound tool; valid: auto, none, required (or any), {', '.join(names) or '(no tool)'}"
        )
    if tool_choice == "none" or not tools:
        if tool_choice == "required":
            raise InvalidOptionError("tool_choice='required' needs tools; pass at least one")
        return Constraint(tools=(), grammar=grammar, plan=TurnPlan())
    if tool_choice == "auto":
        plan = TurnPlan(form=form, tool_names=names, max_calls=None if is_parallel else 1)
        if grammar is not None:
            grammar = _call_or(grammar, tools, form)
        return Constraint(tools=tuple(tools), grammar=grammar, plan=plan)
    if grammar is not None:
        raise InvalidOptionError(f"response_format and tool_choice={tool_choice!r} contradict one another: pass one of them")
    chosen = [tool for tool, name in zip(tools, names, strict=True) if tool_choice in ("required", name)]
    return Constraint(
        tools=tuple(tools),
        grammar=_json_grammar(call_schema(chosen, form.arguments_key)),
        plan=TurnPlan(form=form, tool_names=names, is_call=True),
        lead_in=form.lead_in,
    )


def call_schema(tools: Sequence[Tool], arguments_key: str) -> Schema:
    """The schema of exactly one valid call of one of `tools`."""
    definitions: Schema = {}
    calls: list[Schema] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = f"tool_{index}"
        definitions[name] = finite(_moved({"type": "object", **(function.get("parameters") or {})}, f"#/$defs/{name}"))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, arguments_key: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions} if len(calls) > 1 else {**calls[0], "$defs": definitions}


def finite(schema: Schema) -> Schema:
    """A narrower schema for models that seldom stop by themselves: every value of it is one of `schema`.

    Objects are closed unless they say otherwise (where `allOf` puts objects together, closing one would forbid the keys of another, so they
    stay open). Integers stay within what every JSON reader keeps exact, numbers within 15 digits before the point and 9 behind it:
    Gemma 3 270M goes on with zeros for ever otherwise.
    """
    return dict(_finite(schema, closes=not _has_key(schema, "allOf")))


_LITERALS = ("const", "enum", "default", "examples")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MAX_INTEGER = 2**53 - 1
_MAX_NUMBER = 10**15
_NUMBER_STEP = 1e-9


def _finite(schema: Any, *, closes: bool) -> Any:
    if isinstance(schema, list):
        return [_finite(item, closes=closes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: value if key in _LITERALS else _finite(value, closes=closes) for key, value in schema.items()}
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if closes and "object" in kinds and not {"patternProperties", "additionalProperties", "minProperties"} & schema.keys():
        result |= {"additionalProperties": False, "properties": result.get("properties", {})}
    if ("integer" in kinds or "number" in kinds) and not {"const", "enum", "multipleOf"} & schema.keys():
        result |= _digits(schema, is_integer="number" not in kinds)
    return result


def _digits(schema: Schema, *, is_integer: bool) -> Schema:
    """The bounds that a number's schema leaves out; none where its own lie beyond them."""
    most = _MAX_INTEGER if is_integer else _MAX_NUMBER
    if any(not isinstance(schema.get(key, 0), int | float) or abs(schema.get(key, 0)) > most for key in _LOWER + _UPPER):
        return {}
    added: Schema = {} if is_integer else {"multipleOf": _NUMBER_STEP}
    if not schema.keys() & set(_LOWER):
        added["minimum"] = -most
    if not schema.keys() & set(_UPPER):
        added["maximum"] = most
    return added


def _has_key(schema: Any, key: str) -> bool:
    if isinstance(schema, dict):
        return key in schema or any(_has_key(value, key) for value in schema.values())
    return isinstance(schema, list) and any(_has_key(item, key) for item in schema)


def _moved(schema: Any, place: str) -> Any:
    """The schema with its own references re-rooted to where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, place)
        for key, value in schema.items()
        if key not in ("$schema", "$id")  # an identity of its own would change what references are relative to
    }


def _grammar_of(response_format: Mapping[str, Any] | None) -> Grammar | None:
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _json_grammar({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            try:
                return _json_grammar(finite(schema))
            except RecursionError as error:
                raise InvalidOptionError("the JSON schema of response_format is nested too deep: name inner parts in its $defs") from error
        case {"type": "regex", "regex": str(pattern)}:
            return Grammar(GrammarKind.REGEX, pattern)
        case {"type": "lark", "lark": str(text)}:
            return Grammar(GrammarKind.LARK, text)
        case _:
            raise InvalidOptionError(f"response_format={response_format!r} is of no known form; valid: {_FORMATS}")


def _call_or(grammar: Grammar, tools: Sequence[Tool], form: ToolFormat) -> Grammar:
    """Either a call, or an answer of the asked form."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidOptionError(f"tools go together with a JSON response_format, not with {grammar.kind.value}: pass tool_choice='none'")
    calls = call_schema(tools, form.arguments_key)
    answer = _moved(json.loads(grammar.text), "#/$defs/answer")
    definitions = {**calls.pop("$defs"), "answer": answer}
    return _json_grammar({"anyOf": [{"$ref": "#/$defs/answer"}, *calls.get("anyOf", [calls])], "$defs": definitions})


def _json_grammar(schema: Schema) -> Grammar:
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"the JSON schema is not made of JSON values: {error}") from error
