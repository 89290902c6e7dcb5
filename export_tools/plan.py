"""Pure: how many layers, and which, go to each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """The cut whose most expensive stage is cheapest; the head burdens the last stage.

    Of equal cuts the most even one (the least sum of squares), which counts where the head outweighs all else; then that whose earlier
    stages hold more. Exact.

    Raises:
        InvalidOptionError: fewer layers than stages, or no stage at all.
    """
    check_num_stages(num_stages, len(layer_costs))
    limit, _ = _best_cut(layer_costs, head_cost, num_stages, joined=max, limit=math.inf)
    _, ends = _best_cut(layer_costs, head_cost, num_stages, joined=lambda load, rest: load * load + rest, limit=limit)
    return tuple(LayerSpan(start, end) for start, end in pairwise((0, *ends)))


def _best_cut(
    layer_costs: Sequence[float], head_cost: float, num_stages: int, *, joined: Callable[[float, float], float], limit: float
) -> tuple[float, tuple[int, ...]]:
    """The least value and the stages' ends, of all cuts without a stage above `limit`; dynamic programming over (first layer, stages left).

    Args:
        layer_costs, head_cost, num_stages: see `balanced_spans`.
        joined: value of a cut from the load of its first stage and the value of the rest, 0 where there is none.
        limit: most that a stage may cost.
    """
    num_layers = len(layer_costs)

    @cache
    def best(start: int, stages_left: int) -> tuple[float, tuple[int, ...]]:
        options = []
        for end in [num_layers] if stages_left == 1 else range(num_layers - stages_left + 1, start, -1):
            load = sum(layer_costs[start:end]) + head_cost * (end == num_layers)
            rest, rest_ends = best(end, stages_left - 1) if end < num_layers else (0.0, ())
            options.append((joined(load, rest) if load <= limit else math.inf, (end, *rest_ends)))
        return min(options, key=lambda option: option[0])

    return best(0, num_stages)
