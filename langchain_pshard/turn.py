"""One answer taken apart while it streams: reasoning, text, tool calls. Pure; knows nothing of LangChain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from langchain_pshard.tool_formats import Piece, TextPiece, ToolCallReader, ToolFormat

REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Qwen 3, DeepSeek and most others; Magistral."""


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What an answer may hold."""

    form: ToolFormat | None = None
    """Its tool calls are written like this; None: it holds none."""
    tool_names: tuple[str, ...] = ()
    is_call: bool = False
    """It is one call and nothing else."""
    max_calls: int | None = None
    open_reasoning: str | None = None
    """The mark that ends the reasoning which the prompt has begun."""

    def within(self, closing: str) -> TurnPlan:
        """The same for an answer that begins inside reasoning."""
        return replace(self, open_reasoning=closing)

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens to look for."""
        return tuple(mark for pair in REASONING_MARKS for mark in pair) + (self.form.marks if self.form else ())


class TurnReader:
    """Reads one answer. What it comes to does not depend on how it was cut into pieces."""

    def __init__(self, plan: TurnPlan) -> None:
        self._calls = (
            None
            if plan.form is None
            else ToolCallReader(plan.form, plan.tool_names, is_call=plan.is_call, max_calls=1 if plan.is_call else plan.max_calls)
        )
        self._closing = plan.open_reasoning
        self._is_reasoning = plan.open_reasoning is not None
        self._is_begun = self._is_reasoning or plan.is_call
        self._strips = self._is_reasoning
        self._held = ""

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[Piece | ReasoningPiece]:
        """The next piece of the text."""
        text = self._held + text
        self._held = ""
        out: list[Piece | ReasoningPiece] = []
        if not self._is_begun:
            text = self._begin(text)
        if self._is_reasoning:
            text = self._reason(text, out)
        elif self._strips and self._is_begun:
            text = self._stripped(text)
        return out + (self._answer(text) if text else [])

    def finish(self) -> list[Piece | ReasoningPiece]:
        """The text ends here."""
        held, self._held = self._held, ""
        out: list[Piece | ReasoningPiece] = []
        if self._is_reasoning:
            if held := held.rstrip():
                out.append(ReasoningPiece(held))
        elif held:
            out += self._answer(held)
        return out + (list(self._calls.finish()) if self._calls is not None else [])

    def _begin(self, text: str) -> str:
        """Look whether the answer opens with reasoning; what is not decided yet is held."""
        start = text.lstrip()
        for opening, closing in REASONING_MARKS:
            if start.startswith(opening):
                self._is_begun = self._is_reasoning = self._strips = True
                self._closing = closing
                return start[len(opening) :]
        if any(opening.startswith(start) for opening, _ in REASONING_MARKS):
            self._held = text
            return ""
        self._is_begun = True
        return text

    def _reason(self, text: str, out: list[Piece | ReasoningPiece]) -> str:
        """Take reasoning off the text, without white space around it; what follows its end comes back."""
        assert self._closing is not None
        text = self._stripped(text)
        at = text.find(self._closing)
        if at >= 0:
            if thought := text[:at].rstrip():
                out.append(ReasoningPiece(thought))
            self._is_reasoning, self._strips = False, True
            return self._stripped(text[at + len(self._closing) :])
        num_held = next((n for n in range(min(len(text), len(self._closing) - 1), 0, -1) if text.endswith(self._closing[:n])), 0)
        shown = text[: len(text) - num_held].rstrip()
        self._held = text[len(shown) :]
        if shown:
            out.append(ReasoningPiece(shown))
        return ""

    def _stripped(self, text: str) -> str:
        if not self._strips:
            return text
        text = text.lstrip()
        self._strips = not text
        return text

    def _answer(self, text: str) -> list[Piece | ReasoningPiece]:
        return [TextPiece(text)] if self._calls is None else list(self._calls.push(text))


def open_reasoning(prompt: str) -> str | None:
    """The mark that ends the reasoning which a rendered prompt begins, if it does."""
    return next((closing for opening, closing in REASONING_MARKS if prompt.rstrip().endswith(opening)), None)
