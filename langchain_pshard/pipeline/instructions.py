"""What the pure parts ask the reactor to do: the whole list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_pshard.core.messages import Message, StreamId


@dataclass(frozen=True, slots=True)
class Dial:
    """Make a fresh link to this worker, giving up the old one with whatever is queued on it."""

    address: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the worker at this address. It may get lost; whoever asked repeats it or gives up in time."""

    address: str
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand something to whoever waits for it. When nobody does (the sink says False), the stream is cancelled."""

    sink: Callable[[Any], bool]
    item: object
    stream: StreamId | None = None


@dataclass(frozen=True, slots=True)
class Warn:
    """Write a line into the log: something that no caller has to act on, and whoever runs the fleet wants to know."""

    text: str


Instruction = Dial | Send | Deliver | Warn
