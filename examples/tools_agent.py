"""An agent with tools, as a loop of a dozen lines: `python -m examples.tools_agent --bundle PATH "What is 17 * 23?"`.

The first turn has to use a tool (`tool_choice="any"`), so even a small model does; then it may use more, or answer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

from examples.fleet_option import parser, run
from langchain_pshard import ChatPShard

MAX_TURNS = 5


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@tool
def count_letters(word: str) -> int:
    """Count the letters of a word."""
    return sum(char.isalpha() for char in word)


TOOLS = {one.name: one for one in (multiply, count_letters)}
for one in TOOLS.values():
    one.handle_validation_error = True  # a weak model reads what was wrong with its call, and may try again


def conversation(model: ChatPShard, question: str) -> list[BaseMessage]:
    """The whole conversation, ended by an answer or after `MAX_TURNS`."""
    history: list[BaseMessage] = [SystemMessage("Use the tools, then answer in one sentence."), HumanMessage(question)]
    choice = "any"
    for _ in range(MAX_TURNS):
        message = model.bind_tools(list(TOOLS.values()), tool_choice=choice).invoke(history)
        history.append(message)
        if not message.tool_calls:
            break
        history += [TOOLS[call["name"]].invoke(call) for call in message.tool_calls if call["name"] in TOOLS]
        choice = "auto"
    return history


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("tools_agent", "Ask an agent that can calculate.")
    options.add_argument("question", nargs="?", default="What is 17 * 23?")
    asked = options.parse_args(arguments)

    def ask(model: ChatPShard) -> None:
        for message in conversation(model, asked.question):
            message.pretty_print()

    return run(asked, ask)


if __name__ == "__main__":
    sys.exit(main())
