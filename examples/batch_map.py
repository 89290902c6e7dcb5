"""One question about many documents at once, answers as they come: `python -m examples.batch_map --bundle PATH FILE...`.

All calls run at the same time and share the fleet's steps, which costs little more than one of them alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from examples.fleet_option import parser, run
from langchain_pshard import ChatPShard

PROMPT = ChatPromptTemplate.from_template("Say in one sentence what this text is about.\n\n{text}")
SAMPLES = {"ships": "A keel is the spine of a ship.", "snow": "Snow is ice that fell slowly.", "tea": "Tea is steeped, not boiled."}


async def answers(model: ChatPShard, texts: dict[str, str]) -> dict[str, str]:
    """Name of a document to its answer; tells on standard error how far it is."""
    chain = PROMPT | model | StrOutputParser()
    names = list(texts)
    found: dict[str, str] = {}
    async for index, answer in chain.abatch_as_completed([{"text": texts[name]} for name in names]):
        found[names[index]] = answer
        print(f"\r{len(found)} of {len(names)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {name: found[name] for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("batch_map", "Summarise documents.")
    options.add_argument("files", nargs="*", type=Path, help="text files; without any, three samples")
    asked = options.parse_args(arguments)
    texts = {path.name: path.read_text(encoding="utf-8") for path in asked.files} or SAMPLES

    def summarise(model: ChatPShard) -> None:
        for name, answer in asyncio.run(answers(model, texts)).items():
            print(f"{name}: {answer}")

    return run(asked, summarise)


if __name__ == "__main__":
    sys.exit(main())
