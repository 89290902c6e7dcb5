"""What a worker decides, as exact lists of instructions."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from langchain_pshard.core.bundle import FileEntry
from langchain_pshard.core.codec import pack_tokens
from langchain_pshard.core.errors import CapacityError
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
    Joined,
    Leave,
    Open,
    Opened,
    Ping,
    Pong,
    Refused,
    StepResult,
    StreamId,
    Welcome,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Link
from tests.support.fake_stages import VOCAB, make_identity, row, step
from tests.support.worker_bench import ANN, BOB, CHAIN_TWO, ME, NEXT, Bench, ask_open, join, key, refusal, request
from workers.instructions import CloseStream, Dial, HangUp, OpenStream, Reply, ReplyPiece, ReplyStatus
from workers.membership import JOIN_TIMEOUT_S, LEASE_S, MAX_CLIENTS

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
    assert bench.worker.opened(key(1), 0) == [second]
    assert bench.worker.opened(key(1), CapacityError("full")) == [
        CloseStream(stage_idx=0, key=key(1)),
        Reply(link=ANN, message=Refused(request=request(20), code="capacity", message="full")),
    ]
    assert bench.worker.num_streams == 0
    bench.open(1)
    assert [bench.worker.stage(idx).num_streams for idx in range(3)] == [1, 1, 1]


def test_every_stage_tells_what_it_holds_of_a_prompt() -> None:
    bench = Bench(2, (0, 1))
    bench.join_alone([CHAIN_TWO[0]] * 2)
    ask = msgspec.structs.replace(ask_open(num_tokens=70), prompt=pack_tokens(range(40)))
    assert bench.hear(ask) == [OpenStream(stage_idx=0, key=key(1), num_tokens=70, sampling=SamplingParams(), prompt=ask.prompt)]
    bench.worker.opened(key(1), 32)
    assert bench.worker.opened(key(1), 0) == [Reply(link=ANN, message=Opened(request=request(20), cached=(32, 0)))]
    assert [bench.worker.stage(idx).length(key(1)) for idx in (0, 1)] == [32, 0]
    assert bench.hear(ask) == [Reply(link=ANN, message=Opened(request=request(20), cached=(32, 0)))]
    assert refusal(bench.hear(msgspec.structs.replace(ask, prompt=b""))).code == "protocol"


@pytest.mark.parametrize("prompt", [b"abc", pack_tokens([0] * 33), pack_tokens([0, VOCAB]), pack_tokens([0, -1])])
def test_a_malformed_prompt_is_refused(prompt: bytes) -> None:
    bench = Bench()
    bench.join_via_next()
    refused = refusal(bench.hear(msgspec.structs.replace(ask_open(num_tokens=32), prompt=prompt)))
    assert refused.code == "protocol"
    assert refused.message.startswith("malformed prompt of stream 1: ")


@pytest.mark.parametrize("end_tokens", [(-1,), (VOCAB,), (2**64 - 1,), (1,) * 65])
def test_malformed_end_tokens_are_refused(end_tokens: tuple[int, ...]) -> None:
    bench = Bench()
    bench.join_via_next()
    refused = refusal(bench.hear(msgspec.structs.replace(ask_open(), end_tokens=end_tokens)))
    assert refused.code == "protocol"
    assert refused.message.startswith("malformed end tokens of stream 1: ")


def test_a_repeated_open_is_answered_again_unless_it_asks_for_something_else() -> None:
    bench = Bench()
    bench.join_via_next()
    bench.open(1)
    assert bench.hear(ask_open(number=21)) == [Reply(link=ANN, message=Opened(request=request(21), cached=(0,)))]
    assert refusal(bench.hear(ask_open(num_tokens=33))).code == "protocol"
    assert refusal(bench.hear(ask_open(end_tokens=[2]))).code == "protocol"


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
    assert [list(piece.tokens) for piece in bench.run().slices] == [[1, 2]]
