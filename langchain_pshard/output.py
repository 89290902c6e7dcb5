"""Token ids -> pieces of text that are safe to show.

A piece is safe when nothing that follows can change it: it ends before an unfinished character and before anything that may turn out to be
the start of a stop string. Reasoning and tool calls are taken out of the text later, in `turn`.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_pshard.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_WINDOW_MOST = 24
_WINDOW_KEPT = 8
"""Tokens decoded again as context of the next ones. A character is at most four bytes and a token at least one, so four decide how the
text ends; eight leave room for tokens that decode to nothing at the start of a text."""


class TextStream:
    """The text of one generation, piece by piece. Belongs to one consumer at a time.

    Invariants: the joined results of `push` and `finish` are `tokenizer.decode` of all tokens, cut before the first stop string; the work
    of a push does not depend on what came before. Of several stop strings the one that is complete first counts, of those complete at
    the same place the longest, so the text does not depend on how the tokens were grouped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), marks: Sequence[str] = ()) -> None:
        """
        Args:
            stop: strings that end the text.
            marks: special tokens that are shown all the same, for a reader that understands them.
        """
        self._decoder = _Decoder(tokenizer, tokenizer.marks(marks))
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False
        """A stop string was found; further tokens are ignored."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; the text that became safe to show, possibly none."""
        if self.is_stopped:
            return ""
        return self._release(self._decoder.push(token_ids))

    def finish(self) -> str:
        """Take the end of the generation; the text that was held back. Called again, it returns nothing."""
        if self.is_stopped:
            return ""
        text = self._release(self._decoder.finish()) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`, the whole of it excepted."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _Decoder:
    """Incremental `Tokenizer.decode`: a window of the last tokens is decoded with the new ones, and the difference is the new text.

    What a token decodes to may depend on those before it (a word marker at the start of a text, bytes of one character), which a few
    tokens of context settle.
    """

    def __init__(self, tokenizer: Tokenizer, marks: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._window: list[int] = []
        self._num_given = 0
        """Characters of the window's text that were given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        self._window += [token_id for token_id in token_ids if self._tokenizer.is_shown(token_id, self._marks)]
        text = self._tokenizer.decode(self._window, marks=self._marks)
        # Only the last character can be unfinished: bytes that cannot begin or continue one are replaced one by one, at once.
        num_final = len(text) - text.endswith(_UNFINISHED)
        new = text[self._num_given : num_final]
        self._num_given = max(self._num_given, num_final)
        if len(self._window) > _WINDOW_MOST:
            del self._window[:-_WINDOW_KEPT]
            kept = self._tokenizer.decode(self._window, marks=self._marks)
            self._num_given = len(kept) - (len(text) - self._num_given)
        return new

    def finish(self) -> str:
        new = self._tokenizer.decode(self._window, marks=self._marks)[self._num_given :]
        self._window.clear()
        self._num_given = 0
        return new
