"""What a call of the chat model costs before the fleet hears of it: from `invoke` to the first message that the client hands to its socket.

That is LangChain's own way to `_generate`, the prompt (template, tokenizer), the options, and the way to the thread that owns the sockets.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from rich.console import Console
from rich.progress import Progress

from benchmarks.report import Figure, Report, Samples
from benchmarks.two_workers import settings, start_two_workers
from langchain_pshard import ChatPShard, PipelineClient
from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.messages import Message, Open
from langchain_pshard.transport.hub import Link
from langchain_pshard.transport.zeromq import ZmqHub

TARGET_MS = 3.0
NUM_CALLS = 100

_NOTE = (
    "The harbour master wrote down the height of the water every morning and the direction of the wind, and the keeper of the lighthouse"
    " did the same. "
)
MESSAGES: Sequence[BaseMessage] = (
    SystemMessage(f"Be brief. {_NOTE}"),
    HumanMessage(f"What did the harbour master write down? {_NOTE * 2}"),
    AIMessage(f"The height of the water. {_NOTE}"),
    HumanMessage(f"And the keeper? {_NOTE}"),
)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@tool
def search(query: str, limit: int = 5) -> str:
    """Search the archive of the harbour office for documents that hold all words of the query."""
    return query * limit


@tool
def weather(location: str, unit: str = "celsius") -> str:
    """Get the present weather at a location."""
    return location + unit


class TimedHub(ZmqHub):
    """Notes when the first message of a call, which opens its stream, was handed to a socket."""

    sent_at: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.sent_at = []

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        is_sent = super().send(link, message, tensor)
        if isinstance(message, Open):
            self.sent_at.append(time.perf_counter())
        return is_sent


@contextlib.contextmanager
def timed_hubs() -> Iterator[list[TimedHub]]:
    """Clients that connect in this block use hubs that the list names."""
    hubs: list[TimedHub] = []

    def make() -> TimedHub:
        hubs.append(TimedHub())
        return hubs[-1]

    with patch.object(PipelineClient, "connect", functools.partial(PipelineClient.connect, hub_factory=make)):
        yield hubs


def latencies_ms(
    model: ChatPShard, hubs: Sequence[TimedHub], num_calls: int, advance: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """From `invoke` to the first byte, call by call, for a plain prompt, one with three tools, and a forced call of one of them. The first
    call of each, which connects and fills caches, is left out."""
    tools = [multiply, search, weather]
    forms = {"plain": model, "3 tools": model.bind_tools(tools), "3 tools, forced": model.bind_tools(tools, tool_choice="any")}
    found: dict[str, list[float]] = {name: [] for name in forms}
    for call in range(num_calls + 1):
        for name, form in forms.items():
            for hub in hubs:
                hub.sent_at.clear()
            began = time.perf_counter()
            form.invoke(list(MESSAGES))
            if call:
                [hub] = hubs
                found[name].append(1e3 * (hub.sent_at[0] - began))
        advance()
    return found


def run(console: Console) -> Report:
    """From `invoke` to the first byte sent to the fleet, without and with three tools (p50 in ms).

    Raises:
        InvalidOptionError: this machine lends us a single core.
    """
    with Progress(console=console) as progress, contextlib.ExitStack() as stack:
        workers = start_two_workers(stack, progress)
        measuring = progress.add_task(f"{NUM_CALLS} calls in three forms", total=NUM_CALLS + 1)
        hubs = stack.enter_context(timed_hubs())
        model = stack.enter_context(ChatPShard(workers=workers, max_tokens=1))
        found = latencies_ms(model, hubs, NUM_CALLS, lambda: progress.advance(measuring))
        num_tokens = model.get_num_tokens_from_messages(list(MESSAGES))
    samples = tuple(Samples(name=name, unit="ms", values=tuple(values)) for name, values in found.items())
    return Report(
        bench="call-latency",
        question="from invoke to the first message handed to the socket, after the first call",
        figures=(
            Figure(key="p50_ms", value=samples[0].median, at_most=TARGET_MS),
            Figure(key="p50_tools_ms", value=samples[1].median, at_most=TARGET_MS),
            Figure(key="p50_forced_ms", value=samples[2].median, at_most=TARGET_MS),
        ),
        samples=samples,
        settings=settings(messages=len(MESSAGES), prompt_tokens=num_tokens),
    )
