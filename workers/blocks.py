"""KV blocks and block tables: who owns which block of a stage's pool. Pure: it counts, it holds no memory.

A stream's blocks are set aside whole when it is opened, so that a stream once admitted never fails for want of KV, and a rewind gives
nothing back: what is behind the rewound length is simply written again. With a prefix cache a stream may begin on blocks that others
filled with the same prompt (`prefix`). It is admitted as if it could use none of them, since its first slice may start before them; what
it does share comes free with that slice.

Invariants:
- every block is free, or named and idle, or in at least one table; a block without a name is in at most one;
- free blocks + idle blocks >= debt, so that a stream's first slice always finds the blocks it has to replace;
- a table covers its reservation from open to release, whatever its length;
- a named block is never written: a slice that would is given a fresh one in its place;
- a named block holds what a prefill of its text writes: `wrote_prompt` is called after the inference, and compares the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.errors import CapacityError
from workers.prefix import SharedBlocks, name_blocks
from workers.runners.runner import NO_TOKENS, StreamKey, TokenArray

BLOCK_TOKENS = 32
"""Positions per block: what the CPU plugin's paged attention is built for."""
_MIN_PREFILL_TOKENS = 2
"""What a prefix leaves to compute at least: a single token would run the decode kernel, whose KV differs."""

BlockIndices = npt.NDArray[np.int32]
BlockCopy = tuple[int, int]
"""Source and target block: the positions before a slice that begins in the middle of a replaced block move along."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(slots=True, kw_only=True, eq=False)
class BlockTable:
    """The blocks of one stream, in order of position, and how many positions of them are filled. Equal only to itself, and a table whose
    blocks change is another one."""

    blocks: BlockIndices  # [num_blocks_for(num_reserved)]
    num_reserved: int
    length: int = field(default=0)
    prompt: TokenArray = field(default_factory=lambda: NO_TOKENS)  # empty when its blocks are not to be named
    names: Sequence[bytes] = ()
    """Of the prompt's full blocks."""
    num_prefilled: int = 0
    """Leading positions that hold what a prefill of `prompt` writes."""
    num_maybe_named: int = 0
    """Blocks from here on have no name."""
    is_settled: bool = True
    """False until the first slice of a stream that was opened on shared blocks."""

    def advance(self, start: int, num_tokens: int) -> None:
        """Apply the one step rule: forget what lies beyond `start`, then hold `num_tokens` more."""
        assert 0 <= start <= self.length, f"slice starts at {start}, the stream holds {self.length}"
        assert num_tokens > 0, "empty slice"
        assert start + num_tokens <= self.num_reserved, f"slice ends at {start + num_tokens}, {self.num_reserved} are reserved"
        self.length = start + num_tokens
        if start < self.num_prefilled:
            self.num_prefilled = start


