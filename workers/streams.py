"""Which streams a worker has admitted: on every stage that the client's chain gives it, or on none.

Pure. The engines are asked stage by stage, so that a refusal by a later one undoes the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from langchain_pshard.core.errors import PShardError
from langchain_pshard.core.messages import ClientId, Open, Opened, Refused
from langchain_pshard.transport.hub import Link
from workers.instructions import CloseStream, Instruction, OpenStream, Reply
from workers.runners.runner import StreamKey
from workers.stage import Stage


@dataclass(slots=True, kw_only=True)
class _Admission:
    ask: Open
    link: Link
    stages: tuple[int, ...]
    num_opened: int = 0


class Streams:
    """The streams of all clients. Invariant: a stage has a stream exactly while its engine has set KV aside for it."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._admissions: dict[StreamKey, _Admission] = {}

    @property
    def num_streams(self) -> int:
        return len(self._admissions)

    def find(self, key: StreamKey) -> Open | None:
        """The Open that a known stream was admitted by."""
        admission = self._admissions.get(key)
        return admission.ask if admission else None

    def admit(self, ask: Open, link: Link, stages: tuple[int, ...]) -> list[Instruction]:
        """Begin to admit a stream that is not known yet on `stages`, of which there is at least one."""
        key = StreamKey(ask.client, ask.stream)
        self._admissions[key] = _Admission(ask=ask, link=link, stages=stages)
        return [self._next_open(key)]

    def _next_open(self, key: StreamKey) -> Instruction:
        admission = self._admissions[key]
        stage_idx = admission.stages[admission.num_opened]
        ask = admission.ask
        return OpenStream(stage_idx=stage_idx, key=key, num_tokens=ask.num_tokens, sampling=ask.sampling, grammar=ask.grammar)

    def opened(self, key: StreamKey, error: PShardError | None) -> list[Instruction]:
        """How the last OpenStream went: on to the next stage, or undo the earlier ones."""
        admission = self._admissions[key]
        ask = admission.ask
        if error is not None:
            refused = Refused(request=ask.request, code=error.code, message=str(error))
            return [*self.free(key), Reply(link=admission.link, message=refused)]
        self._stages[admission.stages[admission.num_opened]].open(key, ask.num_tokens)
        admission.num_opened += 1
        if admission.num_opened < len(admission.stages):
            return [self._next_open(key)]
        return [Reply(link=admission.link, message=Opened(request=ask.request))]

    def free(self, key: StreamKey) -> list[Instruction]:
        """Free a stream wherever it is open; unknown ones are ignored."""
        admission = self._admissions.pop(key, None)
        if admission is None:
            return []
        opened = admission.stages[: admission.num_opened]
        for stage_idx in opened:
            self._stages[stage_idx].close(key)
        return [CloseStream(stage_idx=stage_idx, key=key) for stage_idx in opened]

    def free_all(self, client: ClientId) -> list[Instruction]:
        """Free every stream of a client."""
        return [close for key in [key for key in self._admissions if key.client == client] for close in self.free(key)]
