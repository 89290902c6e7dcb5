"""KV blocks and block tables: who owns which block of a stage's pool. Pure: it counts, it holds no memory.

A stream's blocks are set aside whole when it is opened, so that a stream once admitted never fails for want of KV, and a rewind gives
nothing back: what is behind the rewound length is simply written again.

Invariants:
- no block is in two tables, nor both in a table and free;
- free blocks + blocks of open tables = all blocks;
- a table covers its reservation from open to release, whatever its length.

A prefix index will share blocks between tables. Its place is here: `take` and `release` become the two ends of a reference count, and a
shared block carries the `SliceKind` that filled it, since the two kinds write KV that differs in its last bits (FACTS: two kinds of KV).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.errors import CapacityError
from workers.runners.runner import StreamKey

BLOCK_TOKENS = 32
"""Positions per block: what the CPU plugin's paged attention is built for."""

BlockIndices = npt.NDArray[np.int32]


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(slots=True, kw_only=True, eq=False)
class BlockTable:
    """The blocks of one stream, in order of position, and how many positions of them are filled. Equal only to itself."""

    blocks: BlockIndices  # [num_blocks_for(num_reserved)]
    num_reserved: int
    length: int = field(default=0)

    def advance(self, start: int, num_tokens: int) -> None:
        """Apply the one step rule: forget what lies beyond `start`, then hold `num_tokens` more."""
        assert 0 <= start <= self.length, f"slice starts at {start}, the stream holds {self.length}"
        assert num_tokens > 0, "empty slice"
        assert start + num_tokens <= self.num_reserved, f"slice ends at {start + num_tokens}, {self.num_reserved} are reserved"
        self.length = start + num_tokens


class BlockPool:
    """Allocator of a fixed number of blocks to streams."""

    def __init__(self, *, num_blocks: int, block_bytes: int) -> None:
        """`block_bytes` is what a block costs over all layers of the stage; it only goes into messages."""
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first, and freed blocks, still in cache, go next
        self._tables: dict[StreamKey, BlockTable] = {}

    @property
    def num_tokens(self) -> int:
        return self._num_blocks * BLOCK_TOKENS

    @property
    def free_tokens(self) -> int:
        return len(self._free) * BLOCK_TOKENS

    @property
    def used_tokens(self) -> int:
        return self.num_tokens - self.free_tokens

    def table(self, key: StreamKey) -> BlockTable:
        """The table of an open stream; an unknown stream is our own bug."""
        return self._tables[key]

    def take(self, key: StreamKey, num_tokens: int) -> None:
        """Set aside blocks for `num_tokens` positions of a new stream.

        Raises:
            CapacityError: so many are not free; the message has needed, free and total positions and MiB. Nothing was taken.
        """
        assert key not in self._tables, f"{key} is open already"
        assert num_tokens > 0, "a stream of no positions"
        needed = num_blocks_for(num_tokens)
        if needed > len(self._free):
            raise CapacityError(
                f"a stream of {num_tokens} positions needs {self._size(needed)} of KV; {self._size(len(self._free))} are free of"
                f" {self._size(self._num_blocks)}: wait for other streams to end, ask for fewer tokens, or raise --kv-memory"
            )
        blocks = np.array([self._free.pop() for _ in range(needed)], dtype=np.int32)
        self._tables[key] = BlockTable(blocks=blocks, num_reserved=num_tokens)

    def release(self, key: StreamKey) -> None:
        """Free a stream's blocks; an unknown stream has none."""
        table = self._tables.pop(key, None)
        if table is not None:
            self._free.extend(table.blocks[::-1].tolist())

    def _size(self, num_blocks: int) -> str:
        return f"{num_blocks * BLOCK_TOKENS} positions ({num_blocks * self._block_bytes / 2**20:.1f} MiB)"
