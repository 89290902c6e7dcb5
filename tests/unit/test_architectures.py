"""What is refused from a config alone, and how windows are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

from export_tools.architectures import SUPPORTED, check_supported, model_shape
from langchain_pshard.core.errors import SourceError, UnsupportedModelError

FIELDS = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 264,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_supported_types_pass(model_type: str) -> None:
    check_supported({"model_type": model_type, "rope_scaling": {"rope_type": "llama3"}}, origin="m")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, ("mamba", "MambaForCausalLM", "llama", "qwen3")),
        ({"model_type": "gemma3"}, ("gemma3_text",)),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, ("gptq", "--weights")),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, ("longrope", "llama3")),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, ("dynamic",)),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ("bidirectional",)),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(config: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config, origin="some-model")
    assert all(word in str(caught.value) for word in ("some-model", *words))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_multi_head_latent_attention_is_refused_even_with_trusted_code(model_type: str) -> None:
    """Its keys and values have two sizes. Dense and distilled models of DeepSeek are of type llama or qwen2."""
    config = {"model_type": model_type, "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"}}
    with pytest.raises(UnsupportedModelError, match=rf"{model_type} model .*multi-head latent attention"):
        check_supported(config, origin="m", trusts_code=True)
    assert model_type in transformers.CONFIG_MAPPING


def test_config_without_model_type() -> None:
    with pytest.raises(SourceError, match="names no model_type"):
        check_supported({}, origin="m")


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None, None, None)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None, None)),
        ({"model_type": "qwen3", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 8, None, 8)),
    ],
)
def test_windows(settings: dict[str, object], windows: tuple[int | None, ...]) -> None:
    shape = model_shape(SimpleNamespace(**FIELDS, **settings))
    assert (shape.attention_windows, shape.head_dim) == (windows, 16)


@pytest.mark.parametrize("value", [None, 0, "many"])
def test_unusable_field_is_named_with_its_value(value: object) -> None:
    with pytest.raises(SourceError, match=rf"num_hidden_layers = {value!r}"):
        model_shape(SimpleNamespace(**{**FIELDS, "num_hidden_layers": value, "model_type": "llama"}))
