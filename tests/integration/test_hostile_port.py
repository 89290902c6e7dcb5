"""What strangers send to a worker's port while it serves: nothing of it reaches the tokens of others, and the worker lives."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from benchmarks.fleet import RunningWorker, running_worker
from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.messages import (
    ClientId,
    Close,
    Epoch,
    GetStatus,
    Hello,
    Hop,
    Join,
    Leave,
    Message,
    MicroBatch,
    Open,
    Ping,
    RequestId,
    Slice,
    SliceKind,
    StageTiming,
    Status,
    Step,
    StepFailed,
    StepId,
    StepResult,
    StreamId,
    WorkerId,
)
from langchain_pshard.core.numerics import DType, TensorSpec
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.bundles import TinyBundle

NUM_HOSTILE = 1500
PARAMS = GenerationParams(max_tokens=120, ignore_eos=True)
HOSTILE_INTS = (0, 1, -1, 255, 2**31, 2**63 - 1, -(2**63), 2**64 - 1)
HOSTILE_SHAPES = ((0,), (0, 2**62), (1,) * 70, (), (-1, 64), (2**63, 2**63))
HOSTILE_ADDRESSES = ("", "x", "tcp://a b:1", "tcp://*:1", "tcp://127.0.0.1:0", "tcp://bücher:1", "tcp://127.0.0.1:1")


class Stranger:
    """Speaks the protocol fluently, lies in every field, and knows one stage well enough to get its nonsense computed."""

    def __init__(self, rng: random.Random, workers: list[str], hidden_size: int) -> None:
        self._rng = rng
        self._workers = workers
        self._hidden_size = hidden_size
        self._step = 0

    def number(self) -> int:
        return self._rng.choice(HOSTILE_INTS) if self._rng.random() < 0.1 else self._rng.randrange(40)

    def frames(self, stage_idx: int) -> list[bytes]:
        """Random bytes, a header with flipped bytes, or a valid message that makes no sense."""
        rng = self._rng
        if rng.random() < 0.05:
            return [rng.randbytes(rng.choice([0, 1, 100, 3000])) for _ in range(rng.randrange(1, 4))]
        message, tensor = self._message(stage_idx)
        header = bytearray(msgspec.msgpack.encode(message))
        if rng.random() < 0.05:
            header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
        return [bytes(header), *([] if tensor is None else [tensor])]

    def _message(self, stage_idx: int) -> tuple[Message, bytes | None]:
        rng = self._rng
        request, client = RequestId(abs(self.number())), ClientId(rng.choice(["eve", "eve", "eve", "", "x" * 70]))
        stream = StreamId(rng.randrange(3))
        epoch = Epoch(1 if rng.random() < 0.95 else self.number())
        match rng.choice(["hello", "join", "open", "open", "close", "ping", "leave", *["batch"] * 8]):
            case "hello":
                return Hello(request=request, protocol=self.number(), software="?" * 1000), None
            case "join":
                chain = [Hop(WorkerId(worker), f"tcp://127.0.0.1:{7 + idx}") for idx, worker in enumerate(self._workers)]
                if rng.random() < 0.3:
                    chain[rng.randrange(len(chain))] = Hop(WorkerId(rng.choice(self._workers)), rng.choice(HOSTILE_ADDRESSES))
                return Join(request=request, client=client, epoch=epoch, chain=tuple(chain)), None
            case "open":
                sampling = SamplingParams(temperature=rng.choice([0.0, 1e-300, 100.0]), top_p=1e-300, repetition_penalty=0.01)
                num_tokens = 60 if rng.random() < 0.9 else self.number()
                return Open(request=request, client=client, epoch=epoch, stream=stream, num_tokens=num_tokens, sampling=sampling), None
            case "close":
                return Close(client=client, epoch=epoch, streams=(stream, stream)), None
            case "ping":
                return Ping(request=request, client=client), None
            case "leave":
                return Leave(client=client) if rng.random() < 0.1 else GetStatus(request=request), None
            case _:
                return self._batch(stage_idx, client, epoch)

    def _batch(self, stage_idx: int, client: ClientId, epoch: Epoch) -> tuple[MicroBatch, bytes | None]:
        rng = self._rng
        self._step += 1
        slices = tuple(self._slice() for _ in range(rng.randrange(1, 3)))
        step = Step(client=client, epoch=epoch, step_id=StepId(self._step), slices=slices, timings=(StageTiming(2**64 - 1, -1),))
        if stage_idx == 0 or rng.random() < 0.02:
            return MicroBatch(stage_idx=stage_idx if rng.random() < 0.95 else self.number(), steps=(step,)), None
        shape: tuple[int, ...] = (sum(piece.num_tokens for piece in slices), self._hidden_size)
        hidden = np.full(shape, rng.choice([np.nan, np.inf, 1e30, 0.0, 1.0]), dtype="<f4").tobytes()
        if rng.random() < 0.1:
            shape, hidden = rng.choice(HOSTILE_SHAPES), b""
        return MicroBatch(stage_idx=stage_idx, steps=(step,), hidden=TensorSpec(DType.F32, shape)), hidden

    def _slice(self) -> Slice:
        rng = self._rng
        num_tokens = rng.choice([1, 2, 30])
        return Slice(
            stream=StreamId(rng.randrange(3)),
            start=0 if rng.random() < 0.8 else self.number(),
            tokens=pack_tokens([rng.randrange(200) for _ in range(num_tokens)]) + (b"?" if rng.random() < 0.02 else b""),
            kind=rng.choice(list(SliceKind)),
            num_sampled=num_tokens if rng.random() < 0.9 else self.number(),
        )


class Attack:
    """Sends to every worker until enough was sent, and counts what steps came back."""

    def __init__(self, workers: list[RunningWorker], strangers: list[Stranger]) -> None:
        self._workers = workers
        self._strangers = strangers
        self.answers: set[str] = set()
        self.failure_codes: set[str] = set()

    def run(self) -> None:
        context = zmq.Context()
        dealers = [context.socket(zmq.DEALER) for _ in self._workers]
        decoder = msgspec.msgpack.Decoder(Status | StepFailed | StepResult)
        for dealer, worker in zip(dealers, self._workers, strict=True):
            dealer.connect(worker.address)
        for turn in range(NUM_HOSTILE):
            for stage_idx, (dealer, stranger) in enumerate(zip(dealers, self._strangers, strict=True)):
                if dealer.poll(1000, zmq.POLLOUT):
                    dealer.send_multipart(stranger.frames(stage_idx))
                while dealer.poll(1 if turn % 20 == 0 else 0):
                    self._note(decoder, dealer.recv_multipart()[0])
                if turn % 300 == 0:  # no ZeroMQ at all
                    host, _, port = self._workers[stage_idx].address.removeprefix("tcp://").rpartition(":")
                    with socket.create_connection((host, int(port))) as raw:
                        raw.sendall(random.Random(turn).randbytes(5000))
        for dealer in dealers:
            dealer.close(linger=0)
        context.term()

    def _note(self, decoder: msgspec.msgpack.Decoder[Status | StepFailed | StepResult], header: bytes) -> None:
        try:
            message = decoder.decode(header)
        except msgspec.ValidationError:
            return  # an answer of another kind
        self.answers.add(type(message).__name__)
        if isinstance(message, StepFailed):
            self.failure_codes |= {failure.code for failure in message.failures}


@pytest.fixture(scope="module")
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle("llama", num_stages=2)


def test_nonsense_on_the_port_changes_no_token_and_is_counted(bundle: Path, tmp_path: Path) -> None:
    with running_worker(bundle, 0) as first, running_worker(bundle, 1) as second:
        addresses = [first.address, second.address]
        with PipelineClient.connect(addresses, options=ClientOptions(cache_dir=tmp_path)) as client:
            expected = client.complete("hello there", PARAMS).token_ids
            names = [stage.worker for stage in client.chain.stages]
            strangers = [Stranger(random.Random(seed), list(names), client.manifest.hidden_size) for seed in (1, 2)]
            attack = Attack([first, second], strangers)
            thread = threading.Thread(target=attack.run)
            thread.start()
            texts = [client.complete("hello there", PARAMS).token_ids]
            while thread.is_alive():
                texts.append(client.complete("hello there", PARAMS).token_ids)
            thread.join()
            assert set(texts) == {expected}
            health = client.status()
    assert attack.answers == {"Status", "StepFailed", "StepResult"}  # the nonsense came as far as the engine
    assert {"protocol", "state-lost", "inference"} <= attack.failure_codes
    assert [worker.process.returncode for worker in (first, second)] == [0, 0]
    assert all(worker.status is not None and worker.status.num_malformed > NUM_HOSTILE / 100 for worker in health.workers)
