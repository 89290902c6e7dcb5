"""Constrained decoding: which tokens may follow, stream by stream.

llguidance compiles grammars against the bundle's tokenizer and keeps the state of the text. Reading the tokenizer of Gemma 3 takes 3 s,
holds Python's lock meanwhile and leaves 230 MB behind, so it is done once, in a thread that runs while the weights load. How a token is
chosen among the allowed ones stays with `head`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import TOKENIZER_DIR, Manifest
from langchain_pshard.core.errors import GrammarError, MissingExtraError
from langchain_pshard.core.grammar import Grammar, GrammarKind
from langchain_pshard.core.messages import SliceKind
from workers.runners.runner import Logits, RunSlice

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How models write JSON. Free white space would let a weak model fill its whole budget with it."""
_MAX_REASON_CHARS = 600
MAX_FORCED_TOKENS = 64
"""Suggested at once; the client asks for as many as its turn has room for."""
_FEW_TOKENS = 4_096
"""So many logits are quicker gathered than all of a large vocabulary masked."""
_NEVER = np.float32(-np.inf)

logger = logging.getLogger("pshard.worker")


class GrammarCompiler:
    """Compiles grammars for one tokenizer. `compile` may be called as soon as it exists and waits for the tokenizer if it must."""

    def __init__(self, tokenizer_json: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: Future[LLTokenizer] = executor.submit(_read_tokenizer, tokenizer_json, vocab_size, self._eos_token_ids)
        executor.shutdown(wait=False)

    @classmethod
    def of_bundle(cls, bundle: Path, manifest: Manifest) -> GrammarCompiler:
        """For the tokenizer of `bundle`."""
        path = bundle / TOKENIZER_DIR / "tokenizer.json"
        return cls(path, vocab_size=manifest.vocab_size, eos_token_ids=manifest.eos_token_ids)

    def wait(self) -> None:
        """Until the tokenizer is read. One that cannot be is reported here and refused to whoever asks for a grammar."""
        if (error := self._tokenizer.exception()) is not None:
            logger.warning("no constrained decoding on this worker: %s", error)

    def compile(self, grammar: Grammar) -> Matcher:
        """The state of a text that has not begun.

        Raises:
            GrammarError: the grammar is broken, or has a part that cannot be enforced; the message names it.
            MissingExtraError: llguidance is not installed.
        """
        tokenizer = self._tokenizer.result()
        from llguidance import LLMatcher

        inner = LLMatcher(tokenizer, _lowered(grammar), log_level=0)
        if inner.is_error():
            raise GrammarError(_explained(grammar, inner.get_error()))
        return Matcher(inner, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)


def _read_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise MissingExtraError("constrained decoding", "worker") from error
    if not eos_token_ids:
        raise GrammarError("this model has no end token, so a text that conforms to a grammar could not end")
    try:
        return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (OSError, ValueError, RuntimeError) as error:
        raise GrammarError(f"llguidance cannot use this model's tokenizer: {error}") from error


def _lowered(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_STYLE)
            except ValueError as error:
                raise GrammarError(f"the JSON schema is not a JSON object: {error}") from error


# --- why a grammar is refused -----------------------------------------------------------------------------------------


def _explained(grammar: Grammar, reason: str) -> str:
    what = {GrammarKind.JSON_SCHEMA: "JSON schema", GrammarKind.REGEX: "regular expression", GrammarKind.LARK: "Lark grammar"}[grammar.kind]
    text = " ".join(reason.split())[:_MAX_REASON_CHARS]
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return f"the {what} cannot be enforced: {text}"
    named = re.match(r"Unimplemented keys: (\[.*?\])", text)
    keys = json.loads(named[1]) if named else []
    places = [place for place, key in _keywords(json.loads(grammar.text)) if key in keys]
    at = f" (at {', '.join(places)})" if places else ""
    return (
        f"the {what} cannot be enforced: {text}{at}. Supported: type, enum, const, properties, required, additionalProperties,"
        " patternProperties, items, prefixItems, length and number bounds, pattern, format, anyOf, allOf, $ref; oneOf where its branches"
        " exclude each other"
    )


def _keywords(schema: Any, place: str = "#") -> Iterator[tuple[str, str]]:
    """Every key in a schema with the place where it stands, as a JSON pointer."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield f"{place}/{key}", key
            yield from _keywords(value, f"{place}/{key}")
    elif isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _keywords(item, f"{place}/{index}")


# --- the state of one text --------------------------------------------------------------------------------------------


class Matcher:
    """Where one stream's generated text stands in its grammar; follows the one step rule, like KV.

    Prefilled tokens are the prompt, rows were generated: those are what the grammar speaks about. A draft that it forbids is never
    sampled before, so what follows it is never accepted; such rows, and those of a client that goes on from a forbidden token, get an
    end token.

    What may follow is asked for between `advance` and the next one, at the position that `advance` or `follow` took last.

    Invariant: the `_num_consumed` tokens from position `_begin` on are those that the inner matcher has consumed.
    """

    def __init__(self, inner: LLMatcher, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._begin = 0
        self._num_consumed = 0
        self._is_on_track = True

    def advance(self, piece: RunSlice) -> None:
        """Take a slice's tokens, up to the first one that is sampled after, or all of them when none is; `follow` takes the rest."""
        self._is_on_track = True
        if piece.kind is SliceKind.PREFILL:
            self._begin = piece.start + len(piece.tokens)
            self._keep(0)
            return
        self._begin = min(self._begin, piece.start)
        num_before = piece.start - self._begin
        self._keep(num_before)
        self._is_on_track = num_before == self._num_consumed
        for token in piece.tokens[: len(piece.tokens) - max(0, piece.num_sampled - 1)].tolist():
            self.follow(token)

    def follow(self, token: int) -> None:
        """Take the next token. Behind one that is forbidden only the end may come."""
        self._is_on_track = self._is_on_track and self._consume(token)

    def forced(self) -> int | None:
        """The only token that may come next, where text that the grammar leaves no choice about has begun."""
        forced = self._inner.compute_ff_tokens() if self._is_on_track and not self._inner.is_error() else ()
        return forced[0] if forced else None

    def permits(self, token: int) -> bool:
        """Whether `token` may come next.

        A model mostly wants what its grammar allows, and to ask about one token takes 3 us. A mask of all 262,144 tokens of Gemma 3 takes
        0.02 to 2 ms, the most near the end of a string of bounded length.
        """
        if (forced := self.forced()) is not None:
            return token == forced
        if not self._is_on_track or self._inner.is_error() or token in self._eos_token_ids:  # the library validates no ends
            return bool(self._allowed()[token])
        return self._inner.validate_tokens([token]) == 1

    def highest_allowed(self, row: Logits, highest: int) -> int:
        """The allowed token with the highest logit, the lowest id among equals.

        Args:
            row: [vocab].
            highest: the same among all tokens.
        """
        if self.permits(highest):
            return highest
        allowed = self._allowed()
        ids = np.flatnonzero(allowed)
        return int(ids[row[ids].argmax()]) if len(ids) <= _FEW_TOKENS else int(np.where(allowed, row, _NEVER).argmax())

    def masked(self, row: Logits) -> Logits:
        """Logits [vocab] with minus infinity for tokens that are forbidden."""
        return np.where(self._allowed(), row, _NEVER)

    def forced_after(self, piece: RunSlice, sampled: Sequence[int]) -> list[int]:
        """What must follow a slice that `advance` took last: after its drafts that agree with `sampled`, and the token sampled behind them.

        Only a suggestion: whoever drafts them finds them accepted, and saves their steps.
        """
        if not sampled:
            return []
        num_read = len(piece.tokens) - len(sampled) + 1  # up to the first sampled row
        drafts = piece.tokens[num_read:].tolist()
        num_agreed = next((idx for idx, (draft, token) in enumerate(zip(drafts, sampled, strict=False)) if draft != token), len(drafts))
        is_first = piece.kind is SliceKind.PREFILL
        num_before = 0 if is_first else piece.start + num_read + num_agreed - self._begin
        self._keep(num_before)
        if self._num_consumed != num_before or not self._consume(sampled[-1] if is_first else sampled[num_agreed]):
            return []
        return self._inner.compute_ff_tokens()[:MAX_FORCED_TOKENS]

    def _keep(self, num_tokens: int) -> None:
        if num_tokens < self._num_consumed:
            self._inner.rollback(self._num_consumed - num_tokens)
            self._num_consumed = num_tokens

    def _consume(self, token: int) -> bool:
        is_allowed = self._inner.try_consume_tokens([token]) == 1
        self._num_consumed += is_allowed
        return is_allowed

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocab]; at least one."""
        if self._is_on_track and self._inner.is_error():
            # A bound of the library: the text ends here, and whoever reads it finds it incomplete.
            logger.warning("a grammar exceeds what can be followed: %s", self._inner.stop_reason())
        elif self._is_on_track:
            bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
            if allowed.any():
                return allowed
        only_end = np.zeros(self._vocab_size, dtype=np.bool_)
        only_end[self._eos_token_ids] = True
        return only_end
