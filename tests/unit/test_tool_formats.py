"""Tool calls out of streamed text: every common way to write them, in any pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.utils.json import parse_partial_json

from langchain_pshard.tool_formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    PLAIN,
    BrokenCall,
    CallPiece,
    Piece,
    TextPiece,
    ToolCallReader,
    ToolFormat,
    breaking_suffix,
    format_of,
)

NAMES = ("add", "get weather", "名前")
Outcome = tuple[str, list[tuple[str | None, str]], list[tuple[int, str | None, str]]]


def outcome(pieces: Iterable[Piece]) -> Outcome:
    """Joined text, calls as (name, arguments), broken calls as (index, name, raw)."""
    text = ""
    calls: dict[int, list[str | None]] = {}
    broken: list[tuple[int, str | None, str]] = []
    for piece in pieces:
        match piece:
            case TextPiece(more):
                text += more
            case CallPiece(index, name, args):
                assert index not in {number for number, _, _ in broken}
                known = calls.setdefault(index, [None, ""])
                assert name is None or known == [None, ""], "the name comes once and first"
                known[0] = name or known[0]
                known[1] = str(known[1]) + args
            case BrokenCall(index, name, raw, _):
                calls.pop(index, None)
                broken.append((index, name, raw))
    return text, [(name, str(args)) for _, (name, args) in sorted(calls.items())], broken


def read(text: str, form: ToolFormat, *, cuts: Iterable[int] = (), max_calls: int | None = None, is_call: bool = False) -> Outcome:
    reader = ToolCallReader(form, NAMES, max_calls=max_calls, is_call=is_call)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    pieces = [piece for start, end in itertools.pairwise(edges) for piece in reader.push(text[start:end])]
    return outcome([*pieces, *reader.finish()])


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}]\\""}]}}'
ADD_ARGS = '{"a": 1, "b": [2, {"c": "}]\\""}]}'
WEATHER = '{"arguments": {"city": "Köln"}, "name": "get weather"}'
WEATHER_ARGS = '{"city": "Köln"}'
CASES: list[tuple[str, ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("one", HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ADD_ARGS)]),
    (
        "two, text before",
        HERMES,
        f"Let me see.\n\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{WEATHER}</tool_call>",
        "Let me see.",
        [("add", ADD_ARGS), ("get weather", WEATHER_ARGS)],
    ),
    ("text behind", HERMES, f"<tool_call>{ADD}</tool_call>\nDone.", "Done.", [("add", ADD_ARGS)]),
    ("no closing", HERMES, f"<tool_call>{ADD}", "", [("add", ADD_ARGS)]),
    ("bare in a marked format", HERMES, ADD, "", [("add", ADD_ARGS)]),
    ("list", MISTRAL, f"[TOOL_CALLS][{ADD}, {WEATHER}]", "", [("add", ADD_ARGS), ("get weather", WEATHER_ARGS)]),
    ("a fenced list", MISTRAL, f"```json\n[{ADD}]\n```", "", [("add", ADD_ARGS)]),
    ("name and args", MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{}', "", [("add", '{"a": 1}'), ("add", "{}")]),
    ("name, id and args", MISTRAL, '[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    ("parameters", LLAMA, '{"name": "add", "parameters": {"a": "x"}}', "", [("add", '{"a": "x"}')]),
    ("tag", LLAMA, '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ("several", LLAMA, f"{ADD}; {ADD}", "", [("add", ADD_ARGS), ("add", ADD_ARGS)]),
    ("phi", PHI, f"<|tool_call|>[{ADD}]<|/tool_call|>", "", [("add", ADD_ARGS)]),
    ("functools", PHI, f"functools[{ADD}]", "", [("add", ADD_ARGS)]),
    ("fence", PLAIN, f"```json\n{ADD}\n```", "", [("add", ADD_ARGS)]),
    ("list of bare ones", PLAIN, f"[{ADD},\n {WEATHER}]", "", [("add", ADD_ARGS), ("get weather", WEATHER_ARGS)]),
    ("arguments as a string", PLAIN, '{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
    ("no arguments", PLAIN, '{"name": "add"}', "", [("add", "{}")]),
    ("null arguments", HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (
        "wrapped",
        PLAIN,
        '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}',
        "",
        [("add", '{"a": 1}')],
    ),
    ("unicode name", PLAIN, '{"name": "\\u540d前", "arguments": {}}', "", [("名前", "{}")]),
    ("a tool nobody has, between marks", HERMES, '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "", [("sub", "{}")]),
    ("plain text", HERMES, "a < b, <tool> and {x}", "a < b, <tool> and {x}", []),
    ("json that is no call", PLAIN, '{"answer": 42}', '{"answer": 42}', []),
    ("json of another name", PLAIN, '  {"name": "Bob", "age": 3} ok', '  {"name": "Bob", "age": 3} ok', []),
    ("a list that is none", PLAIN, "[1, 2]", "[1, 2]", []),
    ("a list of others", PLAIN, '[ {"x": 1}]', '[ {"x": 1}]', []),
    ("code", PLAIN, "```python\nx = {}\n```", "```python\nx = {}\n```", []),
    ("a fence of json that is no call", PLAIN, '```json\n{"x": 1}\n```', '```json\n{"x": 1}\n```', []),
    ("nothing", HERMES, "", "", []),
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_calls_and_text_in_any_pieces(form: ToolFormat, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    expected = (shown, calls, [])
    assert read(text, form) == expected
    assert read(text, form, cuts=range(len(text))) == expected
    for cut in range(len(text)):
        assert read(text, form, cuts=[cut]) == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_texts_in_random_pieces(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([HERMES, MISTRAL, LLAMA, PHI, PLAIN]))
    parts = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|tool_call|>",
        "```json\n",
        "```",
        ADD,
        WEATHER,
        '{"name": "add"',
        "{",
        "}",
    ]
    parts += ["[", "]", ",", ";", '"', "\\", "add", " ", "\n", "text ", "é👍", '{"a": 1}', ": "]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    whole = read(text, form)
    assert read(text, form, cuts=data.draw(st.lists(st.integers(0, len(text)), max_size=6))) == whole
    assert read(text, form, cuts=range(len(text))) == whole


def test_only_so_many_calls() -> None:
    text = f"<tool_call>{ADD}</tool_call> and <tool_call>{WEATHER}</tool_call>"
    assert read(text, HERMES, max_calls=1) == ("", [("add", ADD_ARGS)], [])


def test_a_forced_call_has_no_mark() -> None:
    assert read(ADD, PLAIN, is_call=True) == ("", [("add", ADD_ARGS)], [])
    assert read("", PLAIN, is_call=True) == ("", [], [(0, None, "")])


@pytest.mark.parametrize("end", range(1, len(ADD)))
def test_a_cut_call_is_broken_wherever_it_is_cut(end: int) -> None:
    text, calls, broken = read(f"<tool_call>{ADD[:end]}", HERMES)
    assert (text, calls) == ("", [])
    [(index, name, raw)] = broken
    assert index == 0
    assert name in (None, "add")
    assert ADD[:end].endswith(raw)


def test_what_is_broken_says_so() -> None:
    assert read("<tool_call>", HERMES) == ("", [], [(0, None, "")])
    assert read("<tool_call>sorry, no</tool_call>", HERMES)[2] == [(0, None, "")]
    assert read('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', HERMES)[2] == [(0, "add", "[1]")]
    assert read("<tool_call>{'name': 'add'}</tool_call>", HERMES)[2] == [(0, None, "{'name': 'add'}")]
    mixed = read(f"<tool_call>{{}}</tool_call><tool_call>{ADD}</tool_call>", HERMES)
    assert mixed == ("", [("add", ADD_ARGS)], [(0, None, "{}")])


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)), st.data()
)
def test_langchain_does_not_complete_what_is_marked_as_broken(value: object, data: st.DataObject) -> None:
    whole = json.dumps({"key": value}, ensure_ascii=data.draw(st.booleans()))
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    assert isinstance(parse_partial_json(cut), dict)
    assert parse_partial_json(cut + breaking_suffix(cut)) is None


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\\n{...}", HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ '<|tool_call|>' }}", PHI),
        ("{{- '<|python_tag|>' }}", LLAMA),
        ("{% for m in messages %}", PLAIN),
        (None, PLAIN),
    ],
)
def test_the_template_tells_the_format(template: str | None, form: ToolFormat) -> None:
    assert format_of(template) is form
