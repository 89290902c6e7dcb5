"""What the pure parts ask the reactor to do: the whole list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from langchain_pshard.core.messages import Message, StreamId


class Dial(msgspec.Struct, frozen=True):
    """Make a fresh link to this worker, giving up the old one with whatever is queued on it."""

    address: str


class Send(msgspec.Struct, frozen=True):
    """Send a message to the worker at this address. It may get lost; whoever asked repeats it or gives up in time."""

    address: str
    message: Message


class Deliver(msgspec.Struct, frozen=True):
    """Hand something to whoever waits for it. When nobody waits for a stream's any more (its sink says False), the stream is cancelled."""

    sink: Callable[[Any], object]
    item: object
    stream: StreamId | None = None


class Warn(msgspec.Struct, frozen=True):
    """Write a line into the log: something that no caller has to act on, and whoever runs the fleet wants to know."""

    text: str


Instruction = Dial | Send | Deliver | Warn
