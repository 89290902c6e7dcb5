"""Small tokenizers built on the spot: the two ways in which tokens carry bytes."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from langchain_pshard.tokenizer import Tokenizer

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(*, chat_template: str | None = CHATML, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """One token a byte, a few merges; special tokens first, a begin token added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "b")]
    tokens = [*special, *alphabet, *("".join(pair) for pair in merges)]
    fast = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return _finished(fast, chat_template, special)


def byte_fallback_tokenizer(*, chat_template: str | None = CHATML, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """As Gemma's: characters of the vocabulary, every other one as its bytes `<0xXX>`."""
    letters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    tokens = [*special, *(f"<0x{value:02X}>" for value in range(256)), *letters, "th", "the"]
    fast = tokenizers.Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[("t", "h"), ("th", "e")], byte_fallback=True)
    )
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(fast, chat_template, special)


def _finished(fast: tokenizers.Tokenizer, chat_template: str | None, special: Sequence[str]) -> Tokenizer:
    fast.add_special_tokens(list(special))
    begin = fast.token_to_id("<s>")
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return Tokenizer(fast, chat_template=chat_template, named_tokens=named, eos_token_ids=[fast.token_to_id("<|im_end|>")])
