"""What prompt tokens cost a stage, learned from timed inferences; and how many tokens fit into a time. Pure.

A token of a prompt attends to all before it, so what it costs grows with its position: a chunk of 250 tokens of Gemma 3 270M takes half of
its layers 59 ms at the beginning of a prompt and 85 ms at position 750. So an inference costs `base + slope * tokens + curve * positions`,
where `positions` sums over the tokens how many are before each. A line over tokens alone takes that growth for a high base.

The three are fitted by least squares that forget and lean to the lower side, as in `cost_line`. Chunks of one length or of one duration,
which is what the scheduler sends, hardly tell them apart: what the observations leave open, a ridge towards typical proportions decides.
"""

from __future__ import annotations

import math
from typing import Self

import msgspec
import numpy as np

from langchain_pshard.pipeline.cost_line import FORGET, UNKNOWN_MS, weigh

_PROPORTIONS = np.array([10.0, 1.0, 6e-4])
"""Prior: base, slope and curve, with the slope as 1 (Gemma 3 270M, int4, one core, 9 layers: 2.4 ms, 0.225 ms, 1.4e-4 ms)."""
_TRUST = 0.5
"""Prior: by how much of itself each of them may be off, one standard deviation."""
_LEAST_SCATTER = 3.0
"""Of observations around the fit, in tokens; no stage is steadier."""
_NOTHING_MS = 1e-9
"""A token that takes no longer takes no time: its square is no number to divide by."""
_OUTLIER = 1.25
"""Lower than for a line: of three unknowns the base is a small difference of large times, and one of thrice its length may wipe it out."""


class PromptLoad(msgspec.Struct, frozen=True):
    """Prompt tokens of one inference, as far as their time depends on them."""

    num_tokens: int = 0
    num_positions: float = 0.0
    """Sum over the tokens of the positions before them."""

    @classmethod
    def of(cls, start: int, num_tokens: int) -> Self:
        """Of `num_tokens` of one prompt from position `start`: on average, half of them are before a token too."""
        return cls(num_tokens, num_tokens * (start + num_tokens / 2))

    def __add__(self, other: PromptLoad) -> PromptLoad:
        return PromptLoad(self.num_tokens + other.num_tokens, self.num_positions + other.num_positions)

    def __bool__(self) -> bool:
        return self.num_tokens > 0


class PromptPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What prompt tokens cost a stage; nothing of it is negative."""

    base_ms: float
    """Of each inference, whatever it holds."""
    slope_ms: float
    """Of each token."""
    curve_ms: float
    """Of each token, for each position before it."""

    def at(self, load: PromptLoad) -> float:
        """Expected time of an inference over `load`."""
        return self.base_ms + self.work_ms(load)

    def work_ms(self, load: PromptLoad) -> float:
        """The same without the base: what does not depend on how a prompt is cut."""
        return self.slope_ms * load.num_tokens + self.curve_ms * load.num_positions

    def tokens_within(self, work_ms: float, start: int) -> float:
        """How many tokens of a prompt, from position `start`, are so much work: the n of work = each n + curve n^2 / 2."""
        if work_ms <= 0:
            return 0.0
        each = self.slope_ms + self.curve_ms * start
        # The root that stays exact where the curve is next to nothing.
        divisor = each + math.sqrt(each * each + 2 * self.curve_ms * work_ms)
        return 2 * work_ms / divisor if divisor > 0 else math.inf


class PromptFit:
    """Learns the price of prompt tokens at one stage."""

    def __init__(self) -> None:
        # Features are scaled to the prior, so that all three coefficients are alike where it holds: the price of one token.
        self._weight = self._squares = 0.0
        self._joint = np.zeros((3, 3))
        self._timed = np.zeros(3)
        self._coefficients = np.full(3, UNKNOWN_MS / _PROPORTIONS[0])
        self.price = _price(self._coefficients)

    def observe(self, load: PromptLoad, milliseconds: float) -> None:
        """An inference over `load` took so long."""
        weight, milliseconds = weigh(milliseconds, self.price.at(load) if self._weight else None, outlier=_OUTLIER)
        features = _PROPORTIONS * (1.0, load.num_tokens, load.num_positions)
        self._weight = FORGET * self._weight + weight
        self._squares = FORGET * self._squares + weight * milliseconds * milliseconds
        self._joint = FORGET * self._joint + weight * np.outer(features, features)
        self._timed = FORGET * self._timed + weight * milliseconds * features
        self._fit()

    def _fit(self) -> None:
        # The prior keeps the proportions; how dear a token is all in all, it takes from the observations. It weighs the more the wider
        # they scatter around the fit: a busy machine says little about proportions.
        typical = self._timed.sum() / self._joint.sum()
        misfit = self._squares - 2 * self._coefficients @ self._timed + self._coefficients @ self._joint @ self._coefficients
        scatter = misfit / (self._weight * typical * typical) if typical > _NOTHING_MS else 0.0
        ridge = max(scatter, _LEAST_SCATTER**2) / _TRUST**2
        self._coefficients = _solve(self._joint + ridge * np.eye(3), self._timed + ridge * typical)
        self.price = _price(self._coefficients)


def _price(coefficients: np.ndarray) -> PromptPrice:
    base, slope, curve = (float(value) for value in coefficients * _PROPORTIONS)
    return PromptPrice(base_ms=base, slope_ms=slope, curve_ms=curve)


def _solve(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x of matrix x = target, with what would be negative left out, the most negative first."""
    found = np.zeros(len(target))
    free = list(range(len(target)))
    while free:
        part = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
        if part.min() >= 0:
            found[free] = part
            break
        del free[int(part.argmin())]
    return found
