"""How a batch of slices becomes the subsequences of a paged-attention graph. Pure.

What makes streams independent of their company, and a verified row the same bits as plain decoding (FACTS: paged attention inside a
stage):
- a PREFILL slice is one subsequence of its n tokens;
- a ROWS slice is n subsequences of one token each that share the stream's block table, with past lengths start, start + 1, ...; all new
  K/V are written before attention runs, so a row sees the rows before it;
- every batch ends in one subsequence of no token. The CPU plugin computes a batch of fewer rows than it has threads by another kernel,
  which splits a context over the threads and sums it in another order; an empty subsequence costs nothing and rules that kernel out. With
  it the bits depend on neither company nor thread count (docs/decisions/0005-fast-numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.kv import num_blocks_for
from langchain_pshard.core.messages import SliceKind
from workers.blocks import BlockTable
from workers.runners.runner import RunSlice

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Signature = tuple[tuple[BlockTable, int, int, int], ...]
"""Per slice: its table, number of tokens, of sampled ones, and of blocks every row sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A batch as paged attention wants it: n subsequences, the last one empty, t tokens in all."""

    tokens: Int64s  # [t]
    position_ids: Int64s  # [t]
    past_lens: Int32s  # [n]
    subsequence_begins: Int32s  # [n + 1]
    block_indices: Int32s  # [sum of the subsequences' blocks]
    block_indices_begins: Int32s  # [n + 1]
    max_context_len: Int32s  # []
    sampled_rows: Int32s  # [sum of num_sampled], indices into the t tokens
    signature: Signature
    """What has to be equal for another batch to differ from this one in tokens and positions alone."""

    def over(self, old: Layout) -> tuple[Layout, tuple[str, ...]]:
        """This layout in the memory of an older one that a request still reads, as far as it fits.

        Returns:
            The layout, and the names of the arrays whose shapes differ: those the request has yet to be given.
        """
        kept = {}
        for name in ARRAYS:
            mine, theirs = getattr(self, name), getattr(old, name)
            if mine.shape == theirs.shape:
                theirs[...] = mine
                kept[name] = theirs
        return replace(self, **kept), tuple(name for name in ARRAYS if name not in kept)

    def move(self, slices: Sequence[RunSlice], tables: Sequence[BlockTable]) -> bool:
        """Become the layout of another batch, in place, if it is like this one: the next decode step of the same streams nearly always
        is, and is moved in a third of the time that laying it out takes.

        Returns:
            False, and nothing changed, when the batch needs a layout of its own.
        """
        if not self.signature or self.signature != _signature(slices, tables):
            return False
        row = context_len = 0
        for piece in slices:
            end = piece.start + len(piece.tokens)
            self.tokens[row : row + len(piece.tokens)] = piece.tokens
            for position in range(piece.start, end):  # a few at a time: quicker than arrays are made
                self.position_ids[row] = self.past_lens[row] = position  # every row is a subsequence
                row += 1
            context_len = max(context_len, end)
        self.max_context_len[...] = context_len
        return True


ARRAYS = tuple(field.name for field in fields(Layout) if field.name not in ("sampled_rows", "signature"))
"""What a request reads of a layout."""


def _signature(slices: Sequence[RunSlice], tables: Sequence[BlockTable]) -> Signature:
    """Empty when the batch cannot be moved: it prefills, or a slice's rows do not all see equally many blocks."""
    parts = []
    for piece, table in zip(slices, tables, strict=True):
        count = len(piece.tokens)
        num_blocks = num_blocks_for(piece.start + count)
        if piece.kind is not SliceKind.ROWS or num_blocks_for(piece.start + 1) != num_blocks:
            return ()
        parts.append((table, count, piece.num_sampled, num_blocks))
    return tuple(parts)


def lay_out(slices: Sequence[RunSlice], tables: Sequence[BlockTable]) -> Layout:
    """Lay slices out as subsequences; `tables[i]` is the block table of `slices[i]`. Pure."""
    positions: list[int] = []
    past_lens: list[int] = []
    lengths: list[int] = []
    blocks: list[Int32s] = []
    sampled: list[int] = []
    num_tokens = 0
    for piece, table in zip(slices, tables, strict=True):
        count = len(piece.tokens)
        end = piece.start + count
        positions.extend(range(piece.start, end))
        if piece.kind is SliceKind.PREFILL:
            past_lens.append(piece.start)
            lengths.append(count)
            blocks.append(table.blocks[: num_blocks_for(end)])
        else:
            past_lens.extend(range(piece.start, end))
            lengths.extend([1] * count)
            blocks.extend(table.blocks[: num_blocks_for(past + 1)] for past in range(piece.start, end))
        num_tokens += count
        sampled.extend(range(num_tokens - piece.num_sampled, num_tokens))
    past_lens.append(0)
    lengths.append(0)
    blocks.append(_NO_BLOCKS)
    single = len(slices) == 1
    return Layout(
        tokens=(slices[0].tokens if single else np.concatenate([piece.tokens for piece in slices])).astype(np.int64),
        position_ids=np.array(positions, dtype=np.int64),
        past_lens=np.array(past_lens, dtype=np.int32),
        subsequence_begins=_begins(lengths),
        block_indices=np.concatenate(blocks),
        block_indices_begins=_begins([len(indices) for indices in blocks]),
        max_context_len=np.array(max(past + length for past, length in zip(past_lens, lengths, strict=True)), dtype=np.int32),
        sampled_rows=np.array(sampled, dtype=np.int32),
        signature=_signature(slices, tables),
    )


_NO_BLOCKS: Int32s = np.zeros(0, dtype=np.int32)


def _begins(lengths: list[int]) -> Int32s:
    begins = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=begins[1:])
    return begins
