"""Text pieces: joined they are the whole, no half characters, stop strings never show, however the tokens are grouped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from langchain_pshard.output import TextStream
from langchain_pshard.tokenizer import Tokenizer
from tests.support.texts import cut_at_stop
from tests.support.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZERS = {"byte-level": byte_level_tokenizer(), "byte-fallback": byte_fallback_tokenizer()}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "👩‍👩‍👧‍👦",
                "🇩🇪",
                "é",
                "e\u0301",
                "日本語",
                "한국어",
                "\ufffd",
                " ",
                "\n",
                "\n\n",
                "STOP",
                "ST",
                "STO",
                "END",
                "</s",
                "the end",
                "ab",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=20,
).map(lambda parts: "".join(parts).replace("▁", "_"))  # that character is how byte-fallback spells a space
STOPS = st.lists(
    st.one_of(st.sampled_from(["STOP", "STOPS", "TO", "END", "日本", "👩‍👧", "\n\n", "a", "bab"]), st.text(min_size=1, max_size=3)),
    max_size=3,
)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """Push `ids` in groups whose sizes are `sizes` in turn."""
    stream = TextStream(tokenizer, stop)
    pieces, position, turn = [], 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.push(ids[position : position + size]))
        position, turn = position + size, turn + 1
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_joined_pieces_are_the_whole_text(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assume(not any(token in text for token in tokenizer.special_tokens))  # these, spelled out, are encoded as what never shows
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, _ = pieces_of(tokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stop=STOPS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_stop_strings_never_show(name: str, text: str, stop: list[str], sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    pieces, stream = pieces_of(tokenizer, tokenizer.encode(text, add_special_tokens=False), sizes, stop)
    assert "".join(pieces) == cut_at_stop(text, stop)
    assert stream.is_stopped == any(one in text for one in stop)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_token_ids_at_all(name: str, data: st.DataObject) -> None:
    """A model may sample nonsense: broken UTF-8, special tokens in the middle."""
    tokenizer = TOKENIZERS[name]
    byte_ids = tokenizer.encode("\u00ff日👩", add_special_tokens=False)
    ids = data.draw(st.lists(st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(byte_ids)), max_size=60))
    pieces, _ = pieces_of(tokenizer, ids, data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_shows_when_it_is_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("👩!", add_special_tokens=False)
    assert [stream.push([token_id]) for token_id in ids] == ["", "", "", "👩", "!"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = tokenizer.encode("ok 日語", add_special_tokens=False)[:-1]
    pieces, _ = pieces_of(tokenizer, ids, [1])
    assert "".join(pieces) == "ok 日\ufffd"
    assert pieces[-1] == "\ufffd"


def test_possible_stop_is_held_and_released() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer, ["STOP"])
    assert stream.push(tokenizer.encode("a ST", add_special_tokens=False)) == "a "
    assert stream.push(tokenizer.encode("AY", add_special_tokens=False)) == "STAY"
    assert stream.push(tokenizer.encode("STO", add_special_tokens=False)) == ""
    assert stream.finish() == "STO"
    assert stream.finish() == ""


def test_first_complete_stop_wins_inside_one_push() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer, ["later", "first", "rst"])
    assert stream.push(tokenizer.encode("the first, later", add_special_tokens=False)) == "the "
    assert stream.is_stopped
    assert stream.push(tokenizer.encode("more", add_special_tokens=False)) == ""
    assert stream.finish() == ""


def test_special_and_end_tokens_never_show() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("<s>Hi<|im_end|> you</s>", add_special_tokens=False)
    assert ids[0] == tokenizer.special_tokens["<s>"]
    pieces, _ = pieces_of(tokenizer, ids, [1])
    assert "".join(pieces) == "Hi you"


def test_window_is_bounded() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer)
    broken = tokenizer.encode("é", add_special_tokens=False)[1]  # a lone continuation byte, which never ends a character
    for _ in range(500):
        stream.push([broken])
        assert len(stream._decoder._window) <= 24
    assert stream.finish() == "\ufffd"
