"""Text -> token ids -> text, offline, over the `tokenizers` library alone.

Two rules live here that no tokenizer library keeps by itself.

*User text never becomes a special token.* `encode_prompt` takes a rendered chat template in which text from outside hides its dangerous
places behind placeholder characters, and encodes those places as ordinary text. Nothing is escaped or removed: the model still reads
what the user wrote.

*Decoding is a property of the bytes.* Tokenizers with byte-fallback turn a whole run of byte tokens into replacement characters when any
of it is invalid, so text already shown could change. `decode` reads such runs as UTF-8 with the invalid parts replaced, so that a prefix of
the tokens decodes to a prefix of the text, but for one unfinished character at its end.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from langchain_pshard.core.bundle import TOKENIZER_DIR
from langchain_pshard.core.errors import BundleError, InvalidOptionError


class Tokenizer:
    """The tokenizer of a bundle. Immutable after construction; every method may be called from any thread.

    Attributes:
        chat_template: the model's own jinja template, or None when it has none (a base model).
        special_tokens: special token strings to ids; these are never shown and never come from user text.
        named_tokens: what templates call `bos_token`, `eos_token`, `pad_token`, `unk_token`: name to string, those that exist.
        bos_token_id: begin-of-text token, or None.
        eos_token_ids: every token that ends a generation.
        vocab_size: number of ids, added tokens included.
    """

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        fast.no_truncation()  # files may carry the settings of a training run
        fast.no_padding()
        self._fast = fast
        self._inner: tokenizers.Tokenizer | None = None
        self._inner_lock = threading.Lock()
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        added = fast.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values() if token.special}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self._hidden_ids = frozenset(self.special_tokens.values()) | frozenset(self.eos_token_ids)
        unknown = self._id_of("unk_token")  # stands for characters that no token covers, so text may yield it
        self._guarded_ids = frozenset(token_id for token_id in self.special_tokens.values() if token_id != unknown)
        self._finder = _Finder(self.special_tokens)
        self._harmless: set[str] = set()
        """Short texts that were found to spell nothing special: the words of tool schemas, which come again with every call."""
        self._bytes = _byte_tokens(fast)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read the `tokenizer/` folder of a bundle. Takes a second or two for a vocabulary of 262,144.

        Raises:
            BundleError: a file is missing or is not what its name says.
        """
        path = folder / "tokenizer.json"
        try:
            fast = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}; the tokenizer folder of a bundle holds tokenizer.json") from error
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise BundleError(f"{path} is not a tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        named = {name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _token_text(config.get(name)))}
        return cls(
            fast, chat_template=_read_template(folder, config), named_tokens=named, eos_token_ids=_as_ids(generation.get("eos_token_id"))
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens spelled out in it are recognised: for text the caller composed, not for what a user typed.

        Raises:
            InvalidOptionError: a lone surrogate in it, which no encoding of text has.
        """
        _check_text(text)
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_prompt(self, rendered: str, hidden: Mapping[int, str], *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt in which only the template's own text yields special tokens.

        Args:
            rendered: the prompt, with placeholders.
            hidden: code point of a placeholder -> the piece of user text it stands for, as `str.translate` wants it; see
                `hide_special_tokens`.
            add_special_tokens: add what the model wants around a text (a begin token); False when the template writes it itself.

        Raises:
            InvalidOptionError: as `encode`.
        """
        pieces = list(self._finder.split(rendered))
        restored = [piece.translate(hidden) for piece in pieces] if hidden else pieces
        text = "".join(restored)
        _check_text(text)
        begin = self.encode("", add_special_tokens=add_special_tokens)
        if list(self._finder.split(text)) == restored:  # user text spells no special token: the tokenizer's own way is exact
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            wanted = [*begin, *(self.special_tokens[token] for token in restored[1::2])]
            if sorted(filter(self._guarded_ids.__contains__, ids)) == sorted(wanted):
                return ids  # nor did a normalizer make one of it
        ids = begin
        for index, piece in enumerate(self._without_absorbed_space(restored)):
            ids += [self.special_tokens[piece]] if index % 2 else self._encode_plain(piece)
        return ids

    def hide_special_tokens(self, text: str, placeholder_of: Mapping[str, str]) -> str:
        """`text` with placeholders for whole special tokens in it, and for edges that text around it may complete to one.

        Args:
            text: what a user, a tool or a model wrote.
            placeholder_of: any mapping that makes up a placeholder character for a string on first access.
        """
        if text in self._harmless:
            return text
        shown = self._with_placeholders(text, placeholder_of)
        if shown == text and len(text) <= _REMEMBERED_CHARS and len(self._harmless) < _REMEMBERED:
            self._harmless.add(text)
        return shown

    def _with_placeholders(self, text: str, placeholder_of: Mapping[str, str]) -> str:
        # White space at the ends stays in view, because templates trim it; what it covers may then be the edge.
        inner = text.strip()
        if not inner:
            return text
        start = text.index(inner)
        if self._finder.is_inside(inner):
            return text[:start] + placeholder_of[inner] + text[start + len(inner) :]
        pieces = list(self._finder.split(inner))
        pieces[1::2] = [placeholder_of[piece] for piece in pieces[1::2]]
        head, tail = self._finder.edges(pieces[0], pieces[-1])
        if len(pieces) == 1:
            head = min(head, len(inner) - tail)  # where the two overlap
        if tail:
            pieces[-1] = pieces[-1][:-tail] + placeholder_of[pieces[-1][-tail:]]
        if head:
            pieces[0] = placeholder_of[pieces[0][:head]] + pieces[0][head:]
        return text[:start] + "".join(pieces) + text[start + len(inner) :]

    def decode(self, ids: Sequence[int], *, marks: frozenset[int] = frozenset()) -> str:
        """Text of `ids`, special and end tokens left out but for those in `marks`. Ids outside the vocabulary are left out too."""
        shown = [token_id for token_id in ids if self.is_shown(token_id, marks)]
        if not self._bytes or self._bytes.keys().isdisjoint(shown):
            return self._fast.decode(shown, skip_special_tokens=not marks)
        return self._decode_with_bytes(shown)

    def is_shown(self, token_id: int, marks: frozenset[int] = frozenset()) -> bool:
        """Whether the token can add to the text: neither special nor an end token, or one of `marks`."""
        return token_id not in self._hidden_ids or token_id in marks

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones too; a part of a character shows as a replacement character."""
        return self._fast.decode([token_id], skip_special_tokens=False)

    def marks(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens among `texts`, for `decode`."""
        return frozenset(self.special_tokens[text] for text in texts if text in self.special_tokens)

    def _decode_with_bytes(self, ids: list[int]) -> str:
        tokens: list[str] = []
        run = bytearray()
        for token_id in [*ids, -1]:
            if (value := self._bytes.get(token_id)) is not None:
                run.append(value)
                continue
            if run:
                tokens.append(run.decode("utf-8", errors="replace"))
                run.clear()
            if token_id >= 0 and (token := self._fast.id_to_token(token_id)) is not None:
                tokens.append(token)
        assert self._fast.decoder is not None  # byte tokens are known only where a decoder reads them
        return str(self._fast.decoder.decode(tokens))

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with no special token among them, whatever it spells: such strings are cut, and the parts encoded alone."""
        pieces = [text]
        while (cut := [part for piece in pieces for part in self._finder.cut(piece)]) != pieces:  # the cuts may bring new ones together
            pieces = cut
        with self._inner_lock:
            if self._inner is None:
                self._inner = _for_inner_text(self._fast)
        encodings = (self._inner.encode(piece, add_special_tokens=False) for piece in pieces)
        return [token_id for encoding in encodings for token_id in encoding.ids if token_id not in self._guarded_ids]

    def _without_absorbed_space(self, pieces: list[str]) -> list[str]:
        """Some special tokens swallow the white space beside them (Phi-3's do to their right)."""
        result = list(pieces)
        for index in range(1, len(pieces), 2):
            token = self._added[pieces[index]]
            if token.lstrip:
                result[index - 1] = result[index - 1].rstrip()
            if token.rstrip:
                result[index + 1] = result[index + 1].lstrip()
        return result

    def _id_of(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._fast.token_to_id(text)


_GRAM = 3
_REMEMBERED = 4_096
_REMEMBERED_CHARS = 120


class _Finder:
    """Finds special token strings, longest first, from left to right, in time that does not grow with their number (Gemma has 6,400)."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = frozenset(tokens)
        self._lengths = sorted({len(token) for token in tokens}, reverse=True)
        self._starts = (
            re.compile("[" + "".join(re.escape(char) for char in sorted({token[0] for token in tokens})) + "]") if tokens else None
        )
        self._head_length = min([3, *self._lengths])
        self._heads = frozenset(token[: self._head_length] for token in tokens)
        self._joined = "\0".join(tokens)
        self._grams = frozenset(token[at : at + n] for token in tokens for n in range(1, _GRAM + 1) for at in range(len(token) - n + 1))
        self._prefixes = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._suffixes = frozenset(token[start:] for token in tokens for start in range(1, len(token)))

    def split(self, text: str) -> Iterator[str]:
        """Text and special tokens in turn, beginning and ending with text (possibly empty)."""
        done = position = 0
        while self._starts and (match := self._starts.search(text, position)):
            start = match.start()
            length = 0
            if text[start : start + self._head_length] in self._heads:  # a quick look first: texts are full of "<"
                length = next((n for n in self._lengths if text[start : start + n] in self._tokens), 0)
            if length:
                yield text[done:start]
                yield text[start : start + length]
                done = start + length
            position = start + max(length, 1)
        yield text[done:]

    def cut(self, text: str) -> Iterator[str]:
        """`text` in pieces, cut after the first character of every special token; one of a single character is left out."""
        start, *rest = self.split(text)
        for token, following in zip(rest[::2], rest[1::2], strict=True):
            yield start + (token[0] if len(token) > 1 else "")
            start = token[1:] + following
        yield start

    def is_inside(self, text: str) -> bool:
        """Whether `text` is a part of a special token."""
        # Searching all 6,400 tokens of Gemma takes 33 us, a call with three tools asks 65 times, and most texts differ at once.
        if len(text) >= max(self._lengths, default=0) or text[:_GRAM] not in self._grams:
            return False
        return len(text) <= _GRAM or text in self._joined

    def edges(self, head: str, tail: str) -> tuple[int, int]:
        """Longest start of `head` that ends a special token, and longest end of `tail` that begins one, in characters."""
        longest = self._lengths[0] if self._lengths else 0
        first = next((n for n in range(min(len(head), longest), 0, -1) if head[:n] in self._suffixes), 0)
        last = next((n for n in range(min(len(tail), longest), 0, -1) if tail[-n:] in self._prefixes), 0)
        return first, last


def _for_inner_text(fast: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for pieces after the first, which must not get the word marker that some put before a text."""
    if "prepend_scheme=first" not in str(fast.pre_tokenizer).replace('"', ""):
        return fast
    return tokenizers.Tokenizer.from_str(fast.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))


def _byte_tokens(fast: tokenizers.Tokenizer) -> dict[int, int]:
    """Id -> byte of the byte-fallback tokens; empty where bytes are spelled another way."""
    if fast.decoder is None or "ByteFallback" not in str(fast.decoder):
        return {}
    ids = ((fast.token_to_id(f"<0x{value:02X}>"), value) for value in range(256))
    return {token_id: value for token_id, value in ids if token_id is not None}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file that may be absent (then empty)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise BundleError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates; only the default one serves plain chat
        found = next((entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _token_text(value: Any) -> str | None:
    """A token in a tokenizer config is a string or an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_ids(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        wrong, around = ord(text[error.start]), text[max(0, error.start - 20) : error.start + 20]
        raise InvalidOptionError(
            f"the text has a lone surrogate (U+{wrong:04X}) in {around!a}, half a character that cannot be encoded: replace it, for example"
            " with text.encode('utf-8', 'replace').decode()"
        ) from error


@lru_cache(maxsize=4)
def tokenizer_of(bundle: Path) -> Tokenizer:
    """The tokenizer of a bundle on this machine, kept for the next who asks; raises as `Tokenizer.from_folder`."""
    return Tokenizer.from_folder(bundle / TOKENIZER_DIR)
