"""KV of whole prompts, copied out of the requests that computed them, to be found by what a prompt begins with. Pure: it holds arrays, and
knows no engine.

Attention looks back only, so the leading positions of a captured prompt are those of every prompt that begins with the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.runners.runner import TokenArray

MIN_SHARED_TOKENS = 32
"""A shorter beginning is not worth a copy of every layer's state: FACTS has 25 ms for 1,024 positions of 8 layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """The state of a stream after its prompt."""

    prompt: TokenArray
    states: Mapping[str, npt.NDArray[Any]]  # by variable: [1, kv_heads, len(prompt), head_dim]

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def num_shared(self, prompt: TokenArray) -> int:
        """How many leading tokens the two prompts have in common."""
        count = min(len(prompt), len(self.prompt))
        differs = np.flatnonzero(self.prompt[:count] != prompt[:count])
        return int(differs[0]) if len(differs) else count


class Captures:
    """Captured prompts, the least recently used first. Invariant: none is the beginning of another."""

    def __init__(self) -> None:
        self._captures: list[Capture] = []

    @property
    def num_bytes(self) -> int:
        return sum(capture.num_bytes for capture in self._captures)

    def find(self, prompt: TokenArray) -> tuple[Capture, int] | None:
        """The capture that shares most with a prompt, used now, and how many leading tokens; None when it is hardly any."""
        best = max(self._captures, key=lambda capture: capture.num_shared(prompt), default=None)
        if best is None or (num_shared := best.num_shared(prompt)) < MIN_SHARED_TOKENS:
            return None
        self._captures.remove(best)
        self._captures.append(best)
        return best, num_shared

    def wants(self, prompt: TokenArray) -> bool:
        """Whether a capture of this prompt would be of use: it is long enough, and not the beginning of one that is here."""
        return len(prompt) >= MIN_SHARED_TOKENS and all(capture.num_shared(prompt) < len(prompt) for capture in self._captures)

    def add(self, added: Capture) -> None:
        """Keep one that is wanted; those that it begins with are of no use any more."""
        self._captures = [capture for capture in self._captures if capture.num_shared(added.prompt) < len(capture.prompt)]
        self._captures.append(added)

    def shrink(self, max_bytes: int) -> None:
        """Forget the least recently used until the others fit."""
        num_bytes = self.num_bytes
        while num_bytes > max(0, max_bytes):
            num_bytes -= self._captures.pop(0).num_bytes
