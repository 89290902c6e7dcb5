"""A worker without its loop, and the short way to speak to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_pshard.core.codec import Tensor, tensor_spec
from langchain_pshard.core.messages import (
    ClientId,
    Epoch,
    Hello,
    Hop,
    Join,
    Joined,
    Message,
    MicroBatch,
    Open,
    Opened,
    Refused,
    RequestId,
    Step,
    StreamId,
    WorkerId,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived, Link
from tests.support.fake_stages import make_identity
from workers.instructions import Dial, Instruction, OpenStream, Reply, Run
from workers.runners.runner import StreamKey
from workers.worker import Worker

ANN = Link(0, b"ann")
BOB = Link(0, b"bob")
NEXT = Link(7)
ME = "me"
RING_TWO = (("other", "tcp://127.0.0.1:1"), (ME, "tcp://127.0.0.1:2"))
CHAIN_TWO = ((ME, "tcp://127.0.0.1:1"), ("other", "tcp://127.0.0.1:2"))


def hops(*chain: tuple[str, str]) -> tuple[Hop, ...]:
    return tuple(Hop(WorkerId(worker), address) for worker, address in chain)


def request(number: int) -> RequestId:
    return RequestId(number)


def key(stream: int, client: str = "ann") -> StreamKey:
    return StreamKey(ClientId(client), StreamId(stream))


def join(
    epoch: int = 1, chain: Sequence[tuple[str, str]] = CHAIN_TWO, *, client: str = "ann", number: int = 10, is_ring: bool = False
) -> Join:
    return Join(request=request(number), client=ClientId(client), epoch=Epoch(epoch), chain=hops(*chain), is_ring=is_ring)


def ask_open(
    stream: int = 1, num_tokens: int = 32, *, client: str = "ann", epoch: int = 1, number: int = 20, end_tokens: Sequence[int] = ()
) -> Open:
    return Open(
        request=request(number),
        client=ClientId(client),
        epoch=Epoch(epoch),
        stream=StreamId(stream),
        num_tokens=num_tokens,
        sampling=SamplingParams(),
        end_tokens=tuple(end_tokens),
    )


class Bench:
    """A worker and the short way to speak to it."""

    def __init__(self, num_stages: int = 2, served: Sequence[int] = (0,), **options: Any) -> None:
        self.worker = Worker(make_identity(ME, num_stages, *served, **options))
        self.now_s = 100.0

    def hear(self, message: Message, link: Link = ANN, tensor: Tensor | None = None) -> list[Instruction]:
        return self.worker.received(Arrived(link, message, tensor), self.now_s)

    def join_alone(
        self, chain: Sequence[tuple[str, str]], client: str = "ann", link: Link = ANN, epoch: int = 1, *, is_ring: bool = False
    ) -> None:
        told = Reply(link=link, message=Joined(request=request(10), is_ring=is_ring))
        assert self.hear(join(epoch, chain, client=client, is_ring=is_ring), link)[-1] == told

    def join_via_next(self, client: str = "ann", link: Link = ANN) -> None:
        out = self.hear(join(client=client), link)
        assert Dial(address="tcp://127.0.0.1:2") in out
        assert self.reached(out, 2, 1) == [Reply(link=link, message=Joined(request=request(10)))]

    def join_ring(self, client: str = "ann", link: Link = ANN) -> None:
        """As the last worker of `RING_TWO`; the first one is at the end of `NEXT`."""
        out = self.hear(join(client=client, chain=RING_TWO, is_ring=True), link)
        assert self.reached(out, 2, 0) == [Reply(link=link, message=Joined(request=request(10), is_ring=True))]

    def reached(self, out: list[Instruction], num_stages: int, stage_idx: int) -> list[Instruction]:
        """The next worker, `other`, is dialled (`out`) unless it was, and says who it is over `NEXT`; what follows."""
        if isinstance(out[0], Dial):
            out = self.worker.dialled(out[0].address, NEXT, self.now_s)
        [hello] = out
        assert isinstance(hello, Reply)
        assert isinstance(hello.message, Hello)
        assert hello.link == NEXT
        return self.hear(make_identity("other", num_stages, stage_idx).welcome(hello.message.request), NEXT)

    def open(
        self,
        stream: int = 1,
        *,
        client: str = "ann",
        link: Link = ANN,
        epoch: int = 1,
        num_tokens: int = 32,
        end_tokens: Sequence[int] = (),
    ) -> None:
        out = self.hear(ask_open(stream, num_tokens, client=client, epoch=epoch, end_tokens=end_tokens), link)
        while isinstance(out[0], OpenStream):
            out = self.worker.opened(out[0].key, 0)
        [reply] = out
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, Opened)
        assert (reply.link, reply.message.request, set(reply.message.cached)) == (link, request(20), {0})

    def send(self, *steps: Step, stage_idx: int = 0, tensor: Tensor | None = None, link: Link = ANN) -> list[Instruction]:
        spec = None if tensor is None else tensor_spec(tensor)
        return self.hear(MicroBatch(stage_idx=stage_idx, steps=steps, hidden=spec), link, tensor)

    def run(self) -> Run:
        out = self.worker.next_run()
        assert len(out) == 1
        assert isinstance(out[0], Run)
        return out[0]


def refusal(out: list[Instruction]) -> Refused:
    assert len(out) == 1
    assert isinstance(out[0], Reply)
    assert isinstance(out[0].message, Refused)
    return out[0].message
