"""The last stage's end: rows of logits -> sampled tokens and log-probabilities, stream by stream.

What is here knows positions and histories; how a token is chosen from one row is `core.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.errors import GrammarError, InferenceError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.messages import SliceKind, SliceResult
from langchain_pshard.core.sampling import History, SamplingParams, TokenLogprobs, sample, token_logprobs
from workers.grammar import GrammarCompiler, Matcher
from workers.runners.runner import NO_TOKENS, NOT_FINITE, Logits, RunSlice, StreamKey, TokenArray

MAX_LOGIT = 1e30
"""No model comes near. Beyond it, and with what is no number at all, penalties and softmax have no meaning."""


@dataclass(slots=True)
class _StreamTokens:
    """How a stream is sampled, and its tokens so far when a penalty asks for them. Invariant: one kind for each token."""

    params: SamplingParams
    matcher: Matcher | None = None
    has_penalties: bool = field(init=False)
    is_plain: bool = field(init=False)
    """The highest logit (that the grammar allows) is all it takes."""
    tokens: list[int] = field(default_factory=list)
    kinds: list[SliceKind] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.has_penalties = self.params.has_penalties
        self.is_plain = self.params.is_greedy and not self.has_penalties and self.params.top_logprobs is None

    def advance(self, piece: RunSlice) -> None:
        """The one step rule, as the runner applies it to KV."""
        assert piece.start <= len(self.tokens), f"slice starts at {piece.start}, the history holds {len(self.tokens)} tokens"
        del self.tokens[piece.start :], self.kinds[piece.start :]
        self.tokens += piece.tokens.tolist()
        self.kinds += [piece.kind] * len(piece.tokens)

    def until(self, position: int) -> History:
        """Tokens up to and including `position`: prefilled ones are the prompt, rows were generated."""
        pairs = list(zip(self.tokens[: position + 1], self.kinds, strict=False))
        return History(
            prompt=[token for token, kind in pairs if kind is SliceKind.PREFILL],
            generated=[token for token, kind in pairs if kind is SliceKind.ROWS],
        )


_NO_HISTORY = History(prompt=(), generated=())


class Head:
    """Samples for the open streams of a last stage."""

    def __init__(self, grammars: GrammarCompiler | None = None) -> None:
        """
        Args:
            grammars: needed for streams that open with a grammar.
        """
        self._grammars = grammars
        self._streams: dict[StreamKey, _StreamTokens] = {}

    def open(self, key: StreamKey, params: SamplingParams, prompt: TokenArray = NO_TOKENS, grammar: Grammar | None = None) -> None:
        """Sample `key` by `params` from now on, and only what `grammar` allows. Its history is `prompt`, of which the first slice rewinds
        what it computes itself.

        Raises:
            GrammarError, MissingExtraError: the grammar cannot be enforced; the stream is not open.
        """
        matcher = None
        if grammar is not None:
            if self._grammars is None:
                raise GrammarError("this worker enforces no grammars")
            matcher = self._grammars.compile(grammar)
        history = prompt.tolist() if params.has_penalties else []
        self._streams[key] = _StreamTokens(params, matcher, history, [SliceKind.PREFILL] * len(history))

    def close_stream(self, key: StreamKey) -> None:
        """Forget a stream; unknown ones are ignored."""
        self._streams.pop(key, None)

    def sample(self, logits: Logits, slices: Sequence[RunSlice]) -> list[SliceResult]:
        """Sample the rows a runner returned for `slices`, and remember the slices' tokens.

        Args:
            logits: [sum of num_sampled, vocab], slices in order, within a slice by position.
            slices: what was run, all of open streams; also those that sample nothing, which become history.

        Returns:
            One result per slice, in order; its tokens are empty when nothing was sampled.

        Raises:
            InferenceError: a row is no distribution over tokens: its highest logit is NaN or out of all bounds. Nothing was remembered.
        """
        assert len(logits) == sum(piece.num_sampled for piece in slices), "one row of logits per sampled position"
        # One call for all rows: most streams are greedy, and argmax over rows costs no more than over one.
        highest: list[int] = logits.argmax(axis=1).tolist() if len(logits) else []
        _check_rows(logits, highest, slices)
        results: list[SliceResult] = []
        row = 0
        for piece in slices:
            stream = self._streams[piece.key]
            if stream.has_penalties:
                stream.advance(piece)
            rows = slice(row, row + piece.num_sampled)
            row += piece.num_sampled
            if stream.is_plain and stream.matcher is None:
                results.append(SliceResult(piece.key.stream, pack_tokens(highest[rows])))
            else:
                results.append(_sample_rows(stream, piece, logits[rows], highest[rows]))
        return results


def _check_rows(logits: Logits, highest: Sequence[int], slices: Sequence[RunSlice]) -> None:
    """Refuse rows that cannot be sampled. The highest logit tells: argmax prefers NaN to any number."""
    for row, token in enumerate(highest):
        top = logits.item(row, token)
        if abs(top) <= MAX_LOGIT:  # not so for NaN
            continue
        ends = np.cumsum([piece.num_sampled for piece in slices])
        stream = slices[int(np.searchsorted(ends, row, side="right"))].key.stream
        raise InferenceError(f"the logits of stream {stream}, of which the highest is {top}, are {NOT_FINITE}")


def _sample_rows(stream: _StreamTokens, piece: RunSlice, logits: Logits, highest: Sequence[int]) -> SliceResult:
    """Sample the trailing rows of one slice, [num_sampled, vocab], one by one, each among what its grammar allows.

    Args:
        highest: [num_sampled], the token with the highest logit of each row.
    """
    params, matcher = stream.params, stream.matcher
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    num_read = len(piece.tokens) - piece.num_sampled + 1  # up to the first sampled row
    first = piece.start + num_read - 1  # its logical position
    if matcher is not None:
        matcher.advance(piece)
    for offset, row in enumerate(logits):
        if matcher is not None:
            if offset and piece.kind is SliceKind.ROWS:
                matcher.follow(int(piece.tokens[num_read + offset - 1]))
            if params.top_logprobs is not None:
                row = matcher.masked(row)  # log-probabilities are of what may come
        history = stream.until(first + offset) if stream.has_penalties else _NO_HISTORY
        tokens.append(_sample_row(stream, row, highest[offset], first + offset, history))
        if params.top_logprobs is not None:
            logprobs.append(token_logprobs(row, tokens[-1], params, history))
    forced = matcher.forced_after(piece, tokens) if matcher is not None else []
    return SliceResult(
        piece.key.stream,
        pack_tokens(tokens),
        None if params.top_logprobs is None else tuple(logprobs),
        pack_tokens(forced),
    )


def _sample_row(stream: _StreamTokens, row: Logits, highest: int, position: int, history: History) -> int:
    """The token that follows `position`, of a row that is masked already when log-probabilities are asked for.

    A draw among the allowed tokens needs no mask where nothing else narrows it: one among all is tried first, and mostly stands. A
    forbidden token is drawn again, among the allowed ones and independently. With p(t) the chance of a token and A that of all allowed
    ones, t comes with p(t) + (1 - A) p(t) / A = p(t) / A, as if the first draw had been among the allowed.
    """
    params, matcher = stream.params, stream.matcher
    if matcher is None or params.top_logprobs is not None:
        return sample(row, params, position=position, history=history)
    if (forced := matcher.forced()) is not None:
        return forced
    if stream.is_plain:
        return matcher.highest_allowed(row, highest)
    if params.is_greedy or params.is_narrowed:
        return sample(matcher.masked(row), params, position=position, history=history)
    token = sample(row, params, position=position, history=history)
    if matcher.permits(token):
        return token
    return sample(matcher.masked(row), params, position=position, history=history, draw_idx=1)
