"""Whether the next step is worth waiting for awake. Pure: time is a parameter.

A core that goes deep to sleep loses its caches and takes its time to wake; both delay the step that wakes it (by about a tenth of a
millisecond for each worker on its way). So a worker whose inferences follow one another with a pause of a few milliseconds looks for the
next step without sleeping, for as long as that pause may take and no longer. In a shorter one a core hardly sleeps, and looking only gets
in the way of the thread that receives (one stage alone: 2 % slower). Steps further apart, or that have stopped coming, are not worth the
power.
"""

from __future__ import annotations

import math

SHORTEST_PAUSE_S = 0.003


class Cadence:
    """The pauses between a worker's inferences."""

    def __init__(self, busy_poll_s: float) -> None:
        """
        Args:
            busy_poll_s: longest pause that is spent awake; 0 to sleep in every one.
        """
        self._busy_poll_s = busy_poll_s
        self._last_ended_s = -math.inf
        self._awake_until_s = -math.inf

    def ran(self, started_s: float, ended_s: float) -> None:
        """An inference ran."""
        is_worth_it = SHORTEST_PAUSE_S <= started_s - self._last_ended_s <= self._busy_poll_s
        self._last_ended_s = ended_s
        self._awake_until_s = ended_s + self._busy_poll_s if is_worth_it else -math.inf

    def stays_awake(self, now_s: float) -> bool:
        """Whether to look for the next step without sleeping."""
        return now_s < self._awake_until_s
