"""Chat in the terminal: `python -m examples.chat --bundle PATH`, or `--workers tcp://host:port tcp://host:port`.

An empty line or end of file ends the chat; Ctrl-C stops the answer being written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage

from langchain_pshard import ChatPShard
from langchain_pshard.core.errors import PShardError


def main() -> int:
    options = _parse()
    try:
        with ChatPShard(
            bundle=options.bundle, workers=options.workers, temperature=options.temperature, max_tokens=options.max_tokens
        ) as model:
            _chat(model, [SystemMessage(options.system)] if options.system else [])
    except PShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _chat(model: ChatPShard, history: list[BaseMessage]) -> None:
    print("connecting ...", end="", flush=True)  # which starts the workers of a bundle: some ten seconds
    model.invoke([HumanMessage("Hi")], max_tokens=1)
    print("\rready; an empty line ends the chat")
    while text := _ask():
        history.append(HumanMessage(text))
        history.append(AIMessage(_answer(model, history)))


def _answer(model: ChatPShard, history: list[BaseMessage]) -> str:
    """Print the answer as it comes; what there is of it when Ctrl-C stops it."""
    whole = AIMessageChunk(content="")
    stream = model.stream(history)
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            whole += chunk
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    timings = whole.response_metadata.get("timings")
    print(f"\n[{whole.response_metadata['finish_reason']}, {timings['tokens_per_s']:.0f} tokens/s]" if timings else "")
    return whole.text


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.chat", description="Chat with a model served by PShard workers.")
    fleet = parser.add_mutually_exclusive_group(required=True)
    fleet.add_argument("--bundle", type=Path, help="start workers for this bundle")
    fleet.add_argument("--workers", nargs="+", metavar="ADDRESS", help="use these running workers")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
