"""What the exporter knows of each architecture it can cut, read from a config alone, before any weight.

The stage module traces the layers of transformers as they are, so an architecture needs an entry here only for what lives outside
its layers: which layers see a sliding window, and what is done to the embeddings and the logits. Everything not listed is refused
by name; a model that would merely seem to work is worse than a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_pshard.core.errors import SourceError, UnsupportedModelError

Windows = tuple[int | None, ...]


def _full(_: Any, num_layers: int) -> Windows:
    return (None,) * num_layers


def _same_for_all(config: Any, num_layers: int) -> Windows:
    """Mistral, Mixtral, Phi3 and their like: `sliding_window` holds for every layer, whatever `layer_types` would say."""
    return (getattr(config, "sliding_window", None),) * num_layers


def _by_layer_type(config: Any, num_layers: int) -> Windows:
    """Gemma 2 and 3, Qwen 2 and 3, SmolLM3: `layer_types` says which layers slide."""
    kinds = config.layer_types[:num_layers]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"{config.model_type} with layers of type {', '.join(unknown)} cannot be cut: only full and sliding attention"
        )
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _as_it_says(config: Any, num_layers: int) -> Windows:
    """A model that brings its own code: by `layer_types` where it has them, else its window for all, as most of the field has it."""
    return _by_layer_type(config, num_layers) if getattr(config, "layer_types", None) else _same_for_all(config, num_layers)


SUPPORTED: Mapping[str, Callable[[Any, int], Windows]] = {
    "gemma": _full,
    "gemma2": _by_layer_type,
    "gemma3_text": _by_layer_type,
    "granite": _full,
    "llama": _full,
    "mistral": _same_for_all,
    "mixtral": _same_for_all,
    "olmo2": _full,
    "phi3": _same_for_all,
    "qwen2": _by_layer_type,
    "qwen2_moe": _by_layer_type,
    "qwen3": _by_layer_type,
    "qwen3_moe": _same_for_all,
    "smollm3": _by_layer_type,
    "starcoder2": _same_for_all,
}
"""transformers `model_type` to the rule for its attention windows."""

_UNCUTTABLE: Mapping[str, tuple[str, ...]] = {
    "its state-space or linear-attention layers keep a running state that cannot be rewound by position": (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ),
    "its layers share keys and values with other layers, which a cut would separate": ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    "its multi-head latent attention keeps keys and values in a compressed form of two sizes, which no runner holds": (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm4_moe_lite",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "youtu",
    ),
}
"""Why an architecture cannot be cut, where more can be said than that nobody has tried."""

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on the position alone. "dynamic" and "longrope" depend on the longest sequence in the batch: one stream
would change another's text."""


_NEEDED_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that the manifest carries and the cut needs."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    num_kv_heads: int
    head_dim: int
    attention_windows: Windows
    """Per layer: None for full attention, else the number of positions a query sees, itself included."""
    runners: tuple[str, ...]
    """Engines that can run its graphs."""


