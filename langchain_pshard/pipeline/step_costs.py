"""What a step costs, learned from the timings that every result brings: milliseconds of a stage over rows and over prompt tokens, and the
time between machines. Pure.

A stage reads its weights once per inference and computes for every row, so its time is nearly a straight line over rows; the line is
fitted where the fleet works, by least squares that forget and lean to the lower side. Until other numbers of rows are seen, and again when
they have long not been seen, a prior says how steep it is: so what seemed too dear is tried again now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from langchain_pshard.core.messages import StageTiming

ROW_SLOPE = 0.08
"""Prior: what one more row adds, as a part of the time of one row (Gemma 3 270M, int4, one core: 0.05 up to 8 rows, 0.1 beyond)."""
PROMPT_SLOPE = 0.05
"""Prior: the same for a prompt token beside a chunk's fixed costs (0.65 ms beside 13 ms there)."""
UNKNOWN_MS = 10.0
"""Time of a step of one row before anything was measured."""
STEP_OVERHEAD_MS = 0.3
"""What a stage spends on a step beside its inference: receiving, deciding, sending."""
_FORGET = 0.98
_PRIOR_WEIGHT = 6.0
_LATE_WEIGHT = 0.2
"""Weight of a time above the line: what else runs on a machine only ever adds to a step, and the price is what it takes undisturbed."""
_OUTLIER = 3.0
_WAY_WINDOW = 32


class CostLine:
    """Milliseconds over a count of rows or tokens: a line, fitted to what was observed lately.

    Invariant: neither the time at zero nor the slope is negative.
    """

    def __init__(self, prior_slope: float, *, forget: float = _FORGET, late_weight: float = _LATE_WEIGHT) -> None:
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
        weight, expected = 1.0, self.at(count)
        if self._weight and milliseconds > expected:
            weight = self._late_weight
            milliseconds = min(milliseconds, _OUTLIER * expected)
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


class StepCosts:
    """The costs of one chain."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._rows = [CostLine(ROW_SLOPE) for _ in range(num_stages)]
        self._prompt = [CostLine(PROMPT_SLOPE) for _ in range(num_stages)]
        self.knows_prompts = False
        """Whether any prompt tokens were timed; until then their price is a guess."""
        self._way_ms: deque[float] = deque(maxlen=_WAY_WINDOW)
        self._least_way_ms = 0.0

    def observe(self, *, num_rows: int, num_prompt_tokens: int, timings: Sequence[StageTiming], round_trip_ms: float) -> float:
        """A step came back; returns its time outside the stages. Of a mixed one, what its rows do not account for is the prompt's."""
        way_ms = max(0.0, round_trip_ms - sum(timing.queue_us + timing.compute_us for timing in timings) / 1e3)
        self._way_ms.append(way_ms)
        self._least_way_ms = min(self._way_ms)
        if len(timings) == self.num_stages:  # anything else is a peer's fault, and only speed depends on it
            for rows, prompt, timing in zip(self._rows, self._prompt, timings, strict=True):
                compute_ms = timing.compute_us / 1e3
                if num_prompt_tokens:
                    prompt.observe(num_prompt_tokens, max(0.0, compute_ms - num_rows * rows.slope_ms))
                elif num_rows:
                    rows.observe(num_rows, compute_ms)
            self.knows_prompts = self.knows_prompts or num_prompt_tokens > 0
        return way_ms

    @property
    def way_ms(self) -> float:
        """Time of a step outside the stages, all hops together: the least of late, because waiting behind others is not the way's fault."""
        return self._least_way_ms

    def cycle_ms(self, num_rows: float, num_groups: int) -> float:
        """How often each of `num_groups` alternating micro-batches of so many rows gets its turn: they queue at the slowest stage, or each
        is as fast as its own round trip. Convex in the rows."""
        slowest, round_trip = 0.0, self._least_way_ms
        for line in self._rows:
            stage_ms = line.at(num_rows) + STEP_OVERHEAD_MS
            slowest = max(slowest, stage_ms)
            round_trip += stage_ms
        return max(num_groups * slowest, round_trip)

    def slowest_prompt(self) -> CostLine:
        """Prefill of the stage that takes longest per token."""
        return max(self._prompt, key=lambda line: line.slope_ms)
