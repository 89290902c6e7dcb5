"""A worker on a real wire: the real loop and hub in a thread, an engine without a model, clients that speak ZeroMQ."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from langchain_pshard.core.bundle import FileEntry
from langchain_pshard.core.codec import Tensor, encode, tensor_spec
from langchain_pshard.core.messages import (
    FETCH_CHUNK_BYTES,
    PROTOCOL_VERSION,
    ClientId,
    Close,
    Epoch,
    Fetch,
    Fetched,
    GetStatus,
    Hello,
    Hop,
    Join,
    Joined,
    Message,
    MicroBatch,
    Open,
    Opened,
    Ping,
    Pong,
    Refused,
    RequestId,
    SliceKind,
    Status,
    Step,
    StepFailed,
    StepResult,
    StreamId,
    TensorSpec,
    Welcome,
    WorkerId,
)
from langchain_pshard.core.numerics import DType
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived
from langchain_pshard.transport.zeromq import ZmqHub
from tests.support.fake_stages import HIDDEN, FakeRunner, FakeSampler, expected_token, make_identity, row, step, tokens_of
from workers.membership import LEASE_S
from workers.server import Server
from workers.worker import Worker

TIMEOUT_S = 10.0
M = TypeVar("M")


class FakeClock:
    """Real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class Running:
    """A worker that serves in a thread."""

    id: str
    address: str
    server: Server
    thread: threading.Thread
    clock: FakeClock
    runners: dict[int, FakeRunner]


@contextlib.contextmanager
def running(name: str, num_stages: int, *served: int, bundle: Path = Path(), files: tuple[FileEntry, ...] = ()) -> Iterator[Running]:
    hub = ZmqHub()
    address = hub.listen("tcp://127.0.0.1:0")
    runners = {idx: FakeRunner(idx, is_last=idx == num_stages - 1) for idx in served}
    clock = FakeClock()
    server = Server(
        hub=hub,
        worker=Worker(make_identity(name, num_stages, *served, tokenizer_files=files)),
        runners=runners,
        sampler=FakeSampler(),
        bundle=bundle,
        clock=clock,
    )

    def serve() -> None:
        with hub:
            server.serve()

    thread = threading.Thread(target=serve, name=name)
    thread.start()
    try:
        yield Running(id=name, address=address, server=server, thread=thread, clock=clock, runners=runners)
    finally:
        server.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


class Client:
    """One client as far as the wire is concerned."""

    def __init__(self, name: str, *workers: Running) -> None:
        self.id = ClientId(name)
        self.hub = ZmqHub()
        self.links = [self.hub.dial(worker.address) for worker in workers]
        self._inbox: list[Arrived] = []

    def send(self, message: Message, tensor: Tensor | None = None, worker: int = 0) -> None:
        assert self.hub.send(self.links[worker], message, tensor)

    def receive(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True) -> M:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for arrived in list(self._inbox):
                if isinstance(arrived.message, kind) and matches(arrived.message):
                    self._inbox.remove(arrived)
                    return arrived.message
            self._inbox += [event for event in self.hub.poll(0.1) if isinstance(event, Arrived)]
        raise AssertionError(f"no {kind.__name__} within {TIMEOUT_S} s; got {[arrived.message for arrived in self._inbox]}")

    def join(self, *chain: Running, epoch: int = 1, is_ring: bool = False) -> None:
        hops = tuple(Hop(WorkerId(worker.id), worker.address) for worker in chain)
        for idx in range(len(self.links)):
            join = Join(request=RequestId(epoch), client=self.id, epoch=Epoch(epoch), chain=hops, is_ring=is_ring)
            self.send(join, worker=idx)
        for _ in self.links:
            self.receive(Joined, lambda joined: joined.request == epoch)

    def open(self, stream: int, num_tokens: int = 64, epoch: int = 1) -> None:
        ask = Open(
            request=RequestId(100 + stream),
            client=self.id,
            epoch=Epoch(epoch),
            stream=StreamId(stream),
            num_tokens=num_tokens,
            sampling=SamplingParams(),
        )
        for idx in range(len(self.links)):
            self.send(ask, worker=idx)
        for _ in self.links:
            self.receive(Opened, lambda opened: opened.request == 100 + stream)

    def close_stream(self, stream: int, epoch: int = 1) -> None:
        for idx in range(len(self.links)):
            self.send(Close(client=self.id, epoch=Epoch(epoch), streams=(StreamId(stream),)), worker=idx)

    def step(self, one: Step) -> StepResult:
        self.send(MicroBatch(stage_idx=0, steps=(one,)))
        return self.receive(StepResult, lambda result: (result.epoch, result.step_id) == (one.epoch, one.step_id))

    def generate(self, stream: int, prompt: list[int], num_tokens: int, first_step: int = 1) -> list[int]:
        tokens = list(prompt)
        first = row(stream, 0, prompt, kind=SliceKind.PREFILL)
        for number in range(num_tokens):
            piece = first if number == 0 else row(stream, len(tokens) - 1, tokens[-1:])
            tokens += tokens_of(self.step(step(first_step + number, piece, client=self.id)).results[0])
        return tokens[len(prompt) :]

    def leftovers(self) -> list[Message]:
        """What came and nobody waited for: all of it, because a worker answers in order."""
        self.send(Ping(request=RequestId(901)))
        self.receive(Pong)
        return [arrived.message for arrived in self._inbox]

    def status(self, worker: int = 0) -> Status:
        self.send(GetStatus(request=RequestId(900)), worker=worker)
        return self.receive(Status)


