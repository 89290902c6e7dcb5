"""KV blocks and block tables: who owns which block of a stage's pool. Pure: it counts, it holds no memory.

Blocks are promised to a stream when it is opened, so that a stream once admitted never fails for want of KV, and taken as it grows. A
rewind gives nothing back: what is behind the rewound length is simply written again. With a prefix cache a stream may begin on blocks
that others filled with the same prompt (`prefix`). It is admitted as if it could use none of them, since its first slice may start before
them; what it does share comes free with that slice.

Where every layer of the stage has a window, a stream gives blocks back that the widest window has passed, and is promised no more than it
can hold at once. Attention finds positions by their place in the table, so the places stay, and lead to a block of the stream's own: the
kernel reads what is outside the window and gives it no weight (docs/decisions/0008).

Invariants:
- every block is free, or named and idle, or in at least one table; a block without a name is in at most one;
- free blocks + idle blocks >= debt + what is promised and not taken, so that every slice finds the blocks it needs;
- a table has blocks at the places [num_passed, num_taken), and they hold all positions that a slice at its length can see;
- a named block is never written: a slice that would is given a fresh one in its place;
- a block with an exact name holds what a prefill of its text writes: `wrote` is called after the inference, and compares the tokens;
- a block with the other kind of name holds that text, from positions that were behind the start of a later slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.errors import CapacityError, StateLostError
from langchain_pshard.core.kv import BLOCK_TOKENS, MAX_SLICE_TOKENS, max_stream_blocks, num_blocks_for
from langchain_pshard.core.messages import SliceKind
from workers.prefix import INEXACT, SharedBlocks, name_blocks
from workers.runners.runner import NO_TOKENS, StreamKey, TokenArray

_MIN_PREFILL_TOKENS = 2
"""What a prefix leaves to compute at least: a single token would run the decode kernel, whose KV differs."""

BlockIndices = npt.NDArray[np.int32]
BlockCopy = tuple[int, int]
"""Source and target block: the positions before a slice that begins in the middle of a replaced block move along."""


@dataclass(slots=True, kw_only=True, eq=False)
class BlockTable:
    """The blocks of one stream, in order of position, and how many positions of them are filled. Equal only to itself; while it grows it
    stays the same, but one that lets blocks go for a rewind is another."""

    blocks: BlockIndices  # [num_blocks_for(num_reserved)]
    num_reserved: int
    max_blocks: int
    """Most that it holds at once, the first slice's moment apart: what it was admitted with."""
    window: int | None = None
    """The widest of the layers' windows; None when a layer sees everything."""
    num_passed: int = 0
    """Leading places whose blocks were given back."""
    num_taken: int = 0
    """Places up to here have a block."""
    length: int = field(default=0)
    prompt: TokenArray = field(default_factory=lambda: NO_TOKENS)  # empty when its blocks are not to be named
    names: Sequence[bytes] = ()
    """Exact ones, of the prompt's full blocks."""
    text: TokenArray | None = None  # [num_reserved], what it holds; None when generated text is not to be named
    text_names: list[bytes] = field(default_factory=list)
    """Inexact ones, of the leading full blocks that a slice has begun behind."""
    num_known: int = 0
    """Leading positions that were computed, and whose `text` is right."""
    num_prefilled: int = 0
    """Leading positions that hold what a prefill of `prompt` writes."""
    num_maybe_named: int = 0
    """Places from here on have blocks without a name."""
    is_tentative: bool = False
    """It may still need a fresh block for each one that it shares: until the first slice, and always when its window passes blocks."""

    @property
    def num_promised(self) -> int:
        """Blocks that it may still take beyond those it has."""
        return max(0, self.max_blocks - (self.num_taken - self.num_passed))

    @property
    def passes_blocks(self) -> bool:
        """Whether it ever has to give blocks back."""
        return self.max_blocks < len(self.blocks)

    @property
    def min_start(self) -> int:
        """The earliest position that a slice may rewind to (and 0): its window is still held."""
        return self.num_passed * BLOCK_TOKENS + (self.window or 1) - 1 if self.num_passed else 0

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

    def __init__(self, *, num_blocks: int, block_bytes: int, window: int | None = None, max_slice_tokens: int = MAX_SLICE_TOKENS) -> None:
        """An empty pool.

        Args:
            num_blocks: in all.
            block_bytes: what a block costs over all layers of the stage; it only goes into messages.
            window: positions that a token sees in the layer that sees most, itself included; None when one sees all.
            max_slice_tokens: of one slice, the longest.
        """
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._window = window
        self._max_blocks = max_stream_blocks(window, max_slice_tokens)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first, and freed blocks, still in cache, go next
        self._num_promised = 0  # over all tables
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
    def max_stream_tokens(self) -> int | None:
        """Most positions that are set aside for one stream, however long it is; None: as many as it has."""
        return None if self._max_blocks is None else self._max_blocks * BLOCK_TOKENS

    @property
    def used_tokens(self) -> int:
        """Positions in tables, shared ones counted once, and those promised to streams."""
        return (self._num_blocks - len(self._free) - self._shared.num_idle + self._num_promised) * BLOCK_TOKENS

    @property
    def cached_tokens(self) -> int:
        """Positions of prompts that no stream uses, kept for the next one that does."""
        return self._shared.num_idle * BLOCK_TOKENS

    @property
    def _num_free(self) -> int:
        return len(self._free) + self._shared.num_idle - self._shared.debt - self._num_promised

    def table(self, key: StreamKey) -> BlockTable:
        """The table of an open stream; an unknown stream is our own bug."""
        return self._tables[key]

    def take(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS, *, shares_generated: bool = False) -> int:
        """Set aside blocks for `num_tokens` positions of a new stream.

        Args:
            key: the stream.
            num_tokens: positions of prompt and output.
            prompt: what it will prefill first; empty to share nothing.
            shares_generated: whether it also finds, and leaves, blocks of generated text.

        Returns:
            How many leading positions of the prompt are there already: full blocks, and two tokens at least are left to compute.

        Raises:
            CapacityError: so many are not free; the message has needed, free and total positions and MiB. Nothing was taken.
        """
        assert key not in self._tables, f"{key} is open already"
        assert num_tokens > 0, "a stream of no positions"
        assert len(prompt) <= num_tokens, "a prompt beyond the reservation"
        num_places = num_blocks_for(num_tokens)
        needed = num_places if self._max_blocks is None else min(num_places, self._max_blocks)
        if needed > self._num_free:
            raise CapacityError(
                f"a stream of {num_tokens} positions needs {self._size(needed)} of KV; {self._size(self._num_free)} are free of"
                f" {self._size(self._num_blocks)}: wait for other streams to end, ask for fewer tokens, or raise --kv-memory"
            )
        names = name_blocks(prompt, BLOCK_TOKENS)
        kinds = [names, name_blocks(prompt, BLOCK_TOKENS, INEXACT)] if shares_generated else [names]
        limit = min(max(0, len(prompt) - _MIN_PREFILL_TOKENS) // BLOCK_TOKENS, self._num_free)
        found = self._shared.attach(*(kind[:limit] for kind in kinds))
        num_cached = len(found) * BLOCK_TOKENS
        num_exact = len(list(itertools.takewhile(lambda pair: self._shared.has_name(*pair), zip(found, names, strict=False))))
        blocks = np.zeros(num_places, dtype=np.int32)
        blocks[: len(found)] = found
        table = self._tables[key] = BlockTable(
            blocks=blocks,
            num_reserved=num_tokens,
            max_blocks=needed,
            window=self._window,
            num_taken=len(found),
            length=num_cached,
            prompt=prompt,
            names=names,
            text=_begun_with(prompt[:num_cached], num_tokens) if shares_generated else None,
            text_names=kinds[-1][: len(found)] if shares_generated else [],
            num_known=num_cached,
            num_prefilled=num_exact * BLOCK_TOKENS,
            num_maybe_named=len(found),
            is_tentative=bool(found) or needed < num_places,
        )
        self._num_promised += table.num_promised
        return num_cached

    def begin_write(self, key: StreamKey, start: int, num_tokens: int) -> Sequence[BlockCopy]:
        """Apply the one step rule to a slice that is about to be written: give it the blocks it needs, fresh ones where it would write
        named ones, and take back what every layer's window has passed.

        Returns:
            What has to be copied before the slice is computed; nearly always nothing.

        Raises:
            StateLostError: the stream goes back to where its window has passed.
            CapacityError: the stream goes back, after its first slice, into blocks that others use by now, and no block is free.
        """
        table = self._tables[key]
        if table.text is not None:
            table.num_known = min(table.num_known, start)
            self._name_text(table)
        end = num_blocks_for(start + num_tokens)
        copies: Sequence[BlockCopy] = ()
        # A first slice never passes by here, since it needs blocks or writes named ones; nearly every decode step does.
        if end > table.num_taken or start // BLOCK_TOKENS < table.num_maybe_named or start < table.min_start:
            before = table.num_promised
            if start < table.min_start:
                self._begin_anew(key, start)
            elif start // BLOCK_TOKENS < table.num_maybe_named:
                copies = self._leave_named(key, start)
            table = self._tables[key]
            self._grow(table, start, end)
            self._settle(table)
            self._num_promised += table.num_promised - before
        table.advance(start, num_tokens)
        return copies

    def _begin_anew(self, key: StreamKey, start: int) -> None:
        """A slice at 0 needs nothing of what was passed."""
        table = self._tables[key]
        if start > 0:
            raise StateLostError(
                f"the stream goes back to position {start}; its KV before position {table.num_passed * BLOCK_TOKENS} was given up, as"
                f" every layer's window of at most {self._window} had passed it: send the stream again from 0"
            )
        self._give_back(table, table.num_passed, table.num_taken)
        self._tables[key] = replace(table, blocks=np.zeros_like(table.blocks), num_passed=0, num_taken=0, num_maybe_named=0)

    def _leave_named(self, key: StreamKey, start: int) -> Sequence[BlockCopy]:
        """Let go of the blocks from `start` on, of which some may have a name; a copy of the positions before it may have to be made."""
        table = self._tables[key]
        num_kept = start // BLOCK_TOKENS
        here = int(table.blocks[num_kept])
        is_inside = start % BLOCK_TOKENS > 0
        num_taken = num_kept + 1 if is_inside and here not in self._shared else num_kept
        if not table.is_tentative:
            left = [int(block) for block in table.blocks[num_taken : table.num_taken]]
            num_needed = sum(block in self._shared and self._shared.has_other_users(block) for block in left)
            if num_needed > self._num_free:
                raise CapacityError(
                    f"positions from {start} on are shared with other streams, writing them again needs {self._size(num_needed)} of KV;"
                    f" {self._size(self._num_free)} are free of {self._size(self._num_blocks)}: open the stream anew"
                )
        self._give_back(table, num_taken, table.num_taken)
        # The block that is copied from may be taken at once, and even be the copy: it is read before anything is computed.
        copied = [self._take_block()] if is_inside and num_taken == num_kept else []
        blocks = table.blocks.copy()
        blocks[num_taken : num_taken + len(copied)] = copied
        self._tables[key] = replace(
            table, blocks=blocks, num_taken=num_taken + len(copied), num_maybe_named=min(table.num_maybe_named, num_kept)
        )
        return [(here, block) for block in copied]

    def _grow(self, table: BlockTable, start: int, end: int) -> None:
        """Blocks up to the place `end`; those that the window of a slice at `start` has passed go first, if it holds too many."""
        if end <= table.num_taken:
            return
        num_passed = max(table.num_passed, end - table.max_blocks)
        assert num_passed == table.num_passed or num_passed * BLOCK_TOKENS <= start - (self._window or 0) + 1, "a slice too long"
        if num_passed > table.num_passed:
            self._give_back(table, table.num_passed, num_passed)
            table.num_passed = num_passed
            self._touch_passed(table)
        table.blocks[table.num_taken : end] = [self._take_block() for _ in range(end - table.num_taken)]
        table.num_taken = end
        table.blocks[:num_passed] = table.blocks[num_passed]

    def _settle(self, table: BlockTable) -> None:
        if table.is_tentative and not table.passes_blocks:
            for block in table.blocks[: table.num_maybe_named].tolist():
                self._shared.settle(block)
            table.is_tentative = False

    def wrote(self, key: StreamKey, start: int, tokens: TokenArray, kind: SliceKind) -> None:
        """A slice was computed: name the blocks of the prompt that it completed, so that other streams find them."""
        table = self._tables[key]
        end = start + len(tokens)
        if table.text is not None and start == table.num_known:
            table.text[start:end] = tokens
            table.num_known = end
        if kind is not SliceKind.PREFILL:
            return
        if start != table.num_prefilled or len(tokens) < _MIN_PREFILL_TOKENS or not np.array_equal(table.prompt[start:end], tokens):
            return  # not the prompt, behind positions that are not, or a token alone, which ran the decode kernel
        table.num_prefilled = end
        for idx in range(start // BLOCK_TOKENS, end // BLOCK_TOKENS):
            self._shared.register(int(table.blocks[idx]), table.names[idx], is_settled=not table.is_tentative)
            table.num_maybe_named = idx + 1

    def _name_text(self, table: BlockTable) -> None:
        """Name the full blocks of what is known, generated text and what stands behind it; forget names beyond.

        Not when they are written: drafts that are rejected would leave names that nobody looks for, and be copied on a rewind.
        """
        assert table.text is not None
        num_full = table.num_known // BLOCK_TOKENS
        del table.text_names[num_full:]
        for idx in range(len(table.text_names), num_full):
            tokens = table.text[idx * BLOCK_TOKENS : (idx + 1) * BLOCK_TOKENS]
            table.text_names += name_blocks(tokens, BLOCK_TOKENS, table.text_names[-1] if idx else INEXACT)
            block = int(table.blocks[idx])
            if idx >= table.num_passed and block not in self._shared:
                self._shared.register(block, table.text_names[idx], is_settled=not table.is_tentative)
                table.num_maybe_named = max(table.num_maybe_named, idx + 1)

    def release(self, key: StreamKey) -> None:
        """Free a stream's blocks; an unknown stream has none."""
        table = self._tables.pop(key, None)
        if table is None:
            return
        self._num_promised -= table.num_promised
        if table.text is not None:
            self._name_text(table)
        self._give_back(table, table.num_passed, table.num_taken)
        self._touch_passed(table)

    def _give_back(self, table: BlockTable, begin: int, end: int) -> None:
        for block in table.blocks[begin:end][::-1].tolist():  # from the end: a text is of use only with all that is before it
            if block in self._shared:
                self._shared.detach(block, is_settled=not table.is_tentative)
            else:
                self._free.append(block)

    def _touch_passed(self, table: BlockTable) -> None:
        """What a prompt's window has passed was used as long as the rest: it must not be the first to go."""
        if table.num_passed:
            self._shared.touch(table.text_names[: table.num_passed])
            self._shared.touch(table.names[: table.num_passed])

    def _take_block(self) -> int:
        return self._free.pop() if self._free else self._shared.give_up()

    def _size(self, num_blocks: int) -> str:
        return f"{num_blocks * BLOCK_TOKENS} positions ({num_blocks * self._block_bytes / 2**20:.1f} MiB)"


def _begun_with(tokens: TokenArray, num_tokens: int) -> TokenArray:
    text = np.zeros(num_tokens, dtype=np.int32)
    text[: len(tokens)] = tokens
    return text