def check_supported(config: Mapping[str, Any], *, origin: str, trusts_code: bool = False) -> bool:
    """Refuse what cannot be cut, from the raw config alone.

    Args:
        config: the contents of config.json.
        origin: the file or model named in the error.
        trusts_code: whether the caller lets the model run its own code.

    Returns:
        Whether the model's own code has to run, which is so only where transformers does not know the model and the caller trusts it.

    Raises:
        SourceError: the config does not name a model type.
        UnsupportedModelError: an architecture not in `SUPPORTED`, a model that asks for its own code, an already quantized
            checkpoint, a rotary embedding that depends on the batch, or attention that is not causal.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SourceError(f"{origin} names no model_type: it is not the config of a transformers model")
    _check_kind(config, origin, model_type)
    runs_code = model_type not in SUPPORTED
    if runs_code:
        _check_trust(config, origin, model_type, trusts_code=trusts_code)
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "an unnamed method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            f"{origin} is already quantized ({method}): export from the original weights; --weights chooses the mode"
        )
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{origin} uses bidirectional attention (an embedding model): only causal models generate text")
    for rope_type in sorted(_rope_types(config) - STATIC_ROPE_TYPES):
        raise UnsupportedModelError(
            f"{origin} uses rotary embeddings of type {rope_type!r}, which depend on the longest sequence of a batch;"
            f" supported: {', '.join(sorted(STATIC_ROPE_TYPES))}"
        )
    return runs_code


def check_fields(config: Mapping[str, Any], *, origin: str) -> None:
    """Refuse the config of an architecture in `SUPPORTED` that lacks a size: transformers would take that of another model.

    Raises:
        SourceError: with the fields that are missing.
    """
    missing = [name for name in _NEEDED_FIELDS if config.get(name) is None]
    if missing:
        raise SourceError(f"the config.json of {origin} lacks {', '.join(missing)}: it is not complete; download the model again")


def _check_kind(config: Mapping[str, Any], origin: str, model_type: str) -> None:
    """Refuse kinds of models that no cut by layers serves, with the reason."""
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{origin} is an encoder-decoder model ({model_type}), which cannot be cut: only decoders are")
    if config.get("num_kv_shared_layers"):
        raise UnsupportedModelError(
            f"{origin} ({model_type}) cannot be cut: num_kv_shared_layers = {config['num_kv_shared_layers']}, its layers share keys and"
            " values with other layers, which a cut would separate"
        )
    for reason, types in _UNCUTTABLE.items():
        if model_type in types:
            raise UnsupportedModelError(
                f"{origin} is a {model_type} model ({_classes(config)}), which cannot be cut: {reason}; supported: {', '.join(SUPPORTED)}"
            )


def _check_trust(config: Mapping[str, Any], origin: str, model_type: str, *, trusts_code: bool) -> None:
    """A type we do not know passes only with code of its own that the caller trusts."""
    if not config.get("auto_map"):
        hint = " (the text-only checkpoint, gemma3_text, can be exported)" if model_type == "gemma3" else ""
        raise UnsupportedModelError(
            f"{origin} is a {model_type} model ({_classes(config)}), which cannot be cut{hint}; supported: {', '.join(SUPPORTED)}"
        )
    if not trusts_code:
        raise UnsupportedModelError(
            f"{origin} is a {model_type} model that asks to run Python code of its own ({config['auto_map']!r}): it would run with all"
            " your rights. Read that code first; --trust-remote-code lets it run"
        )


def _classes(config: Mapping[str, Any]) -> str:
    return ", ".join(config.get("architectures") or ()) or "no class named"


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Rope types named by a config in its old form (`rope_scaling`) or new one (`rope_parameters`, maybe one per layer type)."""
    found: set[str] = set()
    for key in ("rope_scaling", "rope_parameters"):
        parameters = config.get(key)
        if not isinstance(parameters, Mapping):
            continue
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        for entry in nested or [parameters]:
            rope_type = entry.get("rope_type", entry.get("type"))
            if isinstance(rope_type, str):
                found.add(rope_type)
    return found


def model_shape(config: Any) -> ModelShape:
    """Read a transformers config object that `check_supported` has accepted.

    Raises:
        SourceError: a needed field is missing or not a positive number.
    """

    def positive(name: str) -> int:
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise SourceError(f"the model's config has {name} = {value!r}: a positive number is needed")
        return value

    num_layers = positive("num_hidden_layers")
    num_heads, num_kv_heads = positive("num_attention_heads"), positive("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise SourceError(
            f"the model's config has num_attention_heads = {num_heads} and num_key_value_heads = {num_kv_heads}: one must divide the other"
        )
    return ModelShape(
        architecture=config.model_type,
        num_layers=num_layers,
        hidden_size=positive("hidden_size"),
        vocab_size=positive("vocab_size"),
        context_length=positive("max_position_embeddings"),
        num_kv_heads=num_kv_heads,
        head_dim=getattr(config, "head_dim", None) or positive("hidden_size") // num_heads,
        attention_windows=SUPPORTED.get(config.model_type, _as_it_says)(config, num_layers),
        runners=_runners(config),
    )


def _runners(config: Any) -> tuple[str, ...]:
    """Attention whose scores are capped between product and softmax (Gemma 2) has no paged form: the transformation refuses its graph."""
    return ("stateful",) if getattr(config, "attn_logit_softcapping", None) else ("paged", "stateful")
