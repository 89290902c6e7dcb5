"""Blocks of prompt KV that can be found again by the text they hold, and shared. Pure.

A block is named by a hash over its own 32 tokens and the name of the block before it, so that a name stands for the whole text up to the
block's end: KV depends on all of it. A cold prefill of a text gives the same bits however it is chunked; rows do not (FACTS: two kinds of
KV). So there are two kinds of names: a block that PREFILL slices wrote, behind nothing but such blocks, has an exact name, and is what
everybody may find; one that holds generated text, or stands behind such a block, has another name for the same text, and only streams that
ask for it look there.

A shared block is never written. Users are counted in two kinds: a stream that was opened on shared blocks is a *tentative* user until its
first slice, because the client starts where all stages can, which may be earlier than what this stage found; it may then have to put fresh
blocks in the place of shared ones. A stream that gives blocks back when its window has passed them stays tentative, since it takes a fresh
one for each. `debt` is how many fresh blocks the tentative users may still ask for.

Invariants:
- names and blocks are one to one;
- a block without users is idle, and only idle ones are given up, the least recently used first;
- debt is the sum over blocks of: tentative users, less one when there is no settled user (who leaves last finds the block idle).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.runners.runner import TokenArray

_HASH_BYTES = 16


EXACT = b""
"""What the names of blocks that PREFILL slices wrote begin with."""
INEXACT = b"rows"
"""And those of blocks that depend on generated text."""


def name_blocks(text: TokenArray, block_tokens: int, before: bytes = EXACT) -> list[bytes]:
    """Names of the full blocks of a text, in order; `before` is the name of the block before it, or one of the two beginnings.

    blake2b, because another client's text must not be able to collide with ours on purpose.
    """
    data = np.ascontiguousarray(text, dtype="<i4").tobytes()
    names: list[bytes] = []
    name = before
    for end in range(4 * block_tokens, len(data) + 1, 4 * block_tokens):
        name = hashlib.blake2b(name + data[end - 4 * block_tokens : end], digest_size=_HASH_BYTES).digest()
        names.append(name)
    return names


@dataclass(slots=True)
class _Users:
    name: bytes
    num_tentative: int = 0
    num_settled: int = 0

    @property
    def count(self) -> int:
        return self.num_tentative + self.num_settled

    @property
    def debt(self) -> int:
        return self.num_tentative if self.num_settled else max(0, self.num_tentative - 1)


class SharedBlocks:
    """The blocks of one pool that have a name."""

    def __init__(self) -> None:
        self.debt = 0
        self._by_name: dict[bytes, int] = {}
        self._users: dict[int, _Users] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __contains__(self, block: int) -> bool:
        return block in self._users

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def has_other_users(self, block: int) -> bool:
        """Whether more than one stream uses the block."""
        return self._users[block].count > 1

    def attach(self, *names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of a text that is known by these names, with one tentative user more each.

        Args:
            names: the names of the text's blocks; one sequence for each kind, the preferred one first.
        """
        blocks: list[int] = []
        for kinds in zip(*names, strict=True):
            block = next((self._by_name[name] for name in kinds if name in self._by_name), None)
            if block is None:
                break
            self._idle.pop(block, None)
            self._change(block, tentative=1)
            blocks.append(block)
        return blocks

    def has_name(self, block: int, name: bytes) -> bool:
        """Whether this is the block of that name."""
        return self._by_name.get(name) == block

    def settle(self, block: int) -> None:
        """A tentative user stays for good."""
        self._change(block, tentative=-1, settled=1)

    def detach(self, block: int, *, is_settled: bool) -> None:
        """A user leaves; a block nobody uses keeps its text until it is given up."""
        self._change(block, settled=-1) if is_settled else self._change(block, tentative=-1)
        if not self._users[block].count:
            self._idle[block] = None

    def register(self, block: int, name: bytes, *, is_settled: bool) -> None:
        """A stream has filled its own block: others may use it from now on. Nothing happens when another block holds that text."""
        if name not in self._by_name:
            self._by_name[name] = block
            self._users[block] = _Users(name, num_tentative=int(not is_settled), num_settled=int(is_settled))

    def touch(self, names: Sequence[bytes]) -> None:
        """The idle ones among these, the blocks of a text from its beginning, count as used just now, the first one last."""
        for name in reversed(names):
            block = self._by_name.get(name)
            if block is not None and block in self._idle:
                self._idle.move_to_end(block)

    def give_up(self) -> int:
        """The idle block that was used least recently, nameless from now on; there has to be one."""
        block, _ = self._idle.popitem(last=False)
        del self._by_name[self._users.pop(block).name]
        return block

    def _change(self, block: int, *, tentative: int = 0, settled: int = 0) -> None:
        users = self._users[block]
        before = users.debt
        users.num_tentative += tentative
        users.num_settled += settled
        assert users.num_tentative >= 0, f"block {block} lost a user it did not have"
        assert users.num_settled >= 0, f"block {block} lost a user it did not have"
        self.debt += users.debt - before
