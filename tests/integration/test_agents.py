"""Agents of LangChain and LangGraph on two real workers: their ways to structured answers, and tokens as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from pydantic import BaseModel, Field

from examples.agent import AGENTS
from examples.tools_agent import TOOLS
from langchain_pshard import ChatPShard

QUESTION = {"messages": [HumanMessage("Tell me about Rome.")]}
LIMIT = {"recursion_limit": 10}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    inhabitants: int = Field(ge=0, le=9_999)


@pytest.fixture
def model(tiny_fleet: list[str]) -> Iterator[ChatPShard]:
    with ChatPShard(workers=tiny_fleet, max_tokens=200, temperature=100.0, seed=5) as model:  # strings end in their turn
        yield model


@pytest.mark.parametrize("strategy", [City, ProviderStrategy(City), ToolStrategy(City)], ids=["class", "provider", "tool"])
def test_an_agents_answer_is_of_its_class(model: ChatPShard, strategy: Any) -> None:
    """By the answer's own form, which the profile says that we have, or by a forced call of a tool with that schema."""
    state = create_agent(model, response_format=strategy).invoke(QUESTION, LIMIT)
    assert isinstance(state["structured_response"], City)
    is_tool = isinstance(strategy, ToolStrategy)
    assert [type(message) for message in state["messages"]] == [HumanMessage, AIMessage, *([ToolMessage] if is_tool else [])]


def test_beside_tools_every_turn_is_a_call_or_an_answer_of_the_class(model: ChatPShard) -> None:
    agent = create_agent(model, list(TOOLS.values()), response_format=City)
    turns: list[AIMessage] = []
    for update in agent.stream(QUESTION, {"recursion_limit": 50}, stream_mode="updates"):
        for change in update.values():
            turns += [message for message in change["messages"] if isinstance(message, AIMessage)]
            answer = change.get("structured_response")
    assert isinstance(answer, City)
    assert all(len(turn.tool_calls) == 1 for turn in turns[:-1])
    assert City.model_validate_json(turns[-1].text) == answer


@pytest.mark.parametrize("by", AGENTS)
def test_a_graph_passes_chunks_on_as_they_come(model: ChatPShard, by: str) -> None:
    graph = AGENTS[by](model)
    pairs = list(graph.stream(QUESTION, LIMIT, stream_mode="messages"))
    chunks = [message for message, about in pairs if isinstance(message, AIMessageChunk) and about["langgraph_node"] == "model"]
    assert len({chunk.id for chunk in chunks}) >= 2, "the call, and the answer to its result"
    assert len(chunks) > 10
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == len({chunk.id for chunk in chunks})
