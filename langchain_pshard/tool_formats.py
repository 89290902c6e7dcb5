"""How models write tool calls, and the reader that takes them out of a text while it streams. Pure; knows nothing of LangChain.

Every common way is JSON somewhere: between marks (`<tool_call>{...}</tool_call>`, `[TOOL_CALLS][{...}]`, `[TOOL_CALLS]name[ARGS]{...}`,
`<|tool_call|>[...]<|/tool_call|>`), or bare, as the whole answer or in a code fence. One reader knows them all; a format says which marks a
model uses and how a call begins.

What a text comes to does not depend on how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from langchain_pshard.json_reader import CallReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One family's way to write calls."""

    name: str
    openings: tuple[str, ...] = ()
    """Marks after which one call, or a list of calls, follows."""
    closing: str = ""
    lead_in: str = ""
    """What stands before the JSON of a forced call, so that the model goes on as it was trained."""
    arguments_key: str = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that may be special tokens and have to be seen all the same."""
        return tuple(mark for mark in (*self.openings, self.closing, "[ARGS]", "[CALL_ID]") if mark)


HERMES = ToolFormat(name="hermes", openings=("<tool_call>",), closing="</tool_call>", lead_in="<tool_call>\n")
MISTRAL = ToolFormat(name="mistral", openings=("[TOOL_CALLS]",), lead_in="[TOOL_CALLS][")
PHI = ToolFormat(name="phi", openings=("<|tool_call|>", "functools"), closing="<|/tool_call|>", lead_in="<|tool_call|>[")
LLAMA = ToolFormat(name="llama", openings=("<|python_tag|>",), arguments_key="parameters")
PLAIN = ToolFormat(name="json")

_MARKED = (HERMES, MISTRAL, PHI)


def format_of(chat_template: str | None) -> ToolFormat:
    """The format that a chat template teaches, by its marks; `PLAIN` when it shows none."""
    template = chat_template or ""
    for candidate in _MARKED:
        if candidate.openings[0] in template:
            return candidate
    return LLAMA if "python_tag" in template or ("ipython" in template and '"parameters"' in template) else PLAIN


# --- what a text comes to ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is no call, ready to show."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of call number `index`: its name first, then its arguments' JSON, bit by bit."""

    index: int
    name: str | None
    args: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Call number `index` came to nothing; pieces of it may have been told already."""

    index: int
    name: str | None
    raw: str
    """Arguments, as far as they came, or all there was when not even the name was readable."""
    reason: str


Piece = TextPiece | CallPiece | BrokenCall

_FENCE = re.compile(r"```(?:json|tool_code|tool_call)?\s*(?=[{\[])")
_FENCE_START = re.compile(r"`{1,3}[a-z_]{0,9}\s*")
_NAME = re.compile(r"([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_START = re.compile(r"[A-Za-z_][\w.-]*\s*(?:\[[\w\[\]\s]*)?")
_BETWEEN = " \t\r\n,;"
"""What may stand between calls, beside the brackets of a list."""


class ToolCallReader:
    """Takes the text of one answer, piece by piece.

    Args:
        form: the marks to look for.
        tool_names: a bare JSON object is a call only if it names one of these.
        is_call: the text begins inside a call (its lead-in was part of the prompt, or a grammar forces one).
        max_calls: further calls are left out; None takes all.
    """

    def __init__(self, form: ToolFormat, tool_names: Collection[str], *, is_call: bool = False, max_calls: int | None = None) -> None:
        self._form = form
        self._tool_names = frozenset(tool_names)
        self._max_calls = max_calls
        self._buffer = ""
        self._state = self._calls if is_call else self._start
        self._is_bare = False
        self._lead = ""
        """What stood before the first bare call, and is text after all if that is none."""
        self._is_awaited = is_call
        """A mark promised a call that has not begun."""
        self._call: CallReader | None = None
        self._num_calls = 0
        self._out: list[Piece] = []

    @property
    def num_calls(self) -> int:
        """Calls so far, broken ones included."""
        return self._num_calls

    def push(self, text: str) -> list[Piece]:
        """The next piece of the text."""
        self._buffer += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """The text ends here."""
        if self._call is not None:
            self._cut(self._call)
        elif self._is_awaited:
            self._break(None, self._buffer.strip(), "the text ends before the call begins")
        elif self._state == self._calls:  # brackets between calls are no text, unless no call ever came
            self._emit_text(self._lead + self._buffer if self._is_bare and not self._num_calls else self._unpunctuated())
        else:
            self._emit_text(self._buffer if self._state != self._after else "")
        self._buffer = ""
        self._call = None
        self._is_awaited = False
        self._state = self._done
        return self._taken()

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    # --- states: each takes what it can from the buffer, and tells whether another may go on ------------------------------

    def _start(self) -> bool:
        """Nothing but white space yet: the answer may be a bare call."""
        text = self._buffer.lstrip()
        if not text or any(opening.startswith(text) and opening != text for opening in self._form.openings):
            return False
        if text[0] in "{[" and not text.startswith(self._form.openings):
            return self._enter_bare(len(self._buffer) - len(text))
        if match := _FENCE.match(text):
            return self._enter_bare(len(self._buffer) - len(text) + match.end())
        if _FENCE_START.fullmatch(text):
            return False
        self._state = self._text
        return True

    def _enter_bare(self, position: int) -> bool:
        self._lead, self._buffer = self._buffer[:position], self._buffer[position:]
        self._is_bare = True
        self._state = self._calls
        return True

    def _text(self) -> bool:
        """Text, up to a mark."""
        found = [(at, opening) for opening in self._form.openings if (at := self._buffer.find(opening)) >= 0]
        if found:
            at, opening = min(found)
            self._emit_text(self._buffer[:at].rstrip())
            self._enter_marked(self._buffer[at + len(opening) :])
            return True
        num_held = max((_overlap(self._buffer, opening) for opening in self._form.openings), default=0)
        shown = self._buffer[: len(self._buffer) - num_held].rstrip()  # white space before a call is not text
        self._emit_text(shown)
        self._buffer = self._buffer[len(shown) :]
        return False

    def _enter_marked(self, rest: str) -> None:
        self._buffer = rest
        self._state, self._is_bare, self._is_awaited = self._calls, False, True

    def _after(self) -> bool:
        """Behind a closing mark: white space is no text."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._text
        return True

    def _calls(self) -> bool:
        """Where a call may begin, or the list of them may end."""
        text = self._unpunctuated()
        if not text:
            return False
        if self._is_bare and not self._num_calls and text[0] != "{":
            if any(opening.startswith(text) and opening != text for opening in self._form.openings):
                return False  # the bracket of a list, or of a mark
            return self._leave_bare()  # a bare list that holds no calls is text
        if text[0] == "{":
            return self._enter_call(self._buffer[: len(self._buffer) - len(text)], text, None)
        closing = "```" if self._is_bare else self._form.closing
        if closing and text.startswith(closing) and not self._is_awaited:
            self._buffer = text[len(closing) :]
            self._state = self._after
            return True
        opening = next((opening for opening in self._form.openings if text.startswith(opening)), None)
        if opening is not None and not self._is_bare and not self._is_awaited:
            self._enter_marked(text[len(opening) :])
            return True
        if any(mark.startswith(text) for mark in (closing, *self._form.openings) if mark):
            return False
        if not self._is_bare and (match := _NAME.match(text)):
            return self._enter_call("", text[match.end() :], match[1])
        if not self._is_bare and _NAME_START.fullmatch(text):
            return False
        if self._is_awaited:
            self._break(None, "", "a mark of a call is followed by something else")
            self._is_awaited = False
        self._buffer = text
        self._state = self._text
        return True

    def _unpunctuated(self) -> str:
        """The buffer without what may stand between calls, which looks like the start of a mark in Mistral's case."""
        text = self._buffer
        while (text := text.lstrip(_BETWEEN)) and text[0] in "[]":
            if any(opening.startswith(text) or text.startswith(opening) for opening in self._form.openings):
                break
            text = text[1:]
        return text

    def _enter_call(self, before: str, rest: str, name: str | None) -> bool:
        self._lead = self._lead + before if self._is_bare and not self._num_calls else ""
        self._buffer = rest
        self._call = CallReader(is_bare=self._is_bare, tool_names=self._tool_names, name=name)
        self._state, self._is_awaited = self._in_call, False
        return True

    def _leave_bare(self) -> bool:
        self._buffer = self._lead + self._buffer
        self._lead = ""
        self._state, self._is_bare = self._text, False
        return True

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        self._buffer = call.push(self._buffer)
        if call.is_refuted:
            self._call = None
            self._buffer = call.raw + self._buffer
            return self._leave_bare()
        self._emit_call(call)
        if not call.is_complete:
            return False
        self._call = None
        if call.reason is not None:
            self._break(call.name, call.args if call.name else call.raw, call.reason)
        else:
            self._num_calls += 1
        self._state = self._calls
        return True

    def _done(self) -> bool:
        return False

    # --- out ----------------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self._num_calls >= self._max_calls

    def _emit_text(self, text: str) -> None:
        if text and not self._is_full:
            self._out.append(TextPiece(text))

    def _emit_call(self, call: CallReader) -> None:
        if self._is_full:
            return
        name, args = call.take()
        if name is not None or args:
            self._out.append(CallPiece(self._num_calls, name, args))

    def _break(self, name: str | None, raw: str, reason: str) -> None:
        if not self._is_full:
            self._out.append(BrokenCall(self._num_calls, name, raw, reason))
            self._num_calls += 1

    def _cut(self, call: CallReader) -> None:
        """The text ended inside a call."""
        if self._is_bare and call.name is None:
            self._emit_text(self._lead + call.raw + self._buffer)
            return
        self._emit_call(call)
        self._break(call.name, call.args if call.name else call.raw, "the text ends before the call does")


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a start of `mark`, the whole of it excepted."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def breaking_suffix(args: str) -> str:
    """What makes broken arguments visibly broken.

    LangChain completes cut JSON when chunks are added up, so that a cut call would pass for a whole one; a closing bracket that matches
    nothing is what its reader refuses.
    """
    is_string = is_escaped = False
    stack: list[str] = []
    for char in args:
        if is_string:
            is_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_string = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]" and stack:
            stack.pop()
    quote = ('""' if is_escaped else '"') if is_string else ""
    return quote + ("}" if stack and stack[-1] == "]" else "]")


def as_json_string(raw: str) -> str:
    """Raw text as arguments that are certainly not a call's: a JSON string."""
    return json.dumps(raw, ensure_ascii=False)
