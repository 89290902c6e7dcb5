"""Who may open a stream, and when: first come, first served; every stage sets the KV aside or none does. Pure.

Opens go out for several waiting streams at once. When one is refused for want of room, only the head of the queue tries again, when a
stream ends or a short time later; every success doubles the number of tries again. So small streams never starve a large one at the head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from langchain_pshard.core.messages import RequestId, StreamId
from langchain_pshard.pipeline.stream import Stream

RETRY_S = 0.1
REPEAT_S = 2.0
MAX_OPENING = 32


@dataclass(slots=True)
class Opening:
    """A stream whose Open is under way: the workers that have not answered, by request."""

    stream: Stream
    unanswered: dict[RequestId, str]
    asked_at: float
    num_cached: int | None = None
    """Leading positions that all stages that have answered hold already; None until one has."""


class Admission:
    """The queue of waiting streams and the Opens under way.

    Invariant: a stream is either waiting or opening, never both; `waiting` is in order of arrival.
    """

    def __init__(self) -> None:
        self.waiting: OrderedDict[StreamId, Stream] = OrderedDict()
        self.opening: dict[StreamId, Opening] = {}
        self.refusal = ""
        self._window = MAX_OPENING
        self._retry_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.opening)

    def add(self, stream: Stream) -> None:
        self.waiting[stream.id] = stream

    def remove(self, stream_id: StreamId) -> Stream | None:
        """Forget a stream that is cancelled or has waited too long."""
        opening = self.opening.pop(stream_id, None)
        return opening.stream if opening is not None else self.waiting.pop(stream_id, None)

    def clear(self) -> list[Stream]:
        """Forget all; returns them in order of arrival."""
        streams = sorted([*self.waiting.values(), *(opening.stream for opening in self.opening.values())], key=lambda stream: stream.id)
        self.waiting.clear()
        self.opening.clear()
        self.retry_now()
        return streams

    def next_to_open(self, now: float) -> Stream | None:
        """The stream whose turn it is, if any may try now."""
        if not self.waiting or len(self.opening) >= self._window or now < self._retry_at:
            return None
        return next(iter(self.waiting.values()))

    def started(self, stream: Stream, requests: dict[RequestId, str], now: float) -> None:
        """Opens for the stream have gone out, one to each worker."""
        self.waiting.pop(stream.id)
        self.opening[stream.id] = Opening(stream, requests, now)

    def opened(self, stream_id: StreamId, request: RequestId, cached: Sequence[int]) -> Stream | None:
        """One worker admitted the stream, its stages holding so many leading positions already; returns it when that was the last."""
        opening = self.opening.get(stream_id)
        if opening is None or opening.unanswered.pop(request, None) is None:
            return None
        here = min(cached, default=0)
        opening.num_cached = here if opening.num_cached is None else min(opening.num_cached, here)
        if opening.unanswered:
            return None
        del self.opening[stream_id]
        opening.stream.skip_cached(opening.num_cached)
        self._window = min(MAX_OPENING, 2 * self._window)
        return opening.stream

    def refused(self, stream_id: StreamId, message: str, now: float) -> None:
        """A worker has no room: the stream goes back to its place in the queue."""
        opening = self.opening.pop(stream_id)
        self.refusal = message
        self._window = 1
        self._retry_at = now + RETRY_S
        self._put_back(opening.stream)

    def put_back(self, stream_id: StreamId) -> None:
        """The stream returns to its place in the queue through no fault of its own."""
        self._put_back(self.opening.pop(stream_id).stream)

    def retry_now(self) -> None:
        """Room may have come free."""
        self._retry_at = 0.0

    def overdue(self, now: float, timeout_s: float) -> list[Stream]:
        """Streams that have waited longer than `timeout_s`."""
        waiting = [*self.waiting.values(), *(opening.stream for opening in self.opening.values())]
        return [stream for stream in waiting if now - stream.submitted_at >= timeout_s]

    def repeats(self, now: float) -> list[Opening]:
        """Opens whose answers are overdue; they are to be sent again."""
        due = [opening for opening in self.opening.values() if now - opening.asked_at >= REPEAT_S]
        for opening in due:
            opening.asked_at = now
        return due

    def _put_back(self, stream: Stream) -> None:
        self.waiting[stream.id] = stream
        # Stream ids count up, so the order of arrival is theirs; the head goes back to the head.
        for later in sorted(other for other in self.waiting if other > stream.id):
            self.waiting.move_to_end(later)
