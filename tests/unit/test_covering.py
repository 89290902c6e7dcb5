"""Covering designs: every pair of values, in few rows."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases import AXES
from benchmarks.covering import covering, pairs_of
from benchmarks.exactness import design


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_every_pair_is_in_a_row(sizes: list[int], seed: int) -> None:
    axes = {f"axis {idx}": tuple(range(size)) for idx, size in enumerate(sizes)}
    rows = covering(axes, seed=seed)
    assert all(list(row) == list(axes) for row in rows)
    for one, other in itertools.combinations(axes, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(axes[one], axes[other]))


def test_few_rows_and_the_same_ones_again() -> None:
    rows = covering(AXES, seed=1)
    assert 15 <= len(rows) <= 18  # 15 pairs of the two longest axes; all of them would be 240
    assert rows == covering(AXES, seed=1)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_value_meets_every_number_of_stages(num_stages: int) -> None:
    found = design(num_stages)
    for axis, values in AXES.items():
        assert {getattr(setting, axis) for setting in found} == set(values)
    assert len(found) < math.prod(len(values) for values in AXES.values()) / 10


def test_designs_differ_by_stages() -> None:
    assert len({tuple(design(num_stages)) for num_stages in (1, 2, 3)}) == 3


def test_pairs_of_a_row() -> None:
    assert pairs_of({"b": 1, "a": 2, "c": 3}) == {("a", 2, "b", 1), ("a", 2, "c", 3), ("b", 1, "c", 3)}
