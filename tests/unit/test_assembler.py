"""Tokens to chunks: what an answer is does not depend on how many tokens came at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from langchain_pshard.output import TextStream
from langchain_pshard.pipeline.account import Account
from langchain_pshard.pipeline.assembler import Assembler, joined
from langchain_pshard.pipeline.generation import FinishReason, Generation
from langchain_pshard.pipeline.stream import Delivery
from tests.support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
IDS = TOKENIZER.encode("one two\nUser: three four five", add_special_tokens=False)


def assembled(sizes: Sequence[int], stop: Sequence[str]) -> Generation:
    """The generation of `IDS` delivered in groups of these sizes, in turn."""
    assembler = Assembler(TextStream(TOKENIZER, stop))
    account = Account(num_prompt_tokens=3, submitted_at=0.0)
    chunks = []
    done = 0
    while done < len(IDS):
        group = tuple(IDS[done : done + sizes[len(chunks) % len(sizes)]])
        done += len(group)
        account.generated(len(group), 1.0)
        chunks.append(assembler.chunk(Delivery(group, None, account.stats(), FinishReason.LENGTH if done == len(IDS) else None)))
        if chunks[-1].end is not None:
            break
    return joined(chunks)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_what_rides_behind_a_stop_string_is_neither_told_nor_counted(sizes: list[int]) -> None:
    expected = assembled([1], ["\nUser:"])
    found = assembled(sizes, ["\nUser:"])
    assert found.text == expected.text == "one two"
    assert found.token_ids == expected.token_ids
    assert found.stats.num_generated_tokens == len(found.token_ids) < len(IDS)
    assert found.finish_reason is FinishReason.STOP


def test_without_a_stop_string_every_token_counts() -> None:
    found = assembled([4], ())
    assert found.token_ids == tuple(IDS)
    assert found.stats.num_generated_tokens == len(IDS)
    assert found.finish_reason is FinishReason.LENGTH
