"""How layers are dealt to stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_tools.plan import balanced_spans, check_num_stages, spans_from_counts
from langchain_pshard.core.bundle import LayerSpan
from langchain_pshard.core.errors import InvalidOptionError


def test_counts_become_spans() -> None:
    assert spans_from_counts([16, 2], 18) == (LayerSpan(0, 16), LayerSpan(16, 18))


@pytest.mark.parametrize(
    ("counts", "num_stages", "figures"),
    [([10, 7], None, ("10,7", "17", "18")), ([10, 9], None, ("19", "18")), ([18, 0], None, ("18,0",)), ([9, 9], 3, ("2 stages", "3 were"))],
)
def test_counts_that_do_not_fit_are_refused_with_both_figures(counts: list[int], num_stages: int | None, figures: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        spans_from_counts(counts, 18, num_stages)
    assert all(figure in str(caught.value) for figure in figures)


@pytest.mark.parametrize("num_stages", [0, -1, 19])
def test_impossible_number_of_stages_is_refused(num_stages: int) -> None:
    with pytest.raises(InvalidOptionError, match=rf"{num_stages} stages asked for, but the model has 18 layers"):
        check_num_stages(num_stages, 18)


def test_a_heavy_head_leaves_the_last_stage_few_layers() -> None:
    assert balanced_spans([1.0] * 18, 14.0, 2) == (LayerSpan(0, 16), LayerSpan(16, 18))


def test_where_the_head_outweighs_all_else_the_rest_is_even() -> None:
    assert balanced_spans([1.0] * 18, 100.0, 3) == (LayerSpan(0, 9), LayerSpan(9, 17), LayerSpan(17, 18))
    assert balanced_spans([1.0] * 18, 100.0, 4) == (LayerSpan(0, 6), LayerSpan(6, 12), LayerSpan(12, 17), LayerSpan(17, 18))


@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=8), head=st.integers(0, 40), data=st.data())
def test_balanced_cut_is_optimal(costs: list[int], head: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def value(edges: tuple[int, ...]) -> tuple[int, int]:
        *loads, last = (sum(costs[start:end]) for start, end in pairwise(edges))
        loads.append(last + head)
        return max(loads), sum(load * load for load in loads)

    spans = balanced_spans(costs, head, num_stages)
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    assert value((0, *(span.end for span in spans))) == min(value((0, *cut, len(costs))) for cut in cuts)
