"""What a generation's text must conform to. Compiled and enforced by the last stage, where the logits are (`workers.grammar`)."""

from __future__ import annotations

from enum import Enum

import msgspec

from langchain_pshard.core.errors import GrammarError

MAX_GRAMMAR_BYTES = 256 << 10
"""A quarter of a header: far more than people write, far less than would keep a worker busy."""


class GrammarKind(Enum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The whole text of a generation conforms to it, and the generation ends when it is complete.

    Raises:
        GrammarError: the text is empty, longer than `MAX_GRAMMAR_BYTES`, or not Unicode (a lone surrogate).
    """

    kind: GrammarKind
    text: str
    """A JSON schema as JSON, a regular expression for the whole text, or a Lark grammar whose first rule is `start`."""

    def __post_init__(self) -> None:
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise GrammarError(
                f"a grammar ({self.kind.value}) with {self.text[error.start]!r} at {error.start}: half a character, which no text can have"
            ) from error
        if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
            raise GrammarError(f"a grammar ({self.kind.value}) of {num_bytes} bytes; valid: 1 to {MAX_GRAMMAR_BYTES}")