class BlockPool:
    """Allocator of a fixed number of blocks to streams."""

    def __init__(self, *, num_blocks: int, block_bytes: int) -> None:
        """`block_bytes` is what a block costs over all layers of the stage; it only goes into messages."""
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first, and freed blocks, still in cache, go next
        self._shared = SharedBlocks()
        self._tables: dict[StreamKey, BlockTable] = {}

    @property
    def num_tokens(self) -> int:
        return self._num_blocks * BLOCK_TOKENS

    @property
    def free_tokens(self) -> int:
        """Positions that a new stream may have, those of idle blocks included."""
        return self._num_free * BLOCK_TOKENS

    @property
    def used_tokens(self) -> int:
        """Positions in tables, shared ones counted once."""
        return (self._num_blocks - len(self._free) - self._shared.num_idle) * BLOCK_TOKENS

    @property
    def cached_tokens(self) -> int:
        """Positions of prompts that no stream uses, kept for the next one that does."""
        return self._shared.num_idle * BLOCK_TOKENS

    @property
    def _num_free(self) -> int:
        return len(self._free) + self._shared.num_idle - self._shared.debt

    def table(self, key: StreamKey) -> BlockTable:
        """The table of an open stream; an unknown stream is our own bug."""
        return self._tables[key]

    def take(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS) -> int:
        """Set aside blocks for `num_tokens` positions of a new stream.

        Args:
            key: the stream.
            num_tokens: positions of prompt and output.
            prompt: what it will prefill first; empty to share nothing.

        Returns:
            How many leading positions of the prompt are there already: full blocks, and two tokens at least are left to compute.

        Raises:
            CapacityError: so many are not free; the message has needed, free and total positions and MiB. Nothing was taken.
        """
        assert key not in self._tables, f"{key} is open already"
        assert num_tokens > 0, "a stream of no positions"
        assert len(prompt) <= num_tokens, "a prompt beyond the reservation"
        needed = num_blocks_for(num_tokens)
        if needed > self._num_free:
            raise CapacityError(
                f"a stream of {num_tokens} positions needs {self._size(needed)} of KV; {self._size(self._num_free)} are free of"
                f" {self._size(self._num_blocks)}: wait for other streams to end, ask for fewer tokens, or raise --kv-memory"
            )
        names = name_blocks(prompt, BLOCK_TOKENS)
        found = self._shared.attach(names[: max(0, len(prompt) - _MIN_PREFILL_TOKENS) // BLOCK_TOKENS])
        num_cached = len(found) * BLOCK_TOKENS
        self._tables[key] = BlockTable(
            blocks=np.array([*found, *(self._take_block() for _ in range(needed - len(found)))], dtype=np.int32),
            num_reserved=num_tokens,
            length=num_cached,
            prompt=prompt,
            names=names,
            num_prefilled=num_cached,
            num_maybe_named=len(found),
            is_settled=not found,
        )
        return num_cached

    def begin_write(self, key: StreamKey, start: int, num_tokens: int) -> Sequence[BlockCopy]:
        """Apply the one step rule to a slice that is about to be written, and put fresh blocks where it would write named ones.

        Returns:
            What has to be copied before the slice is computed; nearly always nothing.

        Raises:
            CapacityError: the stream goes back, after its first slice, into blocks that others use by now, and no block is free.
        """
        table = self._tables[key]
        num_kept = start // BLOCK_TOKENS
        if table.is_settled and num_kept >= table.num_maybe_named:  # every decode step
            table.advance(start, num_tokens)
            return ()
        copies = self._replace_named(key, table, start)
        table = self._tables[key]
        if not table.is_settled:
            for block in table.blocks[: table.num_maybe_named].tolist():
                self._shared.settle(block)
            table.is_settled = True
        table.advance(start, num_tokens)
        return copies

    def _replace_named(self, key: StreamKey, table: BlockTable, start: int) -> Sequence[BlockCopy]:
        num_kept = start // BLOCK_TOKENS
        named = [idx for idx in range(num_kept, table.num_maybe_named) if int(table.blocks[idx]) in self._shared]
        num_needed = sum(self._shared.has_other_users(int(table.blocks[idx])) for idx in named)
        if table.is_settled and num_needed > self._num_free:
            raise CapacityError(
                f"positions from {start} on are shared with other streams, writing them again needs {self._size(num_needed)} of KV;"
                f" {self._size(self._num_free)} are free of {self._size(self._num_blocks)}: open the stream anew"
            )
        table.num_maybe_named = min(table.num_maybe_named, num_kept)
        if not named:
            return ()
        blocks = table.blocks.copy()
        for idx in named:
            self._shared.detach(int(table.blocks[idx]), is_settled=table.is_settled)
            blocks[idx] = self._take_block()
        self._tables[key] = replace(table, blocks=blocks)
        is_inside = start % BLOCK_TOKENS and named[0] == num_kept
        return ((int(table.blocks[num_kept]), int(blocks[num_kept])),) if is_inside else ()

    def wrote_prompt(self, key: StreamKey, start: int, tokens: TokenArray) -> None:
        """A PREFILL slice was computed: name the blocks that it completed, so that other streams find them."""
        table = self._tables[key]
        end = start + len(tokens)
        if start != table.num_prefilled or len(tokens) < _MIN_PREFILL_TOKENS or not np.array_equal(table.prompt[start:end], tokens):
            return  # not the prompt, behind positions that are not, or a token alone, which ran the decode kernel
        table.num_prefilled = end
        for idx in range(start // BLOCK_TOKENS, end // BLOCK_TOKENS):
            self._shared.register(int(table.blocks[idx]), table.names[idx])
            table.num_maybe_named = idx + 1

    def release(self, key: StreamKey) -> None:
        """Free a stream's blocks; an unknown stream has none."""
        table = self._tables.pop(key, None)
        if table is None:
            return
        for block in table.blocks[::-1].tolist():  # from the end: a text is of use only with all that is before it
            if block in self._shared:
                self._shared.detach(block, is_settled=table.is_settled)
            else:
                self._free.append(block)

    def _take_block(self) -> int:
        return self._free.pop() if self._free else self._shared.give_up()

    def _size(self, num_blocks: int) -> str:
        return f"{num_blocks * BLOCK_TOKENS} positions ({num_blocks * self._block_bytes / 2**20:.1f} MiB)"
