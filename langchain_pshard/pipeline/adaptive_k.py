"""How many drafts ride with a step: as many as the measured acceptance makes worth their rows. Pure.

A draft at depth i counts only when all before it were right, so its gain is the product of the chances up to it: gains fall with
depth. A step's time grows with its rows. The choice maximises tokens per second over all streams of a micro-batch at once: the drafts
with the best gains are added, of whichever stream, as far as the rate is highest. A stream whose guesses are not worth a row gets none.

Acceptance of the first draft is measured even where none rides: the guess is compared with the token that came. So a stream that stopped
drafting begins again by itself when its text gets predictable; nothing has to be risked to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DEPTH = 16
"""Depths beyond share the chance of this one."""
_FORGET = 0.95
"""Weight of the past at each observation: texts change their nature within tens of tokens."""
_PRIOR_CHANCE = 0.5
_PRIOR_WEIGHT = 1.5
"""Observations that the expectation (the chance one depth before) counts for."""


class Acceptance:
    """How often a stream's drafts are right, by depth: the chance of draft i given that those before it were right.

    Invariant: 0 <= `_right[i]` <= `_compared[i]`.
    """

    def __init__(self) -> None:
        self._right = [0.0] * MAX_DEPTH
        self._compared = [0.0] * MAX_DEPTH

    def observe(self, num_right: int, num_compared: int) -> None:
        """The first `num_right` drafts of a guess were right, and so many were compared in order; the last of them may have been wrong."""
        for depth in range(min(num_compared, num_right + 1, MAX_DEPTH)):
            self._right[depth] = _FORGET * self._right[depth] + (depth < num_right)
            self._compared[depth] = _FORGET * self._compared[depth] + 1.0

    def gains(self, num_drafts: int) -> list[float]:
        """Tokens that each of `num_drafts` drafts is expected to add; never rising."""
        gains: list[float] = []
        gain, chance = 1.0, _PRIOR_CHANCE
        for depth in range(num_drafts):
            if depth < MAX_DEPTH:  # what is not known of a depth is taken to be as it was one before
                chance = (self._right[depth] + _PRIOR_WEIGHT * chance) / (self._compared[depth] + _PRIOR_WEIGHT)
            gain *= chance
            gains.append(gain)
        return gains


def num_to_ask(gains: Sequence[float], *, step_ms: Callable[[int], float], guess_ms: Callable[[int], float]) -> int:
    """How many tokens to have guessed by somebody who takes time for it, so that a stream gets most tokens per second; 0 when none pay.

    Args:
        gains: of each draft that may be asked for, falling.
        step_ms: what a step takes in which the stream has so many rows.
        guess_ms: what a guess of so many tokens takes, before that step.
    """
    best, best_rate, tokens = 0, 1.0 / step_ms(1), 1.0
    for count, gain in enumerate(gains, start=1):  # to the end: what every guess costs at least may pay with several tokens only
        tokens += gain
        rate = tokens / (step_ms(1 + count) + guess_ms(count))
        if rate > best_rate:
            best, best_rate = count, rate
    return best


@dataclass(frozen=True, slots=True)
class Offer:
    """What one stream could send beside its own row."""

    gains: Sequence[float]
    """Of each draft on hand, falling. Empty: none."""
    num_forced: int | None = None
    """The caller chose the number of drafts; None leaves it to us."""


def choose(offers: Sequence[Offer], *, max_drafts: int, step_ms: Callable[[int], float]) -> list[int]:
    """How many drafts each stream sends.

    Args:
        offers: one for each stream of the micro-batch; each sends a row anyway.
        max_drafts: most drafts in all.
        step_ms: what a micro-batch of so many rows takes; convex.
    """
    chosen = [0] * len(offers)
    if not any(offer.gains for offer in offers):
        return chosen
    num_left = max_drafts
    tokens = float(len(offers))
    free: list[int] = []
    for idx, offer in enumerate(offers):
        if offer.num_forced is None:
            free.append(idx)
            continue
        chosen[idx] = min(offer.num_forced, len(offer.gains), num_left)
        num_left -= chosen[idx]
        tokens += sum(offer.gains[: chosen[idx]])
    # Gains fall with depth, so in this order every draft comes after those before it in its own stream.
    candidates = sorted(((gain, -depth, idx) for idx in free for depth, gain in enumerate(offers[idx].gains)), reverse=True)
    num_rows = len(offers) + max_drafts - num_left
    best_rate = tokens / step_ms(num_rows)
    for gain, _, idx in candidates[:num_left]:
        tokens += gain
        num_rows += 1
        rate = tokens / step_ms(num_rows)
        if rate <= best_rate:  # and from here on it only falls: tokens grow ever slower, the time does not
            break
        best_rate = rate
        chosen[idx] += 1
    return chosen
