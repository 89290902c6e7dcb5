"""How much KV a paged stage keeps of a stream: the rule by which workers set it aside, and plans count it. Pure.

Where every layer of a stage has a window, a stream gives back the blocks that the widest window has passed (docs/decisions/0008).
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_TOKENS = 32
"""Positions per block: what the CPU plugin's paged attention is built for."""
MAX_SLICE_TOKENS = 512
"""Most tokens of one slice: what bounds the KV that a stream holds where windows pass blocks."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)


def widest_window(windows: Sequence[int | None]) -> int | None:
    """Positions that a token sees in the layer of a stage that sees most, itself included; None when one sees all: a block is given back
    by all layers or by none."""
    bounded = [window for window in windows if window is not None]
    return max(bounded) if bounded and len(bounded) == len(windows) else None


def max_stream_blocks(window: int | None, max_slice_tokens: int = MAX_SLICE_TOKENS) -> int | None:
    """Most blocks that a stage with this widest window holds of one stream, however long it is; None: as many as it has positions for."""
    # A slice sees the window before its first position; from wherever in a block that begins.
    return None if window is None else num_blocks_for(window - 1 + max_slice_tokens) + 1


def kept_tokens(windows: Sequence[int | None], num_tokens: int, num_streams: int | None) -> int:
    """Most positions that a stage of layers with these windows keeps of `num_tokens`, which belong to at most `num_streams` streams.

    Args:
        windows: of each layer; None where it sees all.
        num_tokens: positions over all streams.
        num_streams: None when nobody knows: all of them may be so short that no window passes any.
    """
    max_blocks = max_stream_blocks(widest_window(windows))
    if max_blocks is None or num_streams is None:
        return num_tokens
    return min(num_tokens, num_streams * max_blocks * BLOCK_TOKENS)
