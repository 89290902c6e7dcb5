"""The draft role of a worker: what becomes of asks, over the fake engine whose every token depends on all before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.errors import CapacityError, InferenceError, PShardError
from langchain_pshard.core.messages import (
    ClientId,
    Close,
    Draft,
    DraftAsk,
    Drafted,
    Epoch,
    Leave,
    SliceKind,
    SliceResult,
    StreamFailure,
    StreamId,
    Welcome,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Link
from tests.support.fake_stages import CONTEXT, DRAFT, VOCAB, FakeRunner, FakeSampler, expected_token, make_identity, row, step
from tests.support.worker_bench import ANN, BOB, ME, Bench, ask_open, join, key, refusal, request
from workers.draft import CHUNK_TOKENS, MAX_DRAFTS, chunks
from workers.instructions import CloseDraft, Instruction, OpenDraft, Reply, Run, RunDraft
from workers.membership import LEASE_S
from workers.runners.runner import NO_TOKENS

ALONE = ((ME, "tcp://127.0.0.1:1"),)
ELSEWHERE = (("other", "tcp://127.0.0.1:2"),)


def ask(
    stream: int, start: int, tokens: Sequence[int], num_drafts: int, *, kind: SliceKind | None = None, num_positions: int = 128
) -> DraftAsk:
    kind = (SliceKind.PREFILL if start == 0 else SliceKind.ROWS) if kind is None else kind
    return DraftAsk(
        stream=StreamId(stream), start=start, tokens=pack_tokens(tokens), kind=kind, num_drafts=num_drafts, num_positions=num_positions
    )


def draft(*asks: DraftAsk, client: str = "ann", epoch: int = 1) -> Draft:
    return Draft(client=ClientId(client), epoch=Epoch(epoch), asks=asks)


def guesses(text: Sequence[int], count: int) -> list[int]:
    """What the fake draft, a model of one stage, says next."""
    found: list[int] = []
    for _ in range(count):
        found.append(expected_token([*text, *found], 1))
    return found


class DraftBench(Bench):
    """A worker that drafts, with an engine of `capacity` positions; `batches` are the streams of each inference."""

    def __init__(self, served: Sequence[int] = (), *, capacity: int = 1024, chain: Any = ELSEWHERE) -> None:
        super().__init__(1, served, drafts=True)
        self.engine = FakeRunner(0, True, kv_capacity_tokens=capacity)
        self.sampler = FakeSampler()
        self.batches: list[list[int]] = []
        self.stage_runs: list[Run] = []
        self.join_alone(chain)

    def tell(self, message: Any, link: Link = ANN) -> list[Instruction]:
        return self.carry_out(self.hear(message, link))

    def carry_out(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """As the server does; returns the replies."""
        drafts = self.worker.drafts
        assert drafts is not None
        out: list[Instruction] = []
        for each in instructions:
            match each:
                case OpenDraft(key=opened, num_tokens=num_tokens):
                    outcome: int | PShardError
                    try:
                        outcome = self.engine.open(opened, num_tokens)
                        self.sampler.open(opened, SamplingParams(), NO_TOKENS)
                    except CapacityError as error:
                        outcome = error
                    out += self.carry_out(drafts.opened(opened, outcome, self.now_s))
                case CloseDraft(key=closed):
                    self.engine.close_stream(closed)
                    self.sampler.close_stream(closed)
                case RunDraft(run=run):
                    self.batches.append([piece.key.stream for piece in run.slices])
                    try:
                        results = self.sampler.sample(self.engine.run(run.slices, None), run.slices)
                    except InferenceError as error:
                        out += self.carry_out(drafts.failed(run, error))
                        continue
                    out += self.carry_out(drafts.sampled(run, results, started_s=0.0, ended_s=0.5))
                case Run():
                    self.stage_runs.append(each)
                case _:
                    out.append(each)
        return out

    def turn(self) -> list[Instruction]:
        return self.carry_out(self.worker.next_run())

    def run_all(self) -> list[Instruction]:
        out: list[Instruction] = []
        while self.worker.has_work:
            out += self.turn()
        return out


def drafted(out: Sequence[Instruction], link: Link = ANN) -> tuple[dict[int, tuple[int, list[int]]], dict[int, str]]:
    """By stream: position and tokens of results, and codes of failures."""
    results: dict[int, tuple[int, list[int]]] = {}
    failures: dict[int, str] = {}
    for each in out:
        assert isinstance(each, Reply)
        if each.link != link:
            continue
        assert isinstance(each.message, Drafted)
        results |= {result.stream: (result.num_positions, unpack_tokens(result.tokens)) for result in each.message.results}
        failures |= {failure.stream: failure.code for failure in each.message.failures}
    return results, failures


def test_welcome_offers_the_draft() -> None:
    welcome = make_identity(ME, 1, drafts=True).welcome(request(1))
    assert isinstance(welcome, Welcome)
    assert welcome.draft is not None
    assert (welcome.draft.model_name, welcome.draft.context_length, welcome.stages) == (DRAFT.model_name, DRAFT.context_length, ())
    assert make_identity(ME, 1, 0, has_draft=True).welcome(request(1)).draft is None


def test_prompt_then_guesses_then_a_rewind() -> None:
    bench = DraftBench()
    prompt = [3, 5, 7, 9]
    assert bench.tell(draft(ask(1, 0, prompt, 0))) == []
    assert drafted(bench.run_all()) == ({1: (4, [])}, {})
    assert bench.tell(draft(ask(1, 4, [11], 3))) == []
    expected = guesses([*prompt, 11], 3)
    assert drafted(bench.run_all()) == ({1: (5, expected)}, {})
    # The first guess was right, the second was not: the text goes on from there, over what the draft has written behind it.
    text = [*prompt, 11, expected[0], (expected[1] + 1) % VOCAB]
    bench.tell(draft(ask(1, 6, text[6:], 2)))
    assert drafted(bench.run_all()) == ({1: (7, guesses(text, 2))}, {})
    # Asked again, the answer is the same.
    bench.tell(draft(ask(1, 6, text[6:], 2)))
    assert drafted(bench.run_all()) == ({1: (7, guesses(text, 2))}, {})


def test_streams_and_clients_share_inferences() -> None:
    bench = DraftBench()
    bench.hear(join(chain=ELSEWHERE, client="bob"), BOB)
    for client, link in (("ann", ANN), ("bob", BOB)):
        bench.tell(draft(ask(1, 0, [1, 2, 3], 4), ask(2, 0, [4, 5], 2), client=client), link)
    out = bench.run_all()
    assert [len(batch) for batch in bench.batches] == [4, 4, 2, 2]
    for link in (ANN, BOB):
        assert drafted(out, link) == ({1: (3, guesses([1, 2, 3], 4)), 2: (2, guesses([4, 5], 2))}, {})
    assert len(out) == 4  # those that end together go in one message
    assert bench.worker.drafts is not None
    assert (bench.worker.drafts.stage.num_steps, bench.worker.drafts.stage.num_tokens) == (4, 2 * (3 + 2) + 2 * (3 + 1))


def test_a_long_prompt_goes_in_chunks_beside_others() -> None:
    bench = DraftBench()
    prompt = [idx % VOCAB for idx in range(CONTEXT // 2 - 8)]
    assert len(prompt) < CHUNK_TOKENS < CONTEXT
    assert list(chunks(0, 2 * CHUNK_TOKENS + 1, SliceKind.PREFILL)) == [(0, 256), (256, 511), (511, 513)]
    assert list(chunks(7, CHUNK_TOKENS + 8, SliceKind.ROWS)) == [(7, 263), (263, 264)]
    assert list(chunks(0, 1, SliceKind.PREFILL)) == [(0, 1)]
    bench.tell(draft(ask(1, 0, prompt, 2, num_positions=CONTEXT // 2)))
    assert drafted(bench.run_all()) == ({1: (len(prompt), guesses(prompt, 2))}, {})


def test_a_later_ask_ends_the_guessing_of_an_earlier_one() -> None:
    bench = DraftBench()
    bench.tell(draft(ask(1, 0, [1, 2, 3], 8)))
    bench.turn()
    bench.turn()
    text = [1, 2, 3, 9]
    bench.tell(draft(ask(1, 3, [9], 2)))
    out = bench.run_all()
    answers = [each.message.results[0] for each in out if isinstance(each, Reply) and isinstance(each.message, Drafted)]
    assert [(answer.num_positions, unpack_tokens(answer.tokens)) for answer in answers] == [
        (3, guesses([1, 2, 3], 3)),  # what it had, and the step that was under way
        (4, guesses(text, 2)),
    ]


def test_a_token_of_padding_rows_ends_a_guess() -> None:
    bench = DraftBench()
    bench.tell(draft(ask(1, 0, [1, 2], 3)))
    [instruction] = bench.worker.next_run()
    assert isinstance(instruction, RunDraft)
    assert bench.worker.drafts is not None
    results = [SliceResult(StreamId(1), pack_tokens([VOCAB]))]
    assert drafted(bench.worker.drafts.sampled(instruction.run, results, started_s=0, ended_s=0)) == ({1: (2, [])}, {})
    assert not bench.worker.has_work


def test_guesses_end_with_the_room_set_aside() -> None:
    bench = DraftBench()
    bench.tell(draft(ask(1, 0, [1, 2, 3], 8, num_positions=5)))
    assert drafted(bench.run_all()) == ({1: (3, guesses([1, 2, 3], 3))}, {})  # two of them are written, the third is only told


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (ask(1, 3, [1], 2), "state-lost"),  # not known, and not from its beginning
        (ask(1, 0, [], 2), "protocol"),
        (ask(1, 0, [1, VOCAB + 1], 2), "protocol"),
        (ask(1, 0, [1, 2], MAX_DRAFTS + 1), "protocol"),
        (ask(1, 0, [1, 2], -1), "protocol"),
        (ask(1, 0, [1, 2, 3], 1, num_positions=2), "protocol"),
        (ask(1, 0, [1, 2], 1, num_positions=CONTEXT // 2 + 1), "context-overflow"),
        (ask(1, 0, [1, 2], 1, num_positions=190), "capacity"),
    ],
)
def test_what_is_refused_is_told_and_others_go_on(bad: DraftAsk, code: str) -> None:
    bench = DraftBench(capacity=200)
    out = bench.tell(draft(ask(2, 0, [4, 5], 1, num_positions=20), bad, ask(3, 0, [6, 7], 1, num_positions=20)))
    assert drafted([*out, *bench.run_all()]) == ({2: (2, guesses([4, 5], 1)), 3: (2, guesses([6, 7], 1))}, {1: code})


def test_a_gap_in_a_known_stream_is_lost_state() -> None:
    bench = DraftBench()
    bench.tell(draft(ask(1, 0, [1, 2], 0)))
    bench.run_all()
    bench.tell(draft(ask(1, 4, [1], 2)))
    out = bench.run_all()
    assert drafted(out) == ({}, {1: "state-lost"})
    assert "the draft holds 2 positions of stream 1, the slice starts at 4" in out[0].message.failures[0].message  # type: ignore[union-attr]
    twice = bench.tell(draft(ask(1, 2, [3], 1), ask(1, 2, [4], 1)))
    assert drafted([*twice, *bench.run_all()]) == ({1: (3, guesses([1, 2, 3], 1))}, {1: "protocol"})


def test_an_engine_failure_ends_the_asks_of_its_streams_alone() -> None:
    bench = DraftBench()
    bench.engine.poison = 63
    bench.tell(draft(ask(1, 0, [1, 63], 3), ask(2, 0, [4, 5], 2)))
    assert drafted(bench.run_all()) == ({2: (2, guesses([4, 5], 2))}, {1: "inference"})


@pytest.mark.parametrize("end", ["close", "leave", "lease", "epoch"])
def test_streams_are_freed(end: str) -> None:
    bench = DraftBench()
    bench.tell(draft(ask(1, 0, [1, 2], 3), ask(2, 0, [4, 5], 2)))
    bench.turn()
    assert bench.engine.num_streams == 2
    match end:
        case "close":
            bench.tell(Close(client=ClientId("ann"), epoch=Epoch(1), streams=(StreamId(1), StreamId(2), StreamId(3))))
        case "leave":
            bench.tell(Leave(client=ClientId("ann")))
        case "lease":
            bench.carry_out(bench.worker.time_passed(bench.now_s + LEASE_S))
        case "epoch":
            bench.tell(join(2, ELSEWHERE))
    assert bench.engine.num_streams == 0
    assert bench.sampler.streams == {}
    assert not bench.worker.has_work
    assert bench.run_all() == []


def test_who_may_ask() -> None:
    bench = DraftBench()
    assert drafted(bench.tell(draft(ask(1, 0, [1, 2], 1), client="bob"), BOB), BOB) == ({}, {1: "state-lost"})
    assert drafted(bench.tell(draft(ask(1, 0, [1, 2], 1), epoch=2))) == ({}, {1: "state-lost"})
    bench.hear(join(3, ELSEWHERE))
    assert bench.tell(draft(ask(1, 0, [1, 2], 1), epoch=1)) == []  # of an older epoch
    bench.worker.drain()
    assert drafted(bench.tell(draft(ask(1, 0, [1, 2], 1), epoch=3))) == ({}, {1: "worker-lost"})

    plain = Bench(1, (0,))
    plain.join_alone(ALONE)
    assert drafted(plain.hear(draft(ask(1, 0, [1, 2], 1)))) == ({}, {1: "protocol"})


def test_a_chain_need_not_ask_a_stage_of_a_worker_that_drafts() -> None:
    bench = DraftBench()
    refused = refusal(bench.hear(ask_open()))
    assert (refused.code, "no stage in this chain" in refused.message) == ("protocol", True)
    assert refusal(Bench(1, (0,)).hear(join(chain=ELSEWHERE))).code == "fleet-mismatch"


def test_stage_and_draft_take_turns() -> None:
    bench = DraftBench((0,), chain=ALONE)
    bench.open(1)
    bench.tell(draft(ask(1, 0, [1, 2], 3)))
    for number in range(3):
        bench.send(step(number + 1, row(1, 0, [1])))
    kinds = []
    while bench.worker.has_work:
        [instruction] = bench.worker.next_run()
        kinds.append(type(instruction).__name__)
        if isinstance(instruction, Run):
            results = [SliceResult(piece.key.stream, pack_tokens([1])) for piece in instruction.slices]
            bench.worker.sampled(instruction, results, np.zeros((1, VOCAB), np.float32), started_s=0, ended_s=0)
        else:
            bench.carry_out([instruction])
    assert kinds == ["RunDraft", "Run", "RunDraft", "Run", "RunDraft", "Run"]
    assert key(1) in bench.sampler.streams


def test_any_order_of_asks_gives_the_guesses_of_the_plain_model() -> None:
    draws = random.Random(5)
    bench = DraftBench(capacity=4096)
    texts = {stream: [draws.randrange(VOCAB) for _ in range(draws.randint(1, 40))] for stream in range(1, 6)}
    held = dict.fromkeys(texts, 0)
    out: list[Instruction] = []
    expected: dict[tuple[int, int], list[int]] = {}
    for _ in range(200):
        stream = draws.choice(list(texts))
        text = texts[stream]
        if held[stream]:
            text += [draws.randrange(VOCAB) for _ in range(draws.randint(1, 3))]
        if len(text) > 110:
            continue
        count = draws.randint(0, 4)
        start = draws.randint(0, held[stream]) if held[stream] and draws.random() < 0.2 else held[stream]
        out += bench.tell(draft(ask(stream, start, text[start:], count, kind=SliceKind.ROWS)))
        held[stream] = len(text)
        expected[stream, len(text)] = guesses(text, count)
        for _ in range(draws.randint(0, 5)):
            out += bench.turn()
    out += bench.run_all()
    answered = set()
    for each in out:
        assert isinstance(each, Reply)
        assert isinstance(each.message, Drafted)
        assert each.message.failures == ()
        for result in each.message.results:
            answered.add((result.stream, result.num_positions))
            tokens = unpack_tokens(result.tokens)
            assert tokens == expected[result.stream, result.num_positions][: len(tokens)]
    assert answered == expected.keys()


def test_a_failure_names_the_draft() -> None:
    bench = DraftBench(capacity=10)
    [reply] = bench.tell(draft(ask(1, 0, [1, 2], 3, num_positions=20)))
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Drafted)
    [failure] = reply.message.failures
    assert failure == StreamFailure(StreamId(1), "capacity", "the draft: stage 0 needs 20 positions, 10 of 10 are free")
