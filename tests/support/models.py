"""Tiny random-weight models of every supported architecture, made on the spot as ordinary model folders.

They speak bytes: token 8 + b is the byte b, tokens 0 to 7 are special. Their greedy texts vary and never end by themselves: the
special tokens' rows in the head are scaled down, so that a test gets as many tokens as it asks for. Building one takes under two
seconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.utils import logging as transformers_logging

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<unused>")
BOS_ID, EOS_ID, IM_END_ID = 1, 2, 4
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
WINDOW = 16
CONTEXT_LENGTH = 2048
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.1,  # at the usual 0.02 random models repeat one token
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a random model that reads what it writes by repeats itself
}
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "gemma": {},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": _EVERY_OTHER,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,  # low enough that a missing cap shows at these weights
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [1],  # one dense layer between the sparse ones
    },
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _EVERY_OTHER},
    "starcoder2": {"sliding_window": WINDOW, "norm_type": "layer_norm"},
}
"""transformers `model_type` to what its tiny config has beyond the common part; Gemma 2 and 3, Mistral, Mixtral,
SmolLM3 and StarCoder2 have short windows."""


def build_tiny(architecture: str, folder: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Make a model folder: config.json, safetensors in float32, tokenizer with a ChatML-like template, generation config.

    Args:
        architecture: a key of `ARCHITECTURES`.
        folder: where to write; made when missing.
        seed: of the random weights.
        config_overrides: config fields that differ from the tiny default.

    Returns:
        `folder`.
    """
    settings = {**_BASE, **ARCHITECTURES[architecture], **config_overrides}
    config = transformers.CONFIG_MAPPING[architecture](**settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL_TOKENS)] *= 0.01
    model.generation_config = transformers.GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=0)
    with _no_bars():
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: one token a byte, whatever the text."""
    byte_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    character_of_byte = _byte_characters()
    assert sorted(character_of_byte) == byte_characters, "the byte alphabet of tokenizers has changed"
    vocabulary = {token: idx for idx, token in enumerate((*SPECIAL_TOKENS, *character_of_byte))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _byte_characters() -> list[str]:
    """The character byte-level BPE writes for each byte: itself where it prints, else the next free one from U+0100."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(free)) for byte in range(256)]
