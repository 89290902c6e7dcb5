"""Random orders, repetitions, losses and groupings of messages never change a token, and never break what an engine relies on.

The real `Server` over a scripted hub, against the plainest possible reading of the one step rule: one message after the other, one stream
at a time. `FakeRunner` asserts what the engine is promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.codec import Tensor, unpack_tokens
from langchain_pshard.core.messages import (
    ClientId,
    Close,
    Epoch,
    Hop,
    Join,
    Leave,
    Message,
    MicroBatch,
    Open,
    RequestId,
    StepFailed,
    StepResult,
    StreamId,
    WorkerId,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived, Event, Link
from tests.support.fake_stages import FakeRunner, FakeSampler, expected_token, make_identity, row, step, tokens_of
from workers.server import Server
from workers.worker import Worker

NUM_STAGES = 2
POISON = 63
CLIENTS = ("ann", "bob")
LINKS = {client: Link(0, client.encode()) for client in CLIENTS}


class ScriptedHub:
    """A hub that hears groups of messages, one group a poll, and then stops its server."""

    num_malformed = 0

    def __init__(self, groups: Sequence[Sequence[Event]]) -> None:
        self._groups = list(groups)
        self.sent: list[tuple[Link, Message]] = []
        self.server: Server | None = None

    def poll(self, timeout_s: float | None) -> list[Event]:
        if timeout_s:  # the worker has nothing to do
            if not self._groups:
                assert self.server is not None
                self.server.stop()
                return []
            return list(self._groups.pop(0))
        return []

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        self.sent.append((link, message))
        return True

    def wake(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"one worker serves every stage here: nothing calls {name}")


@dataclass
class PlainModel:
    """The one step rule, one slice at a time."""

    epochs: dict[str, int] = field(default_factory=dict)
    streams: dict[tuple[str, int], tuple[int, list[int]]] = field(default_factory=dict)
    last_ids: dict[tuple[str, int], int] = field(default_factory=dict)
    results: list[tuple[str, int, int, list[int]]] = field(default_factory=list)

    def _free(self, key: tuple[str, int]) -> None:
        self.streams.pop(key, None)
        self.last_ids.pop(key, None)

    def hear(self, message: Message) -> None:
        match message:
            case Join():
                if message.epoch > self.epochs.get(message.client, -1):
                    self._leave(message.client)
                    self.epochs[message.client] = message.epoch
            case Leave():
                self._leave(message.client)
            case Open():
                key = (message.client, message.stream)
                if self.epochs.get(message.client) == message.epoch and key not in self.streams:
                    self.streams[key] = (message.num_tokens, [])
            case Close():
                if self.epochs.get(message.client) == message.epoch:
                    for stream in message.streams:
                        self._free((message.client, stream))
            case MicroBatch(steps=steps):
                for one in steps:
                    if self.epochs.get(one.client) == one.epoch:
                        for piece in one.slices:
                            self._slice(one.client, one.step_id, piece.stream, piece.start, unpack_tokens(piece.tokens), piece.num_sampled)

    def _leave(self, client: str) -> None:
        self.epochs.pop(client, None)
        for key in [key for key in self.streams if key[0] == client]:
            self._free(key)

    def _slice(self, client: str, step_id: int, stream: int, start: int, tokens: list[int], num_sampled: int) -> None:
        key = (client, stream)
        if key not in self.streams or step_id < self.last_ids.get(key, -1):
            return
        reserved, held = self.streams[key]
        if start > len(held) or start + len(tokens) > reserved or num_sampled > len(tokens):
            return
        self.last_ids[key] = step_id
        if POISON in tokens:
            self.streams[key] = (reserved, held[:start])
            return
        held = held[:start] + tokens
        self.streams[key] = (reserved, held)
        ends = range(len(held) - num_sampled, len(held))
        self.results.append((client, step_id, stream, [expected_token(held[: end + 1], NUM_STAGES) for end in ends]))


clients = st.sampled_from(CLIENTS)
epochs = st.sampled_from([1, 1, 1, 2])
streams = st.sampled_from([1, 1, 2, 2, 3])
step_ids = st.integers(0, 4)
NONE_AHEAD = st.just(0)


def _joins(client: str, epoch: int) -> Message:
    chain = (Hop(WorkerId("me"), "tcp://127.0.0.1:1"),) * NUM_STAGES
    return Join(request=RequestId(0), client=ClientId(client), epoch=Epoch(epoch), chain=chain, is_ring=True)


def _opens(client: str, epoch: int, stream: int, num_tokens: int) -> Message:
    return Open(
        request=RequestId(0),
        client=ClientId(client),
        epoch=Epoch(epoch),
        stream=StreamId(stream),
        num_tokens=num_tokens,
        sampling=SamplingParams(),
    )


def _sends(client: str, epoch: int, step_id: int, stream: int, start: int, tokens: list[int], num_sampled: int, num_ahead: int) -> Message:
    # One slice a step: a step that fails takes all its slices along, which the plain model knows nothing of.
    return MicroBatch(
        stage_idx=0,
        steps=(step(step_id, row(stream, start, tokens, num_sampled=num_sampled, num_ahead=num_ahead), client=client, epoch=epoch),),
    )


tokens = st.lists(st.sampled_from([*range(1, 12), POISON]), min_size=1, max_size=5)


def messages(num_ahead: st.SearchStrategy[int]) -> st.SearchStrategy[Message]:
    """Three of four are steps of streams that are likely to be there."""
    return st.one_of(
        *[st.builds(_sends, clients, epochs, step_ids, streams, st.integers(0, 6), tokens, st.integers(0, 2), num_ahead)] * 4,
        *[st.builds(_sends, st.just("ann"), st.just(1), step_ids, st.just(1), st.integers(0, 4), tokens, st.just(1), num_ahead)] * 8,
        st.builds(_opens, clients, epochs, streams, st.integers(4, 12)),
        st.builds(_joins, clients, epochs),
        st.builds(lambda c, e, s: Close(client=ClientId(c), epoch=Epoch(e), streams=(StreamId(s),)), clients, epochs, streams),
        st.builds(lambda c: Leave(client=ClientId(c)), clients),
    )


warm_up = [_joins(client, 1) for client in CLIENTS] + [_opens(client, 1, stream, 12) for client in CLIENTS for stream in (1, 2)]


@st.composite
def scripts(draw: st.DrawFn, num_ahead: st.SearchStrategy[int] = NONE_AHEAD) -> list[list[Message]]:
    """Groups of messages, some of them repeated at once or later, cut at random places."""
    script = [*warm_up, *draw(st.lists(messages(num_ahead), max_size=30))]
    for message in draw(st.lists(st.sampled_from(script), max_size=6)):
        script.insert(draw(st.integers(0, len(script))), message)
    cuts = sorted(draw(st.lists(st.integers(0, len(script)), max_size=6)))
    edges = [0, *cuts, len(script)]
    return [script[start:end] for start, end in itertools.pairwise(edges) if end > start]


def _may_close_before_running(groups: list[list[Message]]) -> bool:
    """Whether a stream may be freed while steps of it wait: they are dropped then, which the plain model does not know."""
    return any(isinstance(message, Close | Leave | Join) for group in groups for message in group[1:])


@given(groups=scripts(), token_budget=st.sampled_from([1, 6, 1024]))
@settings(max_examples=300, deadline=None)
def test_the_worker_gives_the_tokens_of_the_plain_reading(groups: list[list[Message]], token_budget: int) -> None:
    # A message that frees comes first in its group, so that nothing waits when it is heard.
    regrouped: list[list[Message]] = []
    for group in groups:
        for message in group:
            if not regrouped or message is group[0] or isinstance(message, Close | Leave | Join):
                regrouped.append([])
            regrouped[-1].append(message)
    assert not _may_close_before_running(regrouped)
    plain = PlainModel()
    for message in (message for group in regrouped for message in group):
        plain.hear(message)
    runners = {idx: FakeRunner(idx, is_last=idx == NUM_STAGES - 1, poison=POISON) for idx in range(NUM_STAGES)}
    worker, sampler, sent = _serve(regrouped, runners, token_budget)
    results = [
        (link.peer.decode(), message.step_id, result.stream, tokens_of(result))
        for link, message in sent
        if isinstance(message, StepResult)
        for result in message.results
    ]
    for client in CLIENTS:
        for stream in (1, 2, 3):
            got = [result for result in results if (result[0], result[2]) == (client, stream)]
            assert got == [result for result in plain.results if (result[0], result[2]) == (client, stream)]
    _check_books(worker, runners, sampler)


@given(groups=scripts(st.integers(-1, 5)), token_budget=st.sampled_from([1, 6, 1024]))
@settings(max_examples=300, deadline=None)
def test_no_order_of_messages_breaks_the_books(groups: list[list[Message]], token_budget: int) -> None:
    runners = {idx: FakeRunner(idx, is_last=idx == NUM_STAGES - 1, kv_capacity_tokens=30, poison=POISON) for idx in range(NUM_STAGES)}
    worker, sampler, sent = _serve(groups, runners, token_budget)
    _check_books(worker, runners, sampler)
    # A worker takes no more steps than it was granted.
    asked = [message for group in groups for message in group if isinstance(message, MicroBatch)]
    granted = sum(1 + max(0, piece.num_ahead) for message in asked for one in message.steps for piece in one.slices)
    assert sum(isinstance(message, StepResult) for _, message in sent) <= granted
    assert all(isinstance(message, StepResult | StepFailed) or link in LINKS.values() for link, message in sent)


def _serve(
    groups: list[list[Message]], runners: dict[int, FakeRunner], token_budget: int
) -> tuple[Worker, FakeSampler, list[tuple[Link, Message]]]:
    worker = Worker(make_identity("me", NUM_STAGES, 0, 1), token_budget=token_budget)
    sampler = FakeSampler()
    hub = ScriptedHub([[Arrived(_link(message), message, None) for message in group] for group in groups])
    hub.server = Server(hub=hub, worker=worker, runners=runners, sampler=sampler, bundle=Path(), clock=lambda: 0.0)
    hub.server.serve()
    assert not worker.has_work
    return worker, sampler, hub.sent


def _link(message: Message) -> Link:
    if isinstance(message, MicroBatch):
        return LINKS[message.steps[0].client]
    assert isinstance(message, Join | Leave | Open | Close)
    return LINKS[message.client]


def _check_books(worker: Worker, runners: dict[int, FakeRunner], sampler: FakeSampler) -> None:
    """What is open is open everywhere, and nothing else is."""
    for stage_idx, runner in runners.items():
        assert worker.stage(stage_idx).num_streams == worker.num_streams == runner.num_streams
    assert len(sampler.streams) == worker.num_streams
