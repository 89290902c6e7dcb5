"""Speculative decoding on one screen, pure: the drafter's seam, a proposal checked, and which drafts count. How many ride: `adaptive_k`.

Drafts ride as rows: the last confirmed token and K drafts, K + 1 positions sampled. The last stage samples the target's own token at every
position with the draw of (seed, position), so accepting while they agree gives exactly the tokens plain decoding gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from langchain_pshard.core.errors import InvalidOptionError


class Drafting(Protocol):
    """One stream's guesses. Called in the client's reactor thread: it has to be quick."""

    def propose(self, max_tokens: int) -> Sequence[int]:
        """At most `max_tokens` token ids that may follow the text so far; none when there is no good guess. Changes nothing: it may be
        asked again for the same text."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens. They are final."""


class Drafter(Protocol):
    """Guesses how texts go on. One may serve any number of streams."""

    def begin(self, prompt: Sequence[int]) -> Drafting:
        """The guesses of a new stream. Called in the caller's thread: it may take its time over a long prompt."""


def begin(drafter: Drafter, prompt: Sequence[int]) -> Drafting:
    """The drafter's start on a new stream.

    Raises:
        InvalidOptionError: the drafter failed.
    """
    try:
        return drafter.begin(prompt)
    except Exception as error:  # the caller's own code
        raise _failed(drafter, error) from error


def draft(drafting: Drafting, new_tokens: Sequence[int], *, max_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """What the drafter proposes to follow the text, which has grown by `new_tokens`; checked.

    Raises:
        InvalidOptionError: the drafter failed, or proposed ids that the model's vocabulary does not have.
    """
    try:
        if new_tokens:
            drafting.extend(new_tokens)
        if max_tokens <= 0:
            return ()
        tokens = tuple(int(token) for token in drafting.propose(max_tokens))[:max_tokens]
    except Exception as error:  # the caller's own code; its fault ends this stream alone
        raise _failed(drafting, error) from error
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidOptionError(
                f"the drafter {type(drafting).__name__} proposed token {token}; valid: 0 to {vocab_size - 1}:"
                " draft with the model's own tokenizer"
            )
    return tokens


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts the target agrees with; `sampled[: num_accepted + 1]` are the new tokens, the last one the target's bonus.

    Args:
        drafts: K tokens.
        sampled: the target's tokens, K + 1 of them: `sampled[i]` follows the confirmed text and `drafts[:i]`.
    """
    for count, (drafted, token) in enumerate(zip(drafts, sampled, strict=False)):
        if drafted != token:
            return count
    return len(drafts)


def _failed(drafter: Drafter | Drafting, error: Exception) -> InvalidOptionError:
    return InvalidOptionError(f"the drafter {type(drafter).__name__} failed: {error!r}")
