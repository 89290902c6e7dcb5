"""Rows of hidden states, [tokens, hidden]: picked and joined, copied only where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from langchain_pshard.core.codec import Tensor


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows in order; a single part is returned as it is."""
    return parts[0] if len(parts) == 1 else cast(Tensor, np.concatenate(parts))


def pick_rows(sizes: Sequence[int], kept: Sequence[int], hidden: Tensor | None) -> Tensor | None:
    """The rows of the kept slices, given the number of rows of every slice; no copy when all are kept, or just one."""
    if hidden is None or len(kept) == len(sizes):
        return hidden
    edges = np.cumsum([0, *sizes])
    return join_rows([hidden[edges[idx] : edges[idx + 1]] for idx in kept])
