"""What a worker decides, as exact lists of instructions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from langchain_pshard.core.bundle import FileEntry
from langchain_pshard.core.codec import Tensor, pack_tokens, tensor_spec
from langchain_pshard.core.errors import CapacityError, InferenceError
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
    Leave,
    Message,
    MicroBatch,
    Open,
    Opened,
    Ping,
    Pong,
    Refused,
    RequestId,
    SliceResult,
    StageTiming,
    Step,
    StepFailed,
    StepResult,
    StreamFailure,
    StreamId,
    Welcome,
    WorkerId,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Arrived, Link
from tests.support.fake_stages import HIDDEN, make_identity, row, step
from workers.instructions import CloseStream, Dial, Forward, HangUp, Instruction, OpenStream, Reply, ReplyPiece, ReplyStatus, Run
from workers.membership import JOIN_TIMEOUT_S, LEASE_S, MAX_CLIENTS
from workers.runners.runner import StreamKey
from workers.worker import Worker

ANN = Link(0, b"ann")
BOB = Link(0, b"bob")
NEXT = Link(7)
ME = "me"
CHAIN_TWO = ((ME, "tcp://127.0.0.1:1"), ("other", "tcp://127.0.0.1:2"))


def hops(*chain: tuple[str, str]) -> tuple[Hop, ...]:
    return tuple(Hop(WorkerId(worker), address) for worker, address in chain)


def request(number: int) -> RequestId:
    return RequestId(number)


def key(stream: int, client: str = "ann") -> StreamKey:
    return StreamKey(ClientId(client), StreamId(stream))


def join(epoch: int = 1, chain: Sequence[tuple[str, str]] = CHAIN_TWO, *, client: str = "ann", number: int = 10) -> Join:
    return Join(request=request(number), client=ClientId(client), epoch=Epoch(epoch), chain=hops(*chain))


def ask_open(stream: int = 1, num_tokens: int = 32, *, client: str = "ann", epoch: int = 1, number: int = 20) -> Open:
    return Open(
        request=request(number),
        client=ClientId(client),
        epoch=Epoch(epoch),
        stream=StreamId(stream),
        num_tokens=num_tokens,
        sampling=SamplingParams(),
    )


class Bench:
    """A worker and the short way to speak to it."""

    def __init__(self, num_stages: int = 2, served: Sequence[int] = (0,), **options: Any) -> None:
        self.worker = Worker(make_identity(ME, num_stages, *served, **options))
        self.now_s = 100.0

    def hear(self, message: Message, link: Link = ANN, tensor: Tensor | None = None) -> list[Instruction]:
        return self.worker.received(Arrived(link, message, tensor), self.now_s)

    def join_alone(self, chain: Sequence[tuple[str, str]], client: str = "ann", link: Link = ANN, epoch: int = 1) -> None:
        assert self.hear(join(epoch, chain, client=client), link)[-1] == Reply(link=link, message=Joined(request=request(10)))

    def join_via_next(self, client: str = "ann", link: Link = ANN) -> None:
        assert Dial(address="tcp://127.0.0.1:2") in self.hear(join(client=client), link)
        hello = self.worker.dialled("tcp://127.0.0.1:2", NEXT, self.now_s)[0]
        assert isinstance(hello, Reply)
        assert isinstance(hello.message, Hello)
        welcome = make_identity("other", 2, 1).welcome(hello.message.request)
        assert self.hear(welcome, NEXT) == [Reply(link=link, message=Joined(request=request(10)))]

    def open(self, stream: int = 1, *, client: str = "ann", link: Link = ANN) -> None:
        out = self.hear(ask_open(stream, client=client), link)
        while isinstance(out[0], OpenStream):
            out = self.worker.opened(out[0].key, None)
        assert out == [Reply(link=link, message=Opened(request=request(20)))]

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


# --- hello, ping, fetch ----------------------------------------------------------------------------------------------


def test_hello_is_answered_with_who_we_are() -> None:
    bench = Bench()
    out = bench.hear(Hello(request=request(3), protocol=PROTOCOL_VERSION, software="9"))
    assert out == [Reply(link=ANN, message=make_identity(ME, 2, 0).welcome(request(3)))]
    welcome = out[0].message if isinstance(out[0], Reply) else None
    assert isinstance(welcome, Welcome)
    assert (welcome.worker, welcome.request, [offer.stage_idx for offer in welcome.stages]) == (ME, 3, [0])


@pytest.mark.parametrize(("theirs", "remedy"), [(PROTOCOL_VERSION + 1, "upgrade this worker"), (PROTOCOL_VERSION - 1, "upgrade you")])
def test_another_protocol_version_is_refused_with_both_versions_and_the_remedy(theirs: int, remedy: str) -> None:
    refused = refusal(Bench().hear(Hello(request=request(3), protocol=theirs, software="9.9")))
    assert refused.code == "protocol"
    for part in (f"protocol {theirs} (PShard 9.9)", f"{PROTOCOL_VERSION} (PShard 1.0)", remedy):
        assert part in refused.message


def test_ping_and_status() -> None:
    bench = Bench()
    assert bench.hear(Ping(request=request(1))) == [Reply(link=ANN, message=Pong(request=request(1)))]
    assert bench.hear(GetStatus(request=request(2))) == [ReplyStatus(link=ANN, request=request(2))]


def test_fetch_gives_the_manifest_by_fingerprint_and_tokenizer_files_by_hash() -> None:
    file = FileEntry(path="tokenizer/tokenizer.json", num_bytes=10, sha256=hashlib.sha256(b"x" * 10).hexdigest())
    bench = Bench(tokenizer_files=(file,))
    manifest = make_identity(ME, 2, 0, tokenizer_files=(file,)).manifest
    data = manifest.to_json()
    assert len(data) < FETCH_CHUNK_BYTES
    assert bench.hear(Fetch(request=request(1), sha256=manifest.fingerprint, offset=5)) == [
        Reply(link=ANN, message=Fetched(request=request(1), num_bytes=len(data), data=data[5:]))
    ]
    assert bench.hear(Fetch(request=request(2), sha256=file.sha256, offset=4)) == [
        ReplyPiece(link=ANN, request=request(2), file=file, offset=4)
    ]
    assert refusal(bench.hear(Fetch(request=request(3), sha256="../../etc/passwd", offset=0))).code == "bundle"
    assert refusal(bench.hear(Fetch(request=request(3), sha256=file.sha256, offset=11))).code == "protocol"
    assert refusal(bench.hear(Fetch(request=request(3), sha256=file.sha256, offset=-1))).code == "protocol"


def test_an_answer_nobody_asked_for_is_counted() -> None:
    bench = Bench()
    assert bench.hear(Joined(request=request(1))) == []
    assert bench.hear(StepResult(epoch=Epoch(1), step_id=step(1).step_id, results=(), timings=())) == []
    assert bench.worker.num_malformed == 2


# --- joining ---------------------------------------------------------------------------------------------------------


def test_joined_is_said_when_the_next_worker_has_answered_with_the_expected_id() -> None:
    bench = Bench()
    assert bench.hear(join()) == [Dial(address="tcp://127.0.0.1:2")]
    assert refusal(bench.hear(ask_open())).code == "state-lost"
    hello = Hello(request=request(1), protocol=PROTOCOL_VERSION, software="1.0")
    assert bench.worker.dialled("tcp://127.0.0.1:2", NEXT, bench.now_s) == [Reply(link=NEXT, message=hello)]
    assert bench.hear(make_identity("other", 2, 1).welcome(request(1)), NEXT) == [Reply(link=ANN, message=Joined(request=request(10)))]


def test_another_worker_at_the_address_is_refused_and_hung_up() -> None:
    bench = Bench()
    bench.hear(join())
    bench.worker.dialled("tcp://127.0.0.1:2", NEXT, bench.now_s)
    out = bench.hear(make_identity("stranger", 2, 1).welcome(request(1)), NEXT)
    assert out[1:] == [HangUp(link=NEXT)]
    refused = refusal(out[:1])
    assert refused.code == "fleet-mismatch"
    for part in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "other", "stranger"):
        assert part in refused.message
    assert bench.worker.num_clients == 0


def test_a_silent_next_worker_is_asked_again_and_given_up_after_five_seconds() -> None:
    bench = Bench()
    bench.hear(join())
    bench.worker.dialled("tcp://127.0.0.1:2", NEXT, bench.now_s)
    assert bench.worker.time_passed(bench.now_s + 0.5) == []
    again = Hello(request=request(2), protocol=PROTOCOL_VERSION, software="1.0")
    assert bench.worker.time_passed(bench.now_s + 1.0) == [Reply(link=NEXT, message=again)]
    out = bench.worker.time_passed(bench.now_s + JOIN_TIMEOUT_S)
    assert out[1:] == [HangUp(link=NEXT)]
    refused = refusal(out[:1])
    assert refused.code == "worker-unreachable"
    assert "tcp://127.0.0.1:1" in refused.message
    assert "tcp://127.0.0.1:2" in refused.message


def test_a_next_worker_that_refuses_us_is_told_to_the_client() -> None:
    bench = Bench()
    bench.hear(join())
    bench.worker.dialled("tcp://127.0.0.1:2", NEXT, bench.now_s)
    out = bench.hear(Refused(request=request(1), code="protocol", message="you speak protocol 1, I speak 2"), NEXT)
    assert refusal(out[:1]).code == "fleet-mismatch"
    assert "you speak protocol 1, I speak 2" in refusal(out[:1]).message


def test_an_equal_epoch_is_answered_again_a_lower_one_refused() -> None:
    bench = Bench()
    bench.join_via_next()
    moved = Link(0, b"ann reconnected")
    assert bench.hear(join(number=11), moved) == [Reply(link=moved, message=Joined(request=request(11)))]
    assert refusal(bench.hear(join(0))).code == "state-lost"
    assert refusal(bench.hear(join(1, [*CHAIN_TWO[:1], ("third", "tcp://127.0.0.1:3")]))).code == "protocol"


def test_a_higher_epoch_frees_everything_and_asks_the_next_worker_anew() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    bench.open(2)
    bench.send(step(1, row(1, 0, [1, 2])))
    out = bench.hear(join(2, number=30))
    hello = Hello(request=request(2), protocol=PROTOCOL_VERSION, software="1.0")
    assert out == [
        CloseStream(stage_idx=0, key=key(1)),
        CloseStream(stage_idx=0, key=key(2)),
        Reply(link=NEXT, message=hello),
    ]
    assert bench.worker.next_run() == []
    stale = make_identity("other", 2, 1).welcome(request(1))
    assert bench.hear(stale, NEXT) == []
    assert bench.hear(make_identity("other", 2, 1).welcome(request(2)), NEXT) == [Reply(link=ANN, message=Joined(request=request(30)))]


def test_a_link_is_shared_and_hung_up_with_the_last_client() -> None:
    bench = Bench()
    bench.join_via_next()
    out = bench.hear(join(client="bob", number=12), BOB)
    assert [type(instruction) for instruction in out] == [Reply]  # a Hello over the link that exists
    assert bench.hear(make_identity("other", 2, 1).welcome(request(2)), NEXT) == [Reply(link=BOB, message=Joined(request=request(12)))]
    assert bench.hear(Leave(client=ClientId("ann"))) == []
    assert bench.hear(Leave(client=ClientId("bob"))) == [HangUp(link=NEXT)]


@pytest.mark.parametrize(
    ("chain", "code"),
    [
        ([CHAIN_TWO[0]], "fleet-mismatch"),
        ([("x", "tcp://127.0.0.1:1"), ("y", "tcp://127.0.0.1:2")], "fleet-mismatch"),
        ([("x", "tcp://127.0.0.1:1"), (ME, "tcp://127.0.0.1:2")], "fleet-mismatch"),
        ([(ME, "tcp://127.0.0.1:1"), ("other", "tcp://127.0.0.1:1")], "fleet-mismatch"),
        ([(ME, "tcp://127.0.0.1:1"), ("other", "ipc:///tmp/x")], "invalid-option"),
    ],
)
def test_a_chain_that_cannot_be_served_is_refused(chain: list[tuple[str, str]], code: str) -> None:
    bench = Bench()
    assert refusal(bench.hear(join(1, chain))).code == code
    assert bench.worker.num_clients == 0


def test_clients_are_bounded() -> None:
    bench = Bench(1)
    for number in range(MAX_CLIENTS):
        bench.join_alone([CHAIN_TWO[0]], client=f"client {number}")
    assert refusal(bench.hear(join(1, [CHAIN_TWO[0]]))).code == "capacity"
    assert refusal(bench.hear(join(1, [CHAIN_TWO[0]], client="x" * 65))).code == "protocol"


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_admitted_on_every_stage_or_on_none() -> None:
    bench = Bench(3, (0, 1, 2))
    bench.join_alone([CHAIN_TWO[0]] * 3)
    first = OpenStream(stage_idx=0, key=key(1), num_tokens=32, sampling=SamplingParams())
    second = OpenStream(stage_idx=1, key=key(1), num_tokens=32, sampling=SamplingParams())
    assert bench.hear(ask_open()) == [first]
    assert bench.worker.opened(key(1), None) == [second]
    assert bench.worker.opened(key(1), CapacityError("full")) == [
        CloseStream(stage_idx=0, key=key(1)),
        Reply(link=ANN, message=Refused(request=request(20), code="capacity", message="full")),
    ]
    assert bench.worker.num_streams == 0
    bench.open(1)
    assert [bench.worker.stage(idx).num_streams for idx in range(3)] == [1, 1, 1]


def test_a_repeated_open_is_answered_again_unless_it_asks_for_something_else() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    assert bench.hear(ask_open(number=21)) == [Reply(link=ANN, message=Opened(request=request(21)))]
    assert refusal(bench.hear(ask_open(num_tokens=33))).code == "protocol"


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (ask_open(num_tokens=0), "invalid-option"),
        (ask_open(num_tokens=513), "context-overflow"),
        (ask_open(epoch=0), "state-lost"),
        (ask_open(epoch=2), "state-lost"),
        (ask_open(client="stranger"), "state-lost"),
    ],
)
def test_an_open_that_cannot_be_is_refused(ask: Open, code: str) -> None:
    bench = Bench()
    bench.join_via_next()
    assert refusal(bench.hear(ask)).code == code


def test_close_frees_on_every_stage_and_ignores_what_it_does_not_know() -> None:
    bench = Bench(2, (0, 1))
    bench.join_alone([CHAIN_TWO[0]] * 2)
    bench.open(1)
    streams = (StreamId(9), StreamId(1))
    assert bench.hear(Close(client=ClientId("ann"), epoch=Epoch(0), streams=streams)) == []
    out = bench.hear(Close(client=ClientId("ann"), epoch=Epoch(1), streams=streams))
    assert out == [CloseStream(stage_idx=0, key=key(1)), CloseStream(stage_idx=1, key=key(1))]


def test_a_client_not_heard_of_loses_its_lease_and_any_message_renews_it() -> None:
    bench = Bench(1)
    bench.join_alone([CHAIN_TWO[0]])
    bench.open(1)
    bench.now_s += LEASE_S - 1
    bench.hear(Ping(request=request(1), client=ClientId("ann")))
    assert bench.worker.time_passed(bench.now_s + LEASE_S - 1) == []
    assert bench.worker.time_passed(bench.now_s + LEASE_S) == [CloseStream(stage_idx=0, key=key(1))]
    assert bench.worker.num_clients == 0


def test_a_draining_worker_takes_nothing_new_and_finishes_what_is_open() -> None:
    bench = Bench(1)
    bench.join_alone([CHAIN_TWO[0]])
    bench.open(1)
    bench.worker.drain()
    assert refusal(bench.hear(ask_open(2))).code == "worker-lost"
    assert refusal(bench.hear(join(1, [CHAIN_TWO[0]], client="bob"))).code == "worker-lost"
    bench.send(step(1, row(1, 0, [1, 2])))
    assert bench.run().num_tokens == 2


# --- steps -----------------------------------------------------------------------------------------------------------


def failed(out: list[Instruction]) -> StepFailed:
    assert len(out) == 1
    assert isinstance(out[0], Reply)
    assert isinstance(out[0].message, StepFailed)
    return out[0].message


def test_steps_of_strangers_and_old_epochs_vanish_and_of_new_epochs_have_lost_state() -> None:
    bench = Bench(1)
    assert bench.send(step(1, row(1, 0, [1]))) == []
    bench.join_alone([CHAIN_TWO[0]], epoch=2)
    assert bench.send(step(1, row(1, 0, [1]), epoch=1)) == []
    assert bench.worker.next_run() == []
    told = failed(bench.send(step(4, row(1, 0, [1]), epoch=3)))
    assert (told.epoch, told.step_id, told.stage_idx, told.failures[0].code) == (3, 4, 0, "state-lost")


def test_a_stage_not_served_or_a_wrong_tensor_fails_the_whole_step() -> None:
    bench = Bench(2)
    bench.join_via_next()
    bench.open(1)
    assert failed(bench.send(step(1, row(1, 0, [1])), stage_idx=1)).failures[0].code == "protocol"
    tensor = np.zeros((1, HIDDEN), np.float32)
    assert failed(bench.send(step(2, row(1, 0, [1])), tensor=tensor)).failures[0].code == "protocol"
    assert bench.worker.next_run() == []
    assert bench.worker.num_malformed == 2


def test_merged_results_go_on_together_with_their_timings() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    bench.hear(join(client="bob"), BOB)
    bench.hear(make_identity("other", 2, 1).welcome(request(2)), NEXT)
    bench.open(1, client="bob", link=BOB)
    ann, bob = step(1, row(1, 0, [1, 2])), step(8, row(1, 0, [3]), client="bob")
    bench.send(ann)
    bench.now_s += 0.25
    bench.send(bob, link=BOB)
    run = bench.run()
    assert [piece.key for piece in run.slices] == [key(1), key(1, "bob")]
    hidden = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    out = bench.worker.computed(run, hidden, started_s=100.5, ended_s=101.0)
    assert len(out) == 1
    assert isinstance(out[0], Forward)
    assert out[0].link == NEXT
    assert out[0].hidden is hidden
    assert out[0].message == MicroBatch(
        stage_idx=1,
        steps=(
            Step(client=ann.client, epoch=ann.epoch, step_id=ann.step_id, slices=ann.slices, timings=(StageTiming(500_000, 500_000),)),
            Step(client=bob.client, epoch=bob.epoch, step_id=bob.step_id, slices=bob.slices, timings=(StageTiming(250_000, 500_000),)),
        ),
        hidden=tensor_spec(hidden),
    )
    told = bench.worker.not_sent(out[0])
    assert [reply.link for reply in told if isinstance(reply, Reply)] == [ANN, BOB]
    assert failed(told[:1]).failures[0].code == "worker-lost"


def test_steps_part_where_their_clients_chains_do() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    bench.hear(join(1, [CHAIN_TWO[0], ("third", "tcp://127.0.0.1:3")], client="bob"), BOB)
    third = Link(8)
    bench.worker.dialled("tcp://127.0.0.1:3", third, bench.now_s)
    bench.hear(make_identity("third", 2, 1).welcome(request(2)), third)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [1])), step(2, row(1, 0, [2, 3]), client="bob"))
    hidden = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    out = bench.worker.computed(bench.run(), hidden, started_s=100.0, ended_s=100.0)
    assert [forward.link for forward in out if isinstance(forward, Forward)] == [NEXT, third]
    for forward, rows in zip(out, (hidden[:1], hidden[1:]), strict=True):
        assert isinstance(forward, Forward)
        np.testing.assert_array_equal(forward.hidden, rows)


def test_a_worker_hands_over_to_itself_and_the_last_stage_answers_each_client() -> None:
    bench = Bench(2, (0, 1))
    bench.join_alone([CHAIN_TWO[0]] * 2)
    bench.join_alone([CHAIN_TWO[0]] * 2, client="bob", link=BOB)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [1, 2])), step(5, row(1, 0, [3]), client="bob"))
    hidden = np.zeros((3, HIDDEN), np.float32)
    assert bench.worker.computed(bench.run(), hidden, started_s=100.0, ended_s=100.001) == []
    run = bench.run()
    assert run.stage_idx == 1
    results = [SliceResult(StreamId(1), pack_tokens([7])), SliceResult(StreamId(1), pack_tokens([8]))]
    timings = (StageTiming(0, 1000), StageTiming(1000, 1000))
    assert bench.worker.sampled(run, results, started_s=100.002, ended_s=100.003) == [
        Reply(link=ANN, message=StepResult(epoch=Epoch(1), step_id=step(1).step_id, results=(results[0],), timings=timings)),
        Reply(link=BOB, message=StepResult(epoch=Epoch(1), step_id=step(5).step_id, results=(results[1],), timings=timings)),
    ]


def test_a_failed_inference_reaches_only_the_client_whose_step_fails_alone() -> None:
    bench = Bench(1)
    bench.join_alone([CHAIN_TWO[0]])
    bench.join_alone([CHAIN_TWO[0]], client="bob", link=BOB)
    bench.open(1)
    bench.open(1, client="bob", link=BOB)
    bench.send(step(1, row(1, 0, [1])), step(2, row(1, 0, [2]), client="bob"))
    assert bench.worker.failed(bench.run(), InferenceError("broken")) == []
    failure = StreamFailure(StreamId(1), "inference", "stage 0: broken")
    assert bench.worker.failed(bench.run(), InferenceError("broken")) == [
        Reply(link=ANN, message=StepFailed(epoch=Epoch(1), step_id=step(1).step_id, stage_idx=0, failures=(failure,)))
    ]
    result = [SliceResult(StreamId(1), pack_tokens([8]))]
    out = bench.worker.sampled(bench.run(), result, started_s=100.0, ended_s=100.0)
    assert [reply.link for reply in out if isinstance(reply, Reply)] == [BOB]
