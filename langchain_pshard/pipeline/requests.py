"""Control requests (status, pieces of files) that wait for their replies. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from langchain_pshard.core.errors import PShardError, WorkerUnreachableError, error_from_code
from langchain_pshard.core.messages import Fetched, Refused, RequestId, Status
from langchain_pshard.pipeline.instructions import Deliver, Instruction


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a control request."""

    message: Fetched | Status
    round_trip_s: float


ReplySink = Callable[[Reply | PShardError], object]


@dataclass(frozen=True, slots=True)
class _Asked:
    address: str
    sink: ReplySink
    at: float
    timeout_s: float


class Requests:
    """Invariant: every request gets exactly one reply or error."""

    def __init__(self) -> None:
        self._asked: dict[RequestId, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def asked(self, request: RequestId, address: str, sink: ReplySink, timeout_s: float, now: float) -> None:
        """A request has gone out."""
        self._asked[request] = _Asked(address, sink, now, timeout_s)

    def answered(self, message: Fetched | Status | Refused, now: float) -> list[Instruction]:
        """A reply came; nothing when it is none of ours."""
        asked = self._asked.pop(message.request, None)
        if asked is None:
            return []
        if isinstance(message, Refused):
            return [Deliver(asked.sink, error_from_code(message.code, f"the worker at {asked.address} refused: {message.message}"))]
        return [Deliver(asked.sink, Reply(message, now - asked.at))]

    def expired(self, now: float) -> list[Instruction]:
        """Errors for those that have waited too long."""
        overdue = [request for request, asked in self._asked.items() if now - asked.at >= asked.timeout_s]
        out: list[Instruction] = []
        for request in overdue:
            asked = self._asked.pop(request)
            text = f"the worker at {asked.address} has not answered a request within {asked.timeout_s:g} s"
            out.append(Deliver(asked.sink, WorkerUnreachableError(text, addresses=(asked.address,))))
        return out

    def end_all(self, error: PShardError) -> list[Instruction]:
        """All end with this error."""
        asked = list(self._asked.values())
        self._asked.clear()
        return [Deliver(each.sink, copy.copy(error)) for each in asked]
