"""The session with fake time: admission, flights, ends; and random orders of everything that may happen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.errors import CapacityError, DeadlineError, PShardError, StateLostError
from langchain_pshard.core.messages import (
    MAX_STEPS_AHEAD,
    ClientId,
    Close,
    Epoch,
    Hello,
    Join,
    Joined,
    Message,
    MicroBatch,
    Open,
    Opened,
    Ping,
    Pong,
    Refused,
    Slice,
    SliceKind,
    SliceResult,
    Step,
    StepFailed,
    StepId,
    StepResult,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.instructions import Deliver, Dial, Instruction, Send
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.session import Session
from langchain_pshard.pipeline.stream import StreamRequest
from tests.support.caller import Caller
from tests.unit.test_chain import A, B, welcome
from tests.unit.test_stream import EOS, VOCAB, fake_next, plain

PROMPT = (1, 2, 3)


class Fleet:
    """Two workers in one object: answers what it is told to, when it is told to, under the one step rule."""

    def __init__(self, capacity: int = 10_000, **options: float) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.session = Session(
            ClientId("me"),
            [A, B],
            software="0.1.0",
            connect_timeout_s=30.0,
            options=ClientOptions(**options),
            now=0.0,  # type: ignore[arg-type]
        )
        self.sent: list[tuple[str, Message]] = []
        self.steps: list[Step] = []
        self.held: dict[StreamId, list[int]] = {}
        self.reserved: dict[tuple[str, StreamId], int] = {}
        self.epoch = Epoch(0)
        self.callers: dict[int, Caller] = {}
        self.knows_client = True
        self.cached: dict[str, tuple[int, ...]] = {}
        self.end_tokens: dict[StreamId, tuple[int, ...]] = {}
        self.is_ring = False
        self.seen: set[tuple[Epoch, StepId]] = set()
        """Every step that reached the last stage."""
        self.do_not_tell = False
        """Results get lost on their way."""

    def do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Deliver(sink=sink, item=item):
                    sink(item)
                case Send(address=address, message=message):
                    self.sent.append((address, message))
                case Dial():
                    pass

    def submit(self, number: int, max_tokens: int = 4, prompt: tuple[int, ...] = PROMPT) -> Caller:
        caller = self.callers[number] = Caller()
        request = StreamRequest(
            prompt=(*prompt, number % VOCAB), max_tokens=max_tokens, sampling=SamplingParams(),
            eos_token_ids=frozenset({EOS}), vocab_size=VOCAB, sink=caller.take,
        )  # fmt: skip
        self.do(self.session.submit(StreamId(number), request, self.now))
        return caller

    def reply(self, address: str, message: Message) -> None:
        self.do(self.session.on_message(address, message, self.now))

    def handle_one(self) -> None:
        """The worker of the oldest message answers it."""
        address, message = self.sent.pop(0)
        match message:
            case Hello():
                self.reply(address, welcome(0, worker="a") if address == A else welcome(1, worker="b"))
            case Join(request=request, epoch=epoch, is_ring=is_ring):
                self.epoch, self.knows_client, self.is_ring = epoch, True, is_ring
                self.held.clear()
                self.reserved.clear()
                self.reply(address, Joined(request=request, is_ring=is_ring))
            case Open():
                self.reply(address, self._open(address, message))
            case Close(streams=streams):
                for stream in streams:
                    self.reserved.pop((address, stream), None)
                    self.held.pop(stream, None)
            case MicroBatch(steps=steps):
                self.steps += steps
            case Ping(request=request):
                self.reply(address, Pong(request=request))

    def answer_step(self) -> None:
        """The oldest step comes out of the last stage, which goes on by itself where it may, and then tells the client."""
        step = self.steps.pop(0)
        assert (step.epoch, step.step_id) not in self.seen, "two steps of one id"
        self.seen.add((step.epoch, step.step_id))
        results, failures, ahead = [], [], []
        for piece in step.slices:
            if piece.stream in self.held and (B, piece.stream) in self.reserved:
                results.append(self._run(piece))
                ahead += self._ahead(piece, results[-1])
            else:
                failures.append(StreamFailure(piece.stream, "state-lost", "no such stream"))
        if ahead:
            self.steps.append(Step(client=step.client, epoch=step.epoch, step_id=StepId(step.step_id + 1), slices=tuple(ahead)))
        if failures:
            self.reply(A, StepFailed(epoch=step.epoch, step_id=step.step_id, stage_idx=0, failures=tuple(failures)))
        if results and not self.do_not_tell:
            self.reply(B, StepResult(epoch=step.epoch, step_id=step.step_id, results=tuple(results), timings=()))

    def settle(self) -> None:
        while self.sent or self.steps:
            while self.sent:
                self.handle_one()
            if self.steps:
                self.answer_step()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.session.tick(self.now))

    def _open(self, address: str, message: Open) -> Message:
        if not self.knows_client:
            return Refused(request=message.request, code="state-lost", message="join first")
        used = sum(tokens for (at, _), tokens in self.reserved.items() if at == address)
        key = (address, message.stream)
        if key not in self.reserved and used + message.num_tokens > self.capacity:
            return Refused(request=message.request, code="capacity", message="full")
        self.reserved[key] = message.num_tokens
        self.end_tokens[message.stream] = message.end_tokens
        cached = self.cached.get(address, (0,))
        held = self.held.setdefault(message.stream, [])
        held[len(held) :] = unpack_tokens(message.prompt)[len(held) : max(cached, default=0)]
        return Opened(request=message.request, cached=cached)

    def _run(self, piece: Slice) -> SliceResult:
        held = self.held[piece.stream]
        assert piece.start <= len(held)
        held[piece.start :] = unpack_tokens(piece.tokens)
        assert len(held) <= self.reserved[B, piece.stream]
        first = len(held) - piece.num_sampled
        return SliceResult(piece.stream, pack_tokens([fake_next(held[: idx + 1]) for idx in range(first, len(held))]))

    def _ahead(self, piece: Slice, result: SliceResult) -> list[Slice]:
        """How a slice goes on by itself: not at all, or as a row of the token that was sampled."""
        if not piece.num_ahead:
            return []
        assert self.is_ring
        assert (piece.num_sampled, 0 < piece.num_ahead <= MAX_STEPS_AHEAD) == (1, True)
        [token] = unpack_tokens(result.tokens)
        if token in self.end_tokens[piece.stream]:
            return []
        start = piece.start + piece.num_tokens
        return [
            Slice(stream=piece.stream, start=start, tokens=result.tokens, kind=SliceKind.ROWS, num_sampled=1, num_ahead=piece.num_ahead - 1)
        ]


def expected(number: int, max_tokens: int = 4) -> list[int]:
    return plain([*PROMPT, number % VOCAB], max_tokens, True)


def test_first_call_connects_and_generates() -> None:
    fleet = Fleet()
    caller = fleet.submit(1)
    fleet.settle()
    assert caller.tokens == expected(1)
    assert len(caller.ends) == 1
    assert not fleet.reserved


@pytest.mark.parametrize(
    ("at_a", "at_b", "start"), [((2,), (1, 2), 1), ((2,), (2, 2), 2), ((3,), (4,), 2), ((0,), (2,), 0), ((), (2,), 0), ((2,), (0, 2), 0)]
)
def test_a_stream_begins_where_all_stages_can(at_a: tuple[int, ...], at_b: tuple[int, ...], start: int) -> None:
    fleet = Fleet()
    fleet.cached = {A: at_a, B: at_b}
    caller = fleet.submit(1)
    while not fleet.steps:
        fleet.handle_one()
    [piece] = fleet.steps[0].slices
    assert piece.start == start
    assert unpack_tokens(piece.tokens) == [*PROMPT, 1][start:]
    fleet.settle()
    assert caller.tokens == expected(1)


def test_queue_is_first_come_first_served_and_a_small_stream_does_not_overtake_for_ever() -> None:
    fleet = Fleet(capacity=20)
    callers = [fleet.submit(number, max_tokens) for number, max_tokens in enumerate([8, 16, 2, 2], start=1)]
    order: list[int] = []
    while not all(caller.ends for caller in callers):
        if fleet.sent:
            fleet.handle_one()
        elif fleet.steps:
            fleet.answer_step()
        else:
            fleet.pass_time(0.11)
        order += [idx for idx, caller in enumerate(callers, start=1) if caller.ends and idx not in order]
    assert [caller.tokens for caller in callers] == [expected(n, m) for n, m in enumerate([8, 16, 2, 2], start=1)]
    assert order.index(2) < order.index(4)  # the fourth would have fitted long before
    fleet.settle()
    assert not fleet.reserved


def test_refused_open_is_undone_everywhere_and_tried_again() -> None:
    fleet = Fleet(capacity=10)
    first, second = fleet.submit(1, 6), fleet.submit(2, 6)
    fleet.settle()
    assert first.tokens == expected(1, 6)
    fleet.pass_time(0.2)
    fleet.settle()
    assert second.tokens == expected(2, 6)
    assert not fleet.reserved


def test_waiting_too_long_for_room_is_a_capacity_error() -> None:
    fleet = Fleet(capacity=1, queue_timeout_s=5.0)
    caller = fleet.submit(1)
    for _ in range(60):
        fleet.settle()
        fleet.pass_time(0.1)
    assert isinstance(caller.ends[0], CapacityError)
    assert "within 5 s" in str(caller.ends[0])
    assert "full" in str(caller.ends[0])
    assert not fleet.reserved


def test_a_prompt_that_advances_has_all_the_time_and_one_that_does_not_is_given_up() -> None:
    long_prompt = tuple(idx * idx % VOCAB for idx in range(3_000))
    fleet = Fleet(step_timeout_s=10.0)
    caller = fleet.submit(1, prompt=long_prompt)
    num_steps = 0
    while not caller.ends:
        while fleet.sent:
            fleet.handle_one()
        for _ in range(8):  # each step takes 8 s, with the pings answered meanwhile
            fleet.pass_time(1.0)
            while fleet.sent:
                fleet.handle_one()
        if fleet.steps:
            fleet.answer_step()
            num_steps += 1
    assert caller.tokens == plain([*long_prompt, 1], 4, True)
    assert num_steps > 10
    assert fleet.now > 80  # eight times the timeout
    stuck = fleet.submit(2, prompt=long_prompt)
    for _ in range(10):
        while fleet.sent:
            fleet.handle_one()
        assert not stuck.ends
        fleet.pass_time(1.0)
    [error] = stuck.ends
    assert isinstance(error, DeadlineError)
    assert "no answer for 10 s" in str(error)


def test_a_forgotten_client_joins_again_with_a_raised_epoch() -> None:
    fleet = Fleet()
    fleet.submit(1)
    fleet.settle()
    fleet.knows_client = False
    caller = fleet.submit(2)
    fleet.settle()
    assert caller.tokens == expected(2)
    assert fleet.epoch == Epoch(2)


def test_state_lost_in_a_step_ends_that_stream_alone() -> None:
    fleet = Fleet()
    one, two = fleet.submit(1, 20), fleet.submit(2, 20)
    while not fleet.steps:
        fleet.handle_one()
    while fleet.sent:
        fleet.handle_one()
    fleet.held.pop(StreamId(1))
    fleet.settle()
    assert isinstance(one.ends[0], StateLostError)
    assert two.tokens == expected(2, 20)
    assert not fleet.reserved


def test_results_of_an_older_epoch_change_nothing() -> None:
    fleet = Fleet()
    fleet.submit(1)
    while not fleet.steps:
        fleet.handle_one()
    old = fleet.steps.pop()
    fleet.do(fleet.session.on_lost(B, fleet.now))
    fleet.settle()  # it is back: the stream ended
    assert fleet.callers[1].ends
    caller = fleet.submit(2)
    while fleet.epoch != Epoch(2) or not fleet.steps:
        fleet.handle_one()
    stale = tuple(SliceResult(piece.stream, pack_tokens([5])) for piece in fleet.steps[0].slices)
    fleet.reply(B, StepResult(epoch=Epoch(1), step_id=old.step_id, results=stale, timings=()))
    fleet.reply(B, StepResult(epoch=Epoch(1), step_id=fleet.steps[0].step_id, results=stale, timings=()))
    fleet.settle()
    assert caller.tokens == expected(2)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.sampled_from(["handle", "handle", "handle", "answer", "answer", "lose", "time", "forget"]), st.integers(0, 5)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, capacity=st.integers(24, 120), max_steps_ahead=st.sampled_from([0, 1, 7, 64]))
def test_whatever_happens_every_stream_has_one_end_and_nothing_is_left(
    actions: list[tuple[str, int]], capacity: int, max_steps_ahead: int
) -> None:
    fleet = Fleet(capacity=capacity, max_steps_ahead=max_steps_ahead)
    asked: dict[int, int] = {}
    cancelled: set[int] = set()
    for action, value in actions:
        match action:
            case "submit":
                number = len(asked) + 1
                asked[number] = value
                fleet.submit(number, value)
            case "cancel" if asked:
                number = value % len(asked) + 1
                if not fleet.callers[number].ends:
                    cancelled.add(number)
                    fleet.do(fleet.session.cancel(StreamId(number), fleet.now))
            case "handle" if fleet.sent:
                fleet.handle_one()
            case "answer" if fleet.steps:
                fleet.answer_step()
            case "lose":
                fleet.do(fleet.session.on_lost(A if value % 2 else B, fleet.now))
            case "time":
                fleet.pass_time(0.05 * value)
            case "forget":
                fleet.knows_client = False
                fleet.held.clear()
                fleet.reserved.clear()
    for _ in range(200):
        fleet.settle()
        fleet.pass_time(0.2)
    for number, caller in fleet.callers.items():
        whole = expected(number, asked[number])
        assert caller.tokens == whole[: len(caller.tokens)]
        if number in cancelled:
            assert not caller.ends
            continue
        assert len(caller.ends) == 1
        if not isinstance(caller.ends[0], PShardError):
            assert caller.tokens == whole
    assert not fleet.reserved
