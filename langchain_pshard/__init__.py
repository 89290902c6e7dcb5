"""PShard: one chat model served by several ordinary machines.

Names are loaded on first use, so that workers and the exporter, which need only `langchain_pshard.core`, do not pay for LangChain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_pshard.chat_models import ChatPShard
    from langchain_pshard.pipeline.client import PipelineClient

__all__ = ["ChatPShard", "PipelineClient"]


def __getattr__(name: str) -> Any:
    if name == "ChatPShard":
        from langchain_pshard.chat_models import ChatPShard

        return ChatPShard
    if name == "PipelineClient":
        from langchain_pshard.pipeline.client import PipelineClient

        return PipelineClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
