"""Milliseconds as a line over a count, learned where the fleet works. Pure; `prompt_costs` weighs what it observes likewise.

A stage reads its weights once per inference and computes for every row, so its time is nearly a straight line over rows; the line is
fitted by least squares that forget and lean to the lower side. Until other counts are seen, and again when they have long not been seen, a
prior says how steep it is: so what seemed too dear is tried again now and then.
"""

from __future__ import annotations

UNKNOWN_MS = 10.0
"""Time of a step of one row before anything was measured."""
FORGET = 0.98
"""Weight of the past at each observation."""
LATE_WEIGHT = 0.2
"""Weight of a time above the expected: what else runs on a machine only ever adds to a step, and the price is what it takes undisturbed."""
_PRIOR_WEIGHT = 6.0
OUTLIER = 3.0
"""A time counts as so many times the expected at most."""


def weigh(
    milliseconds: float, expected_ms: float | None, *, late_weight: float = LATE_WEIGHT, outlier: float = OUTLIER
) -> tuple[float, float]:
    """The weight of an observation and the time it counts as: late ones count little, and no more than a few times what was expected.

    Args:
        milliseconds: what was observed.
        expected_ms: what was expected; None when nothing was.
        late_weight: weight of a time above that.
        outlier: how many times as long it counts at most.
    """
    if expected_ms is None or milliseconds <= expected_ms:
        return 1.0, milliseconds
    if expected_ms <= 0:  # a multiple of nothing would hold the price there for ever
        return late_weight, milliseconds
    return late_weight, min(milliseconds, outlier * expected_ms)


class CostLine:
    """Milliseconds over a count of rows or tokens: a line, fitted to what was observed lately.

    Invariant: neither the time at zero nor the slope is negative.
    """

    def __init__(self, prior_slope: float, *, forget: float = FORGET, late_weight: float = LATE_WEIGHT) -> None:
        """
        Args:
            prior_slope: what one more adds, as a part of the time of one, as far as is known.
            forget: weight of the past at each observation.
            late_weight: weight of a time above the line.
        """
        self._prior_slope = prior_slope
        self._forget = forget
        self._late_weight = late_weight
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._base, self._slope = UNKNOWN_MS * (1 - prior_slope), UNKNOWN_MS * prior_slope

    def observe(self, count: int, milliseconds: float) -> None:
        """An inference over `count` took so long."""
        expected = self.at(count) if self._weight else None
        weight, milliseconds = weigh(milliseconds, expected, late_weight=self._late_weight)
        self._weight = self._forget * self._weight + weight
        self._x = self._forget * self._x + weight * count
        self._y = self._forget * self._y + weight * milliseconds
        self._xx = self._forget * self._xx + weight * count * count
        self._xy = self._forget * self._xy + weight * count * milliseconds
        self._fit()

    def at(self, count: float) -> float:
        """Expected time of an inference over `count`."""
        return self._base + self._slope * count

    @property
    def base_ms(self) -> float:
        """The part that does not depend on the count."""
        return self._base

    @property
    def slope_ms(self) -> float:
        return self._slope

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = max(0.0, self._xx - self._weight * mean_x * mean_x)
        joint = self._xy - self._weight * mean_x * mean_y
        # The line through (mean_x, mean_y) on which one more costs the prior's part of a single one.
        expected = mean_y * self._prior_slope / (1 + self._prior_slope * (mean_x - 1))
        slope = (joint + _PRIOR_WEIGHT * expected) / (spread + _PRIOR_WEIGHT)
        self._slope = min(max(0.0, slope), mean_y / max(mean_x, 1.0))
        self._base = max(0.0, mean_y - self._slope * mean_x)  # by rounding it may be a hair below
