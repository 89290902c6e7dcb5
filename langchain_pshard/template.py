"""The template engine: jinja2's immutable sandbox, made to look like what chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from langchain_core.exceptions import ModelInvalidRequestError

from langchain_pshard.core.errors import UsageError


class TemplateError(UsageError, ModelInvalidRequestError):
    """The model's chat template cannot render these messages; the message is the template's own."""

    code = "template"


class Template:
    """A chat template, compiled. Immutable, usable from any thread.

    Raises:
        TemplateError: it is not valid.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        self._source = source
        with _template_errors():
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))

    def knows(self, name: str) -> bool:
        """Whether the template reads this variable, or a part of a message of this name."""
        return name in self._variables or (name != "tools" and name in self._source)

    def render(self, **variables: Any) -> str:
        """
        Raises:
            TemplateError: the template refuses, or fails.
        """
        with _template_errors():
            return self._template.render(raise_exception=_raise_exception, **variables)


class _Generation(Extension):
    """`{% generation %}..{% endgeneration %}` marks assistant text for training; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where jinja2's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Whatever goes wrong in a template is a `TemplateError` with the template's own words and, where known, its line."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the model's chat template is not valid: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"the model's chat template refuses these messages{_line_of(error)}: {error}") from error


def _line_of(error: BaseException) -> str:
    trace, line = error.__traceback__, None
    while trace is not None:  # jinja2 maps frames of compiled templates to their source lines
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"
