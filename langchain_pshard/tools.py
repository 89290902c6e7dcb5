"""Tools and tool choices in all the forms LangChain knows -> the one form that prompts and constraints know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_pshard.core.errors import InvalidOptionError

_JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ALIASES = {"any": "required"}


def as_tools(tools: Sequence[Any], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Raises:
        InvalidOptionError: one is of no known form, has no name, or no schema of its arguments.
    """
    return [as_tool(tool, strict=strict) for tool in tools]


def as_tool(tool: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """One tool in OpenAI's form; see `as_tools`."""
    try:
        converted = convert_to_openai_tool(tool, strict=strict)
        function = converted["function"]
        if not isinstance(function["name"], str) or not function["name"]:
            raise ValueError("it has no name")
        if isinstance(tool, Mapping) and "title" in tool:  # a JSON schema itself, of which LangChain leaves out what is empty
            function.setdefault("parameters", {"type": "object", "properties": {}})
        _check_arguments(function.get("parameters"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidOptionError(
            f"{tool!r} cannot be a tool: {error}; valid: a function with types and a docstring, a BaseTool, a pydantic or TypedDict class,"
            " or a dict with name, description and parameters"
        ) from error
    return dict(converted)


def _check_arguments(schema: Any) -> None:
    if schema is None:
        raise ValueError("it has no schema; one that takes no arguments says so by parameters={'type': 'object', 'properties': {}}")
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"parameters={schema!r} is no JSON schema of an object")


def as_choice(choice: Any) -> str:
    """`auto`, `none`, `required` or a tool's name.

    Raises:
        InvalidOptionError: of no known form.
    """
    match choice:
        case None | False:
            return "auto"
        case True:
            return "required"
        case str():
            return _ALIASES.get(choice, choice)
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case {"type": str(kind)} if kind in ("auto", "any", "none", "required"):
            return _ALIASES.get(kind, kind)
        case _:
            raise InvalidOptionError(
                f"tool_choice={choice!r} is of no known form; valid: auto, any, required, none, True, a tool's name,"
                " or {'type': 'function', 'function': {'name': ..}}"
            )


def schema_of(schema: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """The JSON schema of a pydantic or TypedDict class, of a tool, or of what is one already.

    Raises:
        InvalidOptionError: there is none in it.
    """
    if isinstance(schema, type) and is_basemodel_subclass(schema) and hasattr(schema, "model_json_schema"):
        return dict(schema.model_json_schema())  # LangChain's own way loses references of a class to itself
    if isinstance(schema, Mapping) and not {"parameters", "function", "input_schema"} & schema.keys():
        return dict(schema)
    try:
        return dict(convert_to_json_schema(schema, strict=strict))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidOptionError(
            f"{schema!r} is no schema: {error}; valid: a pydantic class, a TypedDict, a JSON schema, or a tool"
        ) from error


def as_response_format(value: Any) -> Any:
    """A response format in OpenAI's form; classes and bare JSON schemas stand for themselves."""
    if value is None or (isinstance(value, Mapping) and isinstance(value.get("type"), str) and value["type"] not in _JSON_TYPES):
        return value
    schema = schema_of(value)
    return {"type": "json_schema", "json_schema": {"name": str(schema.get("title", "answer")), "schema": schema}}