@contextlib.contextmanager
def client_of(name: str, *workers: Running) -> Iterator[Client]:
    client = Client(name, *workers)
    with client.hub:
        yield client


def plain(prompt: list[int], num_tokens: int, num_stages: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(expected_token(tokens, num_stages))
    return tokens[len(prompt) :]


def test_two_workers_serve_two_clients_apart() -> None:
    with (
        running("first", 2, 0) as first,
        running("second", 2, 1) as second,
        client_of("ann", first, second) as ann,
        client_of("bob", first, second) as bob,
    ):
        for client in (ann, bob):
            client.join(first, second)
            client.open(1)
        assert ann.generate(1, [1, 2, 3], 12) == plain([1, 2, 3], 12, 2)
        assert bob.generate(1, [4, 5], 12) == plain([4, 5], 12, 2)
        ann.send(MicroBatch(stage_idx=0, steps=(step(50, row(1, 0, [9, 9])),)))
        bob.send(MicroBatch(stage_idx=0, steps=(step(50, row(1, 0, [8]), client="bob"),)))
        assert tokens_of(ann.receive(StepResult).results[0]) == plain([9, 9], 1, 2)
        assert tokens_of(bob.receive(StepResult).results[0]) == plain([8], 1, 2)
        assert ann.status().num_clients == 2


def test_the_same_worker_twice_in_a_ring() -> None:
    with running("ends", 3, 0, 2) as ends, running("middle", 3, 1) as middle, client_of("ann", ends, middle) as ann:
        ann.join(ends, middle, ends)
        ann.open(1)
        assert ann.generate(1, [1, 2, 3], 8) == plain([1, 2, 3], 8, 3)


def test_a_repeated_step_gets_the_same_answer_and_rewinds_are_exact() -> None:
    with running("w", 1, 0) as worker, client_of("ann", worker) as ann:
        ann.join(worker)
        ann.open(1)
        first = ann.step(step(1, row(1, 0, [1, 2, 3], num_sampled=2)))
        again = ann.step(step(1, row(1, 0, [1, 2, 3], num_sampled=2)))
        assert again.results == first.results
        ann.step(step(2, row(1, 3, [4, 5])))
        assert tokens_of(ann.step(step(3, row(1, 4, [7]))).results[0]) == [expected_token([1, 2, 3, 4, 7], 1)]
        ann.send(MicroBatch(stage_idx=0, steps=(step(2, row(1, 3, [4, 5])),)))  # a late duplicate: no answer, no effect
        assert tokens_of(ann.step(step(4, row(1, 5, [8]))).results[0]) == [expected_token([1, 2, 3, 4, 7, 8], 1)]
        assert ann.leftovers() == []


def test_an_old_epoch_is_dropped_and_its_streams_are_gone() -> None:
    with running("w", 1, 0) as worker, client_of("ann", worker) as ann:
        ann.join(worker)
        ann.open(1)
        ann.step(step(1, row(1, 0, [1, 2])))
        ann.join(worker, epoch=2)
        ann.send(MicroBatch(stage_idx=0, steps=(step(2, row(1, 2, [3])),)))
        ann.send(MicroBatch(stage_idx=0, steps=(step(1, row(1, 2, [3]), epoch=2),)))
        failed = ann.receive(StepFailed)
        assert (failed.epoch, failed.step_id, failed.failures[0].code) == (2, 1, "state-lost")
        assert worker.runners[0].num_streams == 0
        ann.open(1, epoch=2)
        assert tokens_of(ann.step(step(2, row(1, 0, [5, 6]), epoch=2)).results[0]) == [expected_token([5, 6], 1)]


def test_a_lease_runs_out() -> None:
    with running("w", 1, 0) as worker, client_of("ann", worker) as ann, client_of("bob", worker) as bob:
        ann.join(worker)
        ann.open(1)
        worker.clock.ahead_s += LEASE_S + 1
        deadline = time.monotonic() + TIMEOUT_S
        while bob.status().num_clients and time.monotonic() < deadline:
            time.sleep(0.05)
        assert bob.status().stages[0].num_streams == 0
        assert worker.runners[0].num_streams == 0


def test_a_restarted_next_worker_is_noticed_at_the_next_join() -> None:
    with running("first", 2, 0) as first:
        with running("second", 2, 1) as second, client_of("ann", first, second) as ann:
            ann.join(first, second)
        with client_of("ann", first) as ann:
            gone = Hop(WorkerId("second"), second.address)
            join = Join(request=RequestId(5), client=ann.id, epoch=Epoch(2), chain=(Hop(WorkerId("first"), first.address), gone))
            ann.send(join)
            refused = ann.receive(Refused)
            assert refused.code == "worker-unreachable"
            assert first.address in refused.message
            assert second.address in refused.message


def test_tokenizer_files_arrive_piece_by_piece(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2 * FETCH_CHUNK_BYTES + 5)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(data)
    entry = FileEntry(path="tokenizer/tokenizer.json", num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    with running("w", 1, 0, bundle=tmp_path, files=(entry,)) as worker, client_of("ann", worker) as ann:
        got = b""
        while len(got) < len(data):
            ann.send(Fetch(request=RequestId(1), sha256=entry.sha256, offset=len(got)))
            piece = ann.receive(Fetched)
            assert piece.num_bytes == len(data)
            got += piece.data
        assert got == data
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
        ann.send(Fetch(request=RequestId(2), sha256=entry.sha256, offset=0))
        assert ann.receive(Refused).code == "bundle"


def test_nonsense_leaves_the_worker_alive_and_is_counted() -> None:
    rng = random.Random(0)
    huge = MicroBatch(stage_idx=0, steps=(step(1, row(1, 0, [1])),), hidden=TensorSpec(DType.F32, (2**40, 2**40)))
    short = MicroBatch(stage_idx=0, steps=(step(1, row(1, 0, [1])),), hidden=TensorSpec(DType.F32, (1, HIDDEN)))
    negative = MicroBatch(stage_idx=0, steps=(), hidden=TensorSpec(DType.F32, (-1, -4)))
    good = encode(Ping(request=RequestId(1)))
    frames: list[list[bytes]] = [
        *([rng.randbytes(rng.randrange(1, 200))] for _ in range(200)),
        [b""],
        [b"", b"", b""],
        [bytes(good[0]), b"x"],
        [bytes(encode(huge)[0]), b"x" * 16],
        [bytes(encode(short)[0]), b"x" * 15],
        [bytes(encode(short)[0])],
        [bytes(encode(negative)[0]), b"x" * 16],
        [msgspec.msgpack.encode(["no-such-message", 1])],
        [msgspec.msgpack.encode(["ping"])],
        [b"\x91" * 100_000],
    ]
    with running("w", 1, 0) as worker, client_of("ann", worker) as ann:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(worker.address)
        for parts in frames:
            dealer.send_multipart(parts)
        dealer.send_multipart(good)
        assert dealer.poll(int(TIMEOUT_S * 1000))
        dealer.recv_multipart()
        assert ann.status().num_malformed == len(frames)
        dealer.close(linger=0)
        context.term()
        ann.join(worker)
        ann.open(1)
        assert ann.generate(1, [1, 2, 3], 4) == plain([1, 2, 3], 4, 1)


def test_slices_that_make_no_sense_are_told_and_the_rest_goes_on() -> None:
    with running("last", 2, 1) as last, running("first", 2, 0) as first, client_of("ann", first, last) as ann:
        ann.join(first, last)
        ann.open(1)
        ann.open(2)
        bad = row(1, 0, [1_000_000])
        result = ann.step(step(1, bad, row(2, 0, [3, 4])))
        assert [one.stream for one in result.results] == [2]
        assert tokens_of(result.results[0]) == [expected_token([3, 4], 2)]
        assert ann.receive(StepFailed).failures[0].code == "protocol"
        for tensor in (np.zeros((3, HIDDEN), np.float32), np.zeros((1, HIDDEN), np.uint16)):
            batch = MicroBatch(stage_idx=1, steps=(step(2, row(1, 0, [1])),), hidden=tensor_spec(tensor))
            ann.send(batch, tensor, worker=1)
            failed = ann.receive(StepFailed)
            assert (failed.stage_idx, failed.failures[0].code) == (1, "protocol")


def test_hello_and_another_version() -> None:
    with running("w", 1, 0) as worker, client_of("ann", worker) as ann:
        ann.send(Hello(request=RequestId(1), protocol=PROTOCOL_VERSION, software="x"))
        assert ann.receive(Welcome).worker == "w"
        ann.send(Hello(request=RequestId(2), protocol=99, software="x"))
        refused = ann.receive(Refused)
        assert (refused.request, refused.code) == (2, "protocol")


def test_draining_ends_at_once_without_streams_and_after_the_last_one_with() -> None:
    with running("idle", 1, 0) as idle:
        idle.server.drain()
        idle.thread.join(TIMEOUT_S)
        assert not idle.thread.is_alive()
    with running("busy", 1, 0) as busy, client_of("ann", busy) as ann:
        ann.join(busy)
        ann.open(1)
        busy.server.drain()
        assert ann.generate(1, [1, 2], 3) == plain([1, 2], 3, 1)
        ask = Open(request=RequestId(7), client=ann.id, epoch=Epoch(1), stream=StreamId(2), num_tokens=4, sampling=SamplingParams())
        ann.send(ask)
        assert ann.receive(Refused).code == "worker-lost"
        assert busy.thread.is_alive()
        busy.clock.ahead_s += 31
        busy.thread.join(TIMEOUT_S)
        assert not busy.thread.is_alive()
