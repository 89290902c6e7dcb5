"""Which workers live, and what a lost stream needs to go on. Pure.

A worker is heard whenever any message of it arrives. It is lost when it owes an answer to a ping for too long, or when its connection broke
and a Hello is not answered at once. Pings are answered by the inference loop: a hung loop counts as lost, a long inference does not as long
as it is shorter than the liveness timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from langchain_pshard.core.messages import SliceKind

CONFIRM_S = 0.5
"""How long a worker whose connection broke has to answer from a new one. A process that is gone refuses at once, so this costs little."""
MAX_GAP_S = 1.0
"""When the reactor has not run for longer than this, it was this machine that slept, not the workers."""


@dataclass(slots=True)
class _Pulse:
    heard_at: float
    pinged_at: float
    owes_since: float | None = None
    broke_at: float | None = None


class Liveness:
    """When each worker was heard of, and which ones are lost."""

    def __init__(self, addresses: Iterable[str], now: float, *, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._pulses = {address: _Pulse(heard_at=now, pinged_at=now) for address in addresses}
        self._checked_at = now

    def heard(self, address: str, now: float) -> None:
        """Any message of the worker came."""
        pulse = self._pulses[address]
        pulse.heard_at = now
        pulse.owes_since = None

    def add(self, address: str, now: float) -> None:
        """Watch one more worker."""
        self._pulses[address] = _Pulse(heard_at=now, pinged_at=now)

    def remove(self, address: str) -> None:
        """Watch this worker no more."""
        self._pulses.pop(address, None)

    def broke(self, address: str, now: float) -> None:
        """The worker's connection broke; a Hello asks who is there now."""
        if self._pulses[address].broke_at is None:
            self._pulses[address].broke_at = now

    @property
    def is_doubtful(self) -> bool:
        """Whether a broken connection waits to be explained: no new work until it is."""
        return any(pulse.broke_at is not None for pulse in self._pulses.values())

    def check(self, now: float) -> dict[str, str]:
        """The workers that are lost, and why in words."""
        gap = now - self._checked_at
        self._checked_at = now
        if gap > MAX_GAP_S:
            self._forgive(gap, now)
        return {address: reason for address, pulse in self._pulses.items() if (reason := self._reason(pulse, now)) is not None}

    def due_pings(self, now: float) -> list[str]:
        """Workers to ping now; each counts as pinged."""
        due = [address for address, pulse in self._pulses.items() if now - pulse.pinged_at >= self._interval_s]
        for address in due:
            pulse = self._pulses[address]
            pulse.pinged_at = now
            if pulse.owes_since is None:
                pulse.owes_since = now
        return due

    def _forgive(self, gap: float, now: float) -> None:
        """Time in which we could not have heard an answer does not count."""
        for pulse in self._pulses.values():
            pulse.owes_since = None if pulse.owes_since is None else min(now, pulse.owes_since + gap)
            pulse.broke_at = None if pulse.broke_at is None else min(now, pulse.broke_at + gap)

    def _reason(self, pulse: _Pulse, now: float) -> str | None:
        if pulse.broke_at is not None and now - pulse.broke_at >= CONFIRM_S:
            return "its connection broke and nobody answers there"
        # Counted from when it was last heard, so that the timeout is the longest silence, whenever the ping went out.
        if pulse.owes_since is not None and now - max(pulse.heard_at, pulse.owes_since - self._interval_s) >= self._timeout_s:
            return f"it has not answered for {self._timeout_s:g} s, though its connection stands"
        return None


@dataclass(frozen=True, slots=True)
class Replay:
    """Positions [start, end) to compute again as `kind`."""

    start: int
    end: int
    kind: SliceKind


def replay_plan(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Replay, ...]:
    """How a chain without state gets to where the stream was: the prompt as prefill, what was generated as rows.

    The kinds matter: only so is the KV bit for bit what it was. The last token is not replayed; the next decode step sends it.
    """
    prefill = Replay(0, len(prompt), SliceKind.PREFILL)
    if len(tokens) < 2:
        return (prefill,)
    return (prefill, Replay(len(prompt), len(prompt) + len(tokens) - 1, SliceKind.ROWS))
