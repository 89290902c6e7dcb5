"""A random-weight model folder of any size, written shard by shard: no more than one layer of it is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_large_model(folder: Path, on_layer: Callable[[], None]) -> int:
    """Write a Llama-shaped model of `CONFIG` in bfloat16, one file a layer, with a tiny tokenizer; returns its number of weights.

    Args:
        folder: where to; made.
        on_layer: called after each file.
    """
    from tests.support.models import write_tokenizer

    config = transformers.LlamaConfig(**CONFIG)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: _random(shapes[name], generator) for name in names}, folder / file)
        on_layer()
    index = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return sum(shape.numel() for shape in shapes.values())


def _random(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
