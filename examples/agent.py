"""The same agent by LangChain and by LangGraph: `python -m examples.agent --bundle PATH [--by langgraph] "What is 17 * 23?"`.

Needs the `demo` extra. LangChain's `create_agent` brings the loop and asks us only how a turn differs: a middleware lets the first one do
nothing but call a tool, so that even a small model uses one. With LangGraph the loop is drawn by hand. `tools_agent` does without either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from examples.fleet_option import parser, run
from examples.tools_agent import MAX_TURNS, TOOLS
from langchain_pshard import ChatPShard

INSTRUCTION = "Use the tools, then answer in one sentence."
_TOOLS = list(TOOLS.values())


def _choice(messages: Sequence[AnyMessage]) -> str:
    """What a turn may do: call a tool, certainly, as long as none has answered; then as the model likes."""
    return "auto" if any(isinstance(message, ToolMessage) for message in messages) else "any"


@wrap_model_call
def call_a_tool_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    return handler(request.override(tool_choice=_choice(request.messages)))


def by_langchain(model: ChatPShard) -> Any:
    """LangChain's agent."""
    return create_agent(model, _TOOLS, system_prompt=INSTRUCTION, middleware=[call_a_tool_first])


def by_langgraph(model: ChatPShard) -> Any:
    """The same as a graph: model, tools, and back until the model calls none."""

    def ask(state: MessagesState) -> dict[str, list[BaseMessage]]:
        bound = model.bind_tools(_TOOLS, tool_choice=_choice(state["messages"]))
        return {"messages": [bound.invoke([SystemMessage(INSTRUCTION), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(_TOOLS))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


AGENTS: dict[str, Callable[[ChatPShard], Any]] = {"langchain": by_langchain, "langgraph": by_langgraph}


def messages(agent: Any, question: str) -> Iterator[BaseMessage]:
    """The conversation, message by message as it happens.

    Raises:
        GraphRecursionError: no answer after `MAX_TURNS` turns of the model.
    """
    asked = HumanMessage(question)
    yield asked
    for update in agent.stream({"messages": [asked]}, {"recursion_limit": 2 * MAX_TURNS}, stream_mode="updates"):
        for change in update.values():
            yield from change["messages"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("agent", "Ask an agent that can calculate.")
    options.add_argument("question", nargs="?", default="What is 17 * 23?")
    options.add_argument("--by", choices=AGENTS, default="langchain", help="whose agent")
    asked = options.parse_args(arguments)

    def ask(model: ChatPShard) -> None:
        try:
            for message in messages(AGENTS[asked.by](model), asked.question):
                message.pretty_print()
        except GraphRecursionError:
            print(f"(no answer after {MAX_TURNS} turns)")

    return run(asked, ask)


if __name__ == "__main__":
    sys.exit(main())
