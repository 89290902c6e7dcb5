"""What is kept of prompts, what is found of it, and what goes first."""

from __future__ import annotations

import numpy as np

from workers.runners.captures import MIN_SHARED_TOKENS, Capture, Captures
from workers.runners.runner import TokenArray

BYTES_PER_TOKEN = 4


def text(num_tokens: int, token: int = 1, *, parts_at: int | None = None) -> TokenArray:
    tokens = np.full(num_tokens, token, dtype=np.int32)
    if parts_at is not None:
        tokens[parts_at:] = 99
    return tokens


def capture(prompt: TokenArray) -> Capture:
    return Capture(prompt=prompt, states={"k": np.zeros((1, 1, len(prompt), 1), dtype=np.float32)})


def test_the_capture_that_shares_most_is_found_with_what_it_shares() -> None:
    captures = Captures()
    assert captures.find(text(100)) is None
    short, long, other = capture(text(50, parts_at=40)), capture(text(80)), capture(text(90, token=2))
    for each in (short, long, other):
        captures.add(each)
    assert captures.find(text(200)) == (long, 80)
    assert captures.find(text(200, parts_at=40)) == (short, 50)
    assert captures.find(text(60)) == (long, 60)
    assert captures.find(text(200, token=2, parts_at=33)) == (other, 33)
    assert captures.find(text(200, token=2, parts_at=MIN_SHARED_TOKENS - 1)) is None
    assert captures.find(text(0)) is None


def test_a_prompt_that_begins_another_is_not_kept_twice() -> None:
    captures = Captures()
    captures.add(capture(text(50)))
    assert not captures.wants(text(50))
    assert not captures.wants(text(40))
    assert not captures.wants(text(MIN_SHARED_TOKENS - 1, token=3))
    assert captures.wants(text(51))
    captures.add(capture(text(120)))
    assert captures.num_bytes == 120 * BYTES_PER_TOKEN
    captures.add(capture(text(60, token=2)))
    assert captures.num_bytes == 180 * BYTES_PER_TOKEN


def test_the_least_recently_used_goes_first() -> None:
    captures = Captures()
    for token in (1, 2, 3):
        captures.add(capture(text(100, token)))
    assert captures.find(text(50, 1)) is not None
    captures.shrink(250 * BYTES_PER_TOKEN)
    assert captures.find(text(50, 2)) is None
    assert captures.num_bytes == 200 * BYTES_PER_TOKEN
    captures.shrink(100 * BYTES_PER_TOKEN)
    assert captures.find(text(50, 3)) is None
    assert captures.find(text(50, 1)) is not None
    captures.shrink(-1)
    assert captures.num_bytes == 0
