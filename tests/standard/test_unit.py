"""LangChain's standard unit suite."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_pshard import ChatPShard


class TestChatPShardUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPShard]:
        return ChatPShard

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"workers": ["tcp://127.0.0.1:9"]}  # nothing is connected before the first call

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        params = dict(super().standard_chat_model_params)
        del params["api_key"]  # there is no key, and an unknown option is an error here
        return params

    @property
    def supports_model_override(self) -> bool:
        return False  # a fleet serves one model


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ValueError, match="api_key"):
        ChatPShard(workers=["tcp://127.0.0.1:9"], api_key="test")  # type: ignore[call-arg]
