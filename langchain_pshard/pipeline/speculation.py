"""Speculative decoding on one screen, pure: the drafter's seam, how many drafts may ride, and which of them count.

Drafts ride as rows: the last confirmed token and K drafts, K + 1 positions sampled. The last stage samples the target's own token at every
position with the draw of (seed, position), so accepting while they agree gives exactly the tokens plain decoding gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from langchain_pshard.core.errors import InvalidOptionError


class Drafter(Protocol):
    """Guesses how a text goes on. Called in the client's reactor thread: it has to be quick, and answers for one stream at a time."""

    def propose(self, tokens: Sequence[int], max_tokens: int) -> Sequence[int]:
        """At most `max_tokens` token ids that may follow `tokens` (prompt and output so far); none when there is no good guess."""


def draft(drafter: Drafter, tokens: Sequence[int], *, max_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """The drafter's proposal, checked.

    Raises:
        InvalidOptionError: the drafter failed, or proposed ids that the model's vocabulary does not have.
    """
    if max_tokens <= 0:
        return ()
    try:
        proposed = tuple(int(token) for token in drafter.propose(tokens, max_tokens))[:max_tokens]
    except Exception as error:  # the caller's own code; its fault ends this stream alone
        raise InvalidOptionError(f"the drafter {type(drafter).__name__} failed: {error!r}") from error
    for token in proposed:
        if not 0 <= token < vocab_size:
            raise InvalidOptionError(
                f"the drafter {type(drafter).__name__} proposed token {token}; valid: 0 to {vocab_size - 1}:"
                " draft with the model's own tokenizer"
            )
    return proposed


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
