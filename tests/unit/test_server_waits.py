"""How a worker's loop waits for its next step: awake for a while where steps come in quick succession, asleep otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.messages import ClientId, Epoch, Hop, Join, Message, MicroBatch, Open, RequestId, SliceKind, StreamId, WorkerId
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived, Event, Link
from tests.support.fake_stages import FakeRunner, FakeSampler, make_identity, row, step
from workers.server import IDLE_POLL_S, Server
from workers.worker import Worker

ANN = Link(0, b"ann")
POLL_S = 1e-3
"""What a look that finds nothing takes here."""


class ScriptedHub:
    """Plays messages at their times and notes how long the worker was ready to sleep; the last one stops the worker."""

    def __init__(self, script: Sequence[tuple[float, Message]], end_s: float) -> None:
        self.now_s = 0.0
        self.waits: list[tuple[float, float]] = []  # when, and for how long at most
        self.server: Server | None = None
        self.num_sent = 0
        self._script = list(script)
        self._end_s = end_s

    @property
    def num_malformed(self) -> int:
        return 0

    def poll(self, timeout_s: float | None) -> list[Event]:
        assert timeout_s is not None
        assert self.server is not None
        self.waits.append((self.now_s, timeout_s))
        next_s = self._script[0][0] if self._script else self._end_s
        if next_s <= self.now_s + timeout_s:
            self.now_s = max(self.now_s, next_s)
            if self._script:
                return [Arrived(ANN, self._script.pop(0)[1], None)]
            self.server.stop()
        else:
            self.now_s += timeout_s or POLL_S
        return []

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        self.num_sent += 1
        return True

    def listen(self, address: str) -> str:
        raise AssertionError("a worker listens before it serves")

    def dial(self, address: str) -> Link:
        raise AssertionError("one stage has no next")

    def hang_up(self, link: Link) -> None:
        raise AssertionError("one stage has no next")

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def serve(step_times: Sequence[float], end_s: float, **options: float) -> ScriptedHub:
    """Serve one stream whose steps arrive at these times."""
    client = ClientId("ann")
    script: list[tuple[float, Message]] = [
        (0.0, Join(request=RequestId(1), client=client, epoch=Epoch(1), chain=(Hop(WorkerId("w"), "tcp://a:1"),))),
        (
            0.0,
            Open(request=RequestId(2), client=client, epoch=Epoch(1), stream=StreamId(1), num_tokens=64, sampling=SamplingParams()),
        ),
    ]
    for number, at_s in enumerate(step_times, start=1):
        piece = row(1, 0, [5, 6], kind=SliceKind.PREFILL) if number == 1 else row(1, number, [7])
        script.append((at_s, MicroBatch(stage_idx=0, steps=(step(number, piece, client="ann"),))))
    hub = ScriptedHub(script, end_s)
    hub.server = Server(
        hub=hub,
        worker=Worker(make_identity("w", 1, 0)),
        runners={0: FakeRunner(0, is_last=True)},
        sampler=FakeSampler(),
        bundle=Path(),
        clock=lambda: hub.now_s,
        **options,
    )
    hub.server.serve()
    assert hub.num_sent == 2 + len(step_times), "every step was answered"
    return hub


def asleep(hub: ScriptedHub) -> list[float]:
    """When it was ready to sleep."""
    return [now_s for now_s, timeout_s in hub.waits if timeout_s]


def test_between_close_steps_it_never_sleeps_and_after_them_it_does() -> None:
    hub = serve([1.000, 1.004, 1.009, 1.015], 1.5, busy_poll_s=0.010)
    assert {timeout_s for _, timeout_s in hub.waits} == {0.0, IDLE_POLL_S}
    # Until the second step nothing says that more will come closely.
    assert [now_s for now_s in asleep(hub) if now_s >= 1.0] == pytest.approx([1.000, 1.025], abs=2 * POLL_S)


def test_between_steps_far_apart_it_always_sleeps() -> None:
    hub = serve([1.00, 1.02, 1.04, 1.06], 1.5, busy_poll_s=0.010)
    assert all(timeout_s == IDLE_POLL_S for _, timeout_s in hub.waits)
    assert len(hub.waits) < 12


def test_switched_off_it_always_sleeps() -> None:
    hub = serve([1.000, 1.001, 1.002, 1.003], 1.5, busy_poll_s=0.0)
    assert all(timeout_s == IDLE_POLL_S for _, timeout_s in hub.waits)
