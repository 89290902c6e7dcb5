"""Which streams a worker has admitted: on every stage that the client's chain gives it, or on none.

Pure. The engines are asked stage by stage, so that a refusal by a later one undoes the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

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
    cached: list[int] = field(default_factory=list)
    """Positions of the prompt that each stage opened so far holds already."""

    @property
    def opened(self) -> Opened:
        return Opened(request=self.ask.request, cached=tuple(self.cached))


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

    def opened_again(self, ask: Open) -> Opened:
        """The answer to an Open of a stream that is known, as it was given the first time."""
        return msgspec.structs.replace(self._admissions[StreamKey(ask.client, ask.stream)].opened, request=ask.request)

    def admit(self, ask: Open, link: Link, stages: tuple[int, ...]) -> list[Instruction]:
        """Begin to admit a stream that is not known yet on `stages`, of which there is at least one."""
        key = StreamKey(ask.client, ask.stream)
        self._admissions[key] = _Admission(ask=ask, link=link, stages=stages)
        return [self._next_open(key)]

    def _next_open(self, key: StreamKey) -> Instruction:
        admission = self._admissions[key]
        ask = admission.ask
        stage_idx = admission.stages[len(admission.cached)]
        return OpenStream(
            stage_idx=stage_idx,
            key=key,
            num_tokens=ask.num_tokens,
            sampling=ask.sampling,
            prompt=ask.prompt,
            grammar=ask.grammar,
            shares_generated=ask.shares_generated,
        )

    def opened(self, key: StreamKey, outcome: int | PShardError) -> list[Instruction]:
        """How the last OpenStream went, cached positions or an error: on to the next stage, or undo the earlier ones."""
        admission = self._admissions[key]
        ask = admission.ask
        if isinstance(outcome, PShardError):
            refused = Refused(request=ask.request, code=outcome.code, message=str(outcome))
            return [*self.free(key), Reply(link=admission.link, message=refused)]
        self._stages[admission.stages[len(admission.cached)]].open(key, ask.num_tokens, length=outcome, end_tokens=ask.end_tokens)
        admission.cached.append(outcome)
        if len(admission.cached) < len(admission.stages):
            return [self._next_open(key)]
        return [Reply(link=admission.link, message=admission.opened)]

    def free(self, key: StreamKey) -> list[Instruction]:
        """Free a stream wherever it is open; unknown ones are ignored."""
        admission = self._admissions.pop(key, None)
        if admission is None:
            return []
        opened = admission.stages[: len(admission.cached)]
        for stage_idx in opened:
            self._stages[stage_idx].close(key)
        return [CloseStream(stage_idx=stage_idx, key=key) for stage_idx in opened]

    def free_all(self, client: ClientId) -> list[Instruction]:
        """Free every stream of a client."""
        return [close for key in [key for key in self._admissions if key.client == client] for close in self.free(key)]
