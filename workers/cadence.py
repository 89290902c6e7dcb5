"""Whether the next step is worth waiting for awake. Pure: time is a parameter.

A core that goes to sleep loses its caches and takes its time to wake; both delay the step that wakes it (by about a tenth of a millisecond
for each worker on its way). So a worker whose inferences follow one another closely looks for the next step without sleeping, for as long
as the last pause was allowed to take and no longer: one whose steps come far apart, or have stopped coming, sleeps.
"""

from __future__ import annotations

import math


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
        is_close = started_s - self._last_ended_s <= self._busy_poll_s
        self._last_ended_s = ended_s
        self._awake_until_s = ended_s + self._busy_poll_s if is_close else -math.inf

    def stays_awake(self, now_s: float) -> bool:
        """Whether to look for the next step without sleeping."""
        return now_s < self._awake_until_s
