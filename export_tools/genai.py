"""What a stage folder needs to be a model folder of openvino_genai: tokenizer and detokenizer as OpenVINO models, and the configs."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

from export_tools.source import Source, TextParts
from langchain_pshard.core.errors import InvalidOptionError, MissingExtraError, UnsupportedModelError


def check(num_stages: int) -> None:
    """Refuse before any work.

    Raises:
        InvalidOptionError: more than one stage.
        MissingExtraError: openvino_tokenizers is not installed.
    """
    if num_stages != 1:
        raise InvalidOptionError(f"--genai needs a bundle of 1 stage, {num_stages} are asked for: openvino_genai runs whole models only")
    try:
        import openvino_tokenizers  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError("--genai", "genai") from error


def add_models(folder: Path, source: Source, text: TextParts) -> None:
    """Write the tokenizer models and configs into a stage folder.

    Raises:
        UnsupportedModelError: openvino_tokenizers cannot convert the tokenizer.
    """
    from openvino_tokenizers import convert_tokenizer

    try:
        tokenizer, detokenizer = convert_tokenizer(text.tokenizer, with_detokenizer=True, skip_special_tokens=True)
    except Exception as error:  # it names no class of its own
        raise UnsupportedModelError(
            f"{source.location}: openvino_tokenizers cannot convert its tokenizer ({error}): leave --genai out"
        ) from error
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    source.config.to_json_file(folder / "config.json")
    text.generation_config.to_json_file(folder / "generation_config.json")
