"""A drafter that knows the answer and is wrong on purpose: speculation with a given acceptance, at no cost."""

from __future__ import annotations

import random
from collections.abc import Sequence


class ScriptedDrafter:
    """For one stream whose plain answer is known. Each draft is right with the given chance, by a fixed seed."""

    def __init__(self, answer: Sequence[int], *, chance: float, seed: int) -> None:
        self._answer = answer
        self._chance = chance
        self._draws = random.Random(seed)
        self._num_done = 0

    def begin(self, prompt: Sequence[int]) -> ScriptedDrafter:  # noqa: ARG002  # the answer is all that it looks at
        self._num_done = 0
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        self._num_done += len(tokens)

    def propose(self, max_tokens: int) -> Sequence[int]:
        ahead = self._answer[self._num_done : self._num_done + max_tokens]
        return [token if self._draws.random() < self._chance else token ^ 1 for token in ahead]
