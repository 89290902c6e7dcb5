"""Pure: how many layers, and which, go to each stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from langchain_pshard.core.bundle import LayerSpan
from langchain_pshard.core.errors import InvalidOptionError


def spans_from_counts(counts: Sequence[int], num_layers: int, num_stages: int | None = None) -> tuple[LayerSpan, ...]:
    """Spans of `counts` layers each, in order.

    Raises:
        InvalidOptionError: a count below one, a sum other than `num_layers`, or as many counts as `num_stages` does not say.
    """
    given = ",".join(map(str, counts))
    if num_stages is not None and len(counts) != num_stages:
        raise InvalidOptionError(f"layers {given} describes {len(counts)} stages, but {num_stages} were asked for: give one count a stage")
    if not counts or any(count < 1 for count in counts):
        raise InvalidOptionError(f"layers {given or 'of no stage'} has a stage without layers: every stage needs at least 1")
    if sum(counts) != num_layers:
        raise InvalidOptionError(f"layers {given} adds up to {sum(counts)}, but the model has {num_layers} layers")
    edges = [sum(counts[:idx]) for idx in range(len(counts) + 1)]
    return tuple(LayerSpan(start, end) for start, end in pairwise(edges))


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """Refuse a number of stages that cannot all have a layer.

    Raises:
        InvalidOptionError: fewer layers than stages, or no stage at all.
    """
    if not 1 <= num_stages <= num_layers:
        raise InvalidOptionError(f"{num_stages} stages asked for, but the model has {num_layers} layers: choose 1 to {num_layers} stages")


def balanced_spans(layer_costs: Sequence[float], head_cost: float, num_stages: int) -> tuple[LayerSpan, ...]:
    """The cut whose most expensive stage is cheapest; the head burdens the last stage. Of equal cuts, earlier stages hold more.

    Exact: dynamic programming over (first layer, stages left).

    Raises:
        InvalidOptionError: fewer layers than stages, or no stage at all.
    """
    num_layers = len(layer_costs)
    check_num_stages(num_stages, num_layers)

    @cache
    def best(start: int, stages_left: int) -> tuple[float, tuple[int, ...]]:
        """Cost of the most expensive stage and the stages' ends, for the layers from `start` on."""
        if stages_left == 1:
            return sum(layer_costs[start:]) + head_cost, (num_layers,)
        options = []
        for end in range(num_layers - stages_left + 1, start, -1):
            rest_cost, rest_ends = best(end, stages_left - 1)
            options.append((max(sum(layer_costs[start:end]), rest_cost), (end, *rest_ends)))
        return min(options, key=lambda option: option[0])

    ends = best(0, num_stages)[1]
    return tuple(LayerSpan(start, end) for start, end in pairwise((0, *ends)))
