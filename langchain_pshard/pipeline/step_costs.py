"""What a step costs, learned from the timings that every result brings: milliseconds of each stage over rows (`cost_line`) and over prompt
tokens (`prompt_costs`), and the time between machines. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from langchain_pshard.core.messages import StageTiming
from langchain_pshard.pipeline.cost_line import CostLine
from langchain_pshard.pipeline.prompt_costs import PromptFit, PromptLoad, PromptPrice

ROW_SLOPE = 0.08
"""Prior: what one more row adds, as a part of the time of one row (Gemma 3 270M, int4, one core: 0.05 up to 8 rows, 0.1 beyond)."""
STEP_OVERHEAD_MS = 0.3
"""What a stage spends on a step beside its inference: receiving, deciding, sending."""
_WAY_WINDOW = 32


class StepCosts:
    """The costs of one chain."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._rows = [CostLine(ROW_SLOPE) for _ in range(num_stages)]
        self._prompts = [PromptFit() for _ in range(num_stages)]
        self.knows_prompts = False
        """Whether any prompt tokens were timed; until then their price is a guess."""
        self._way_ms: deque[float] = deque(maxlen=_WAY_WINDOW)
        self._least_way_ms = 0.0

    def observe(
        self, *, num_rows: int, prompt: PromptLoad, timings: Sequence[StageTiming], round_trip_ms: float, is_round: bool = True
    ) -> float:
        """A step came back; returns its time outside the stages. Of a mixed one, what its rows do not account for is the prompt's.

        `is_round`: the client sent it; one that the chain took by itself has a shorter way.
        """
        way_ms = max(0.0, round_trip_ms - sum(timing.queue_us + timing.compute_us for timing in timings) / 1e3)
        if is_round:
            self._way_ms.append(way_ms)
            self._least_way_ms = min(self._way_ms)
        if len(timings) == self.num_stages:  # anything else is a peer's fault, and only speed depends on it
            for rows, fit, timing in zip(self._rows, self._prompts, timings, strict=True):
                compute_ms = timing.compute_us / 1e3
                if prompt:
                    fit.observe(prompt, max(0.0, compute_ms - num_rows * rows.slope_ms))
                elif num_rows:
                    rows.observe(num_rows, compute_ms)
            self.knows_prompts = self.knows_prompts or bool(prompt)
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

    def prompt_prices(self, load: PromptLoad) -> tuple[PromptPrice, tuple[PromptPrice, ...]]:
        """What prompt tokens cost at the stage that takes longest over `load`, and at the others."""
        prices = [fit.price for fit in self._prompts]
        slowest = max(range(self.num_stages), key=lambda idx: prices[idx].at(load))
        return prices[slowest], (*prices[:slowest], *prices[slowest + 1 :])
