"""Texts that are hard to cut: characters of many bytes or many parts, and beginnings of stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence

_PARTS = (
    *("👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "é", "e\u0301", "o\u0308\u0323", "日本語", "日本", "한국어", "עברית", "\u200d"),
    *(" ", "\n", "\n\n", "STOP", "STO", "ST", "TO", "the end", "ab", "{", '"'),
)
_STOPS = ("STOP", "STOPS", "TO", "日本", "👩‍👧", "\n\n", "ab the", "\u0301", "end")


def random_text(source: random.Random) -> str:
    """At least one character, at most a few dozen."""
    return "".join(source.choice(_PARTS) for _ in range(source.randrange(1, 9)))


def random_stop(source: random.Random) -> list[str]:
    """Up to two stop strings that `random_text` often begins and sometimes holds."""
    return source.sample(_STOPS, source.randrange(3))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """What shows of a text: the rule, one character at a time."""
    for end in range(1, len(text) + 1):
        found = [len(one) for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - max(found)]
    return text
