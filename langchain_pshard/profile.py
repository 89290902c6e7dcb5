"""What LangChain calls a model's profile."""

from __future__ import annotations

from langchain_core.language_models import ModelProfile

from langchain_pshard.core.bundle import Manifest


def profile_of(manifest: Manifest | None) -> ModelProfile:
    """What the model can do; sizes only once its manifest is known."""
    profile = ModelProfile(
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        image_tool_message=False,
        pdf_tool_message=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        tool_calling=True,
        tool_choice=True,
        tool_call_streaming=True,
        structured_output=True,
    )
    if manifest is not None:
        profile |= ModelProfile(
            name=manifest.model_name, max_input_tokens=manifest.context_length, max_output_tokens=manifest.context_length
        )
    return profile
