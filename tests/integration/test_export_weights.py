"""Weights read span by span are those of transformers' own loader, and nothing else is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map, load_gguf_checkpoint

from export_tools.architectures import model_shape
from export_tools.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from export_tools.weights import WeightReader
from langchain_pshard.core.bundle import LayerSpan
from tests.support.models import ARCHITECTURES, build_tiny

SPANS = (LayerSpan(0, 2), LayerSpan(2, 3), LayerSpan(3, 4), LayerSpan(0, 4))


def reader_of(model: Any, checkpoint: Any) -> WeightReader:
    return WeightReader(type(model), model.config, model_shape(model.config), checkpoint, origin="the model")


def assert_spans_equal(model: Any, reader: WeightReader) -> None:
    expected = model.state_dict()
    buffers = dict(model.named_non_persistent_buffers())
    met: set[str] = set()
    for span in SPANS:
        part = reader.read(span)
        held = {name: tensor for name, tensor in part.state_dict().items() if not tensor.is_meta}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())
        assert all(torch.equal(tensor, buffers[name]) for name, tensor in part.named_non_persistent_buffers())
        layers = {int(name.split(".")[2]) for name in held if name.startswith("model.layers.")}
        assert layers == set(range(span.start, span.end))
        assert ("lm_head.weight" in held, "model.norm.weight" in held) == (
            span.end == 4 or (span.start == 0 and reader.sizes().is_tied),
            span.end == 4,
        )
        met |= set(held)
    assert met == set(expected)


@pytest.mark.parametrize(
    ("architecture", "is_tied"), [*((name, False) for name in sorted(ARCHITECTURES)), ("gemma3_text", True), ("starcoder2", True)]
)
def test_every_span_equals_from_pretrained(architecture: str, is_tied: bool, tmp_path: Path) -> None:
    folder = build_tiny(architecture, tmp_path / "model", tie_word_embeddings=is_tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert_spans_equal(model, reader_of(model, SafetensorsCheckpoint(folder)))


def test_shards_in_half_precision(tmp_path: Path) -> None:
    """As most checkpoints come: bfloat16, in several files with an index."""
    folder = build_tiny("qwen2", tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sharded", dtype=torch.float32)
    assert_spans_equal(model, reader_of(model, SafetensorsCheckpoint(tmp_path / "sharded")))


def test_gguf_equals_the_model_it_was_made_from(tmp_path: Path) -> None:
    """GGUF stores the rows of query and key in another order: each head's halves interleaved."""
    folder = build_tiny("llama", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    path = tmp_path / "model.gguf"
    write_gguf(model, path)
    assert_spans_equal(model, reader_of(model, GgufCheckpoint(path, model.config.to_dict())))


def write_gguf(model: Any, path: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "starcoder2"])
def test_gguf_of_other_architectures_is_read_as_transformers_reads_it(architecture: str, tmp_path: Path) -> None:
    """Merged experts, norms that are stored with 1 added, fused projections: the same model from the same file, span by span."""
    settings: dict[str, Any] = {"mlp_only_layers": []} if "moe" in architecture else {}
    settings |= {"tie_word_embeddings": True} if architecture == "gemma2" else {}  # GGUF has no head of its own for it
    folder = build_tiny(architecture, tmp_path / "model", **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    path = tmp_path / "model.gguf"
    write_tensors(model, path)
    stored = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if architecture == "gemma2" else [], [])  # the tied head is the embedding
    assert_spans_equal(model, reader_of(model, GgufCheckpoint(path, model.config.to_dict())))


def write_tensors(model: Any, path: Path) -> None:
    """A model's tensors under their GGUF names, as they are."""
    architecture = {"gemma3_text": "gemma3"}.get(model.config.model_type, model.config.model_type.replace("_", ""))
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(model.config.num_hidden_layers)
    writer.add_vocab_size(model.config.vocab_size)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    values = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for name, target in sorted(get_gguf_hf_weights_map(model, processor).items()):
        data = values[target]
        if "_exps" in name:
            if "down" not in name:
                data = np.split(data, 2, axis=1)["up" in name]
            name = name.removesuffix(".weight") + ".weight"
        if "ffn_gate_inp_shexp" in name:
            data = data[0]
        writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
