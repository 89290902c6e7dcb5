"""Reads one call written as a JSON object, character by character: its name as soon as it stands there, its arguments as they come. Pure.

Known shapes: `{"name": .., "arguments": {..}}` in any order of keys, `parameters` for `arguments`, arguments as a string of JSON, and the
whole inside `{"type": "function", "function": {..}}`; or the name before the object, which then is the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_CALL_KEYS = {"name", "type", "function", "id", *_ARGUMENT_KEYS}


class CallReader:
    """One call. `push` takes text from its opening brace on and gives back what lies behind its end.

    Attributes:
        raw: the object's text so far.
        name: once it is known.
        args: the arguments' JSON so far.
        is_complete: the object has ended; `reason` then tells whether it was a call.
        is_refuted: a bare object that is no call of the tools there are.
    """

    def __init__(self, *, is_bare: bool, tool_names: Collection[str], name: str | None = None) -> None:
        self._is_bare = is_bare
        self._tool_names = tool_names
        self._is_args = name is not None
        self.name = name
        self.args = ""
        self.is_complete = False
        self.is_refuted = False
        self.reason: str | None = None
        self._chars: list[str] = []
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._key: str | None = None
        self._value_start: int | None = None
        self._string_start = 0
        self._args_are_final = False
        self._was_name_taken = False
        self._num_args_taken = 0

    @property
    def raw(self) -> str:
        return "".join(self._chars)

    def push(self, text: str) -> str:
        """Take text; what lies behind the object's end comes back."""
        for position, char in enumerate(text):
            self._chars.append(char)
            self._read(char)
            if self._depth == 0:
                self._end()
            if self.is_complete or self.is_refuted:
                return text[position + 1 :]
        return ""

    def take(self) -> tuple[str | None, str]:
        """What is new since the last call: the name (once), and more of the arguments."""
        if self.name is None or (self._is_bare and self.name not in self._tool_names):
            return None, ""
        name = None if self._was_name_taken else self.name
        self._was_name_taken = True
        args = self.args[self._num_args_taken :]
        self._num_args_taken = len(self.args)
        return name, args

    def _read(self, char: str) -> None:
        if self._is_args or (self.args and self._depth > 1 and not self._args_are_final):
            self.args += char
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
                self._string_ended()
            return
        if char == '"':
            self._is_string = True
            self._string_start = len(self._chars) - 1
            self._value_begins()
        elif char in "{[":
            self._value_begins()
            if self._depth == 1 and char == "{" and self._key in _ARGUMENT_KEYS and not self._is_args and not self._args_are_final:
                self.args = char
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._value_ends()
            self._depth -= 1
        elif char == "," and self._depth == 1:
            self._value_ends()
        elif not char.isspace() and char != ":":
            self._value_begins()

    def _value_begins(self) -> None:
        if self._depth == 1 and self._key is not None and self._value_start is None:
            self._value_start = len(self._chars) - 1

    def _string_ended(self) -> None:
        if self._depth != 1 or self._is_args:
            return
        if self._key is None:
            self._key = _loaded("".join(self._chars[self._string_start :]), "")
            if self._is_bare and self.name is None and self._key not in _CALL_KEYS:  # its name may have been told already
                self.is_refuted = True
        elif self._key == "name" and self._value_start == self._string_start:
            self._named(_loaded("".join(self._chars[self._string_start :]), None))

    def _named(self, name: Any) -> None:
        if isinstance(name, str) and self.name is None:
            self.name = name
            self.is_refuted = self._is_bare and name not in self._tool_names

    def _value_ends(self) -> None:
        if self._key in _ARGUMENT_KEYS and self._value_start is not None and not self._is_args and not self._args_are_final:
            if not self.args:  # not an object: a string of JSON, or nothing
                self._arguments_from(_loaded("".join(self._chars[self._value_start : -1]), ""))
            self._args_are_final = True
        self._key = None
        self._value_start = None

    def _arguments_from(self, value: Any) -> None:
        if isinstance(value, str):
            self.args = value.strip() or "{}"
        elif value is None:
            self.args = "{}"
        else:
            self.args = json.dumps(value, ensure_ascii=False)

    def _end(self) -> None:
        self.is_complete = True
        if self.name is None:
            self._read_whole()
        if self.name is None:
            self.is_refuted = self._is_bare
            self.reason = "the call has no name"
            return
        self.args = self.args or "{}"
        if not isinstance(_loaded(self.args, None), dict):
            self.reason = "the arguments are not a JSON object"

    def _read_whole(self) -> None:
        """The call inside `function`."""
        whole = _loaded(self.raw, None)
        inner = whole.get("function") if isinstance(whole, dict) else None
        if not isinstance(inner, dict):
            return
        self._named(inner.get("name"))
        key = next((key for key in _ARGUMENT_KEYS if key in inner), None)
        if self.name is not None and key is not None:
            self._arguments_from(inner[key])


def _loaded(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return otherwise
