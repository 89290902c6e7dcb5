"""Few settings that cover many axes: every value of each axis together with every value of each other one, at least once. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Pair = tuple[str, Any, str, Any]
_CANDIDATES = 40


def covering(axes: Mapping[str, Sequence[Any]], *, seed: int) -> list[Row]:
    """For two axes or more, rows with a value for each axis such that every pair of values of two axes is in one of them.

    Greedy: each row is the best of `_CANDIDATES`, which begin with a pair that no row has and go on with the values that add most pairs.
    Other seeds give other rows, so that several designs side by side cover most triples too.
    """
    draws = random.Random(seed)
    missing = {pair for one, other in itertools.combinations(axes, 2) for pair in _pairs_of_axes(one, axes[one], other, axes[other])}
    rows: list[Row] = []
    while missing:
        candidates = [_candidate(axes, missing, draws) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        rows.append({axis: best[axis] for axis in axes})
    return rows


def pairs_of(row: Row) -> set[_Pair]:
    """What a row covers; axes of a pair in the order of the alphabet."""
    return {(one, row[one], other, row[other]) for one, other in itertools.combinations(sorted(row), 2)}


def _pairs_of_axes(one: str, ones: Sequence[Any], other: str, others: Sequence[Any]) -> set[_Pair]:
    return {pair for left, right in itertools.product(ones, others) for pair in pairs_of({one: left, other: right})}


def _candidate(axes: Mapping[str, Sequence[Any]], missing: set[_Pair], draws: random.Random) -> Row:
    one, left, other, right = draws.choice(sorted(missing, key=repr))
    row: Row = {one: left, other: right}
    rest = [axis for axis in axes if axis not in row]
    draws.shuffle(rest)
    for axis in rest:
        values = list(axes[axis])
        draws.shuffle(values)  # of equally good values not always the first
        row[axis] = max(values, key=lambda value: len(missing & pairs_of({**row, axis: value})))
    return row
