"""Reasoning, text and calls of one answer, in any pieces."""

from __future__ import annotations

import pytest

from langchain_pshard.tool_formats import HERMES, CallPiece, TextPiece
from langchain_pshard.turn import ReasoningPiece, TurnPlan, TurnReader

PLAIN = TurnPlan()
TOOLS = TurnPlan(form=HERMES, tool_names=("add",))
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def read(text: str, plan: TurnPlan, size: int) -> tuple[str, str, int]:
    reader = TurnReader(plan)
    parts = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    pieces = [piece for part in parts for piece in reader.push(part)]
    pieces += reader.finish()
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    shown = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    return thought, shown, len({piece.index for piece in pieces if isinstance(piece, CallPiece)})


@pytest.mark.parametrize(
    ("text", "plan", "expected"),
    [
        ("<think>\nHm, 1 < 2.\n\nSo.\n</think>\n\nYes.", PLAIN, ("Hm, 1 < 2.\n\nSo.", "Yes.", 0)),
        ("[THINK]Hm[/THINK]Yes", PLAIN, ("Hm", "Yes", 0)),
        ("\n<think></think>\n\nYes", PLAIN, ("", "Yes", 0)),
        ("Hm </th</think>\nYes </think>", PLAIN.within("</think>"), ("Hm </th", "Yes </think>", 0)),
        ("<think>no end ", PLAIN, ("no end", "", 0)),
        ("I <think> so", PLAIN, ("", "I <think> so", 0)),
        ("<thin", PLAIN, ("", "<thin", 0)),
        (" plain ", PLAIN, ("", " plain ", 0)),
        (f"<think>Hm {CALL}</think>\n{CALL}", TOOLS, (f"Hm {CALL}", "", 1)),
        (f"<think>Hm</think>\n\nLet me.\n{CALL}\n{CALL}", TOOLS, ("Hm", "Let me.", 2)),
        ("", TOOLS, ("", "", 0)),
    ],
)
def test_an_answer_comes_apart_the_same_way_in_any_pieces(text: str, plan: TurnPlan, expected: tuple[str, str, int]) -> None:
    for size in (0, 1, 2, 3, 5, 8):
        assert read(text, plan, size) == expected


def test_special_tokens_that_matter() -> None:
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= set(TOOLS.marks)
    assert "<tool_call>" not in PLAIN.marks
