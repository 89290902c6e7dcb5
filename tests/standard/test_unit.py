"""LangChain's standard unit suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumpd, dumps, load, loads
from langchain_tests.unit_tests import ChatModelUnitTests
from syrupy.assertion import SnapshotAssertion

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

    @pytest.mark.xfail(
        reason="the suite loads with allowed_objects='all', which langchain-core takes for its own list of classes; tested below",
        raises=(ValueError, AssertionError),  # the second as long as nobody keeps its snapshot, which every new option would change
        strict=True,
    )
    def test_serdes(self, model: BaseChatModel, snapshot: SnapshotAssertion) -> None:
        super().test_serdes(model, snapshot)


@pytest.mark.filterwarnings("ignore:The function `loads?` is in beta")
def test_dumps_and_load_keep_every_setting() -> None:
    model = ChatPShard(
        workers=["tcp://127.0.0.1:9"],
        temperature=0.5,
        stop=["x"],
        top_logprobs=3,
        tools=[{"name": "f", "description": "d", "parameters": {}}],
    )
    loaded = load(dumpd(model), allowed_objects=[ChatPShard], valid_namespaces=["langchain_pshard"])
    assert loaded.asdict() == model.asdict()
    local = ChatPShard(bundle=Path("some/bundle"), numerics="exact")
    text = dumps(local)
    assert loads(text, allowed_objects=[ChatPShard], valid_namespaces=["langchain_pshard"]).asdict() == local.asdict()
    assert json.loads(text)["kwargs"]["bundle"] == str(Path("some/bundle"))


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ValueError, match="api_key"):
        ChatPShard(workers=["tcp://127.0.0.1:9"], api_key="test")  # type: ignore[call-arg]
