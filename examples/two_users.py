"""Two users at once on one fleet, side by side: `python -m examples.two_users --bundle PATH`.

Their tokens come out of shared steps. Then each asks again alone: the texts are the same, whoever else is served. docs/decisions/0005 says
how far that goes: with int4 or int8 weights and `fast` numerics to the bit.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from examples.fleet_option import model_options, parser
from langchain_pshard import ChatPShard
from langchain_pshard.core.errors import PShardError

QUESTIONS = {"Ann": "Write about the sea and the ships on it.", "Bob": "List what to pack for a walk in the hills."}
COLOURS = {"Ann": "cyan", "Bob": "green"}


async def together(model: ChatPShard, console: Console) -> dict[str, str]:
    """Both answers, shown as they grow."""
    texts = dict.fromkeys(QUESTIONS, "")

    def shown() -> Columns:
        panels = (Panel(Text(text, style=COLOURS[name]), title=f"{name}: {QUESTIONS[name]}") for name, text in texts.items())
        return Columns(panels, equal=True, expand=True, width=max(20, console.width // len(texts) - 2))

    with Live(shown(), console=console, refresh_per_second=10) as live:

        async def ask(name: str) -> None:
            async for chunk in model.astream(QUESTIONS[name]):
                texts[name] += chunk.text
                live.update(shown())

        await asyncio.gather(*(ask(name) for name in QUESTIONS))
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("two_users", "Serve two users at once.")
    asked = options.parse_args(arguments)
    console = Console()
    try:
        with ChatPShard(**model_options(asked) | {"seed": asked.seed or 0}) as model:  # drawn texts repeat only with a seed
            model.invoke("Hello.", max_tokens=1)  # workers are there from here on
            began = time.monotonic()
            texts = asyncio.run(together(model, console))
            both_s = time.monotonic() - began
            alone = {name: model.invoke(question).text for name, question in QUESTIONS.items()}
            alone_s = time.monotonic() - began - both_s
    except PShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    differing = [name for name in QUESTIONS if texts[name] != alone[name]]
    verdict = f"{' and '.join(differing)} got another text" if differing else "both got the same text"
    console.print(f"\nTogether {both_s:.1f} s, one after the other {alone_s:.1f} s; alone {verdict}.")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
