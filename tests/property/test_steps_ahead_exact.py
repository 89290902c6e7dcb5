"""However far a chain goes by itself, and whatever happens meanwhile, every text is the plain one, ends once, and leaves nothing behind.

Real sessions and real worker loops, in any order of events.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_pshard.core.errors import PShardError, WorkerLostError
from langchain_pshard.core.messages import Message, MicroBatch, StreamId
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.stream import Delivery, StreamRequest
from tests.support.caller import Caller
from tests.support.fake_stages import VOCAB, expected_token
from tests.support.simulated_fleet import SimulatedClient, SimulatedFleet

ENDS = frozenset(range(4))
"""Every sixteenth token or so."""
CHAINS = ([0], [0, 0], [0, 1], [0, 1, 0], [0, 1, 2], [0, 1, 0, 1])
AHEAD = (0, 1, 3, 7, 64)


def plain(prompt: Sequence[int], max_tokens: int, ends: frozenset[int], num_stages: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(expected_token([*prompt, *tokens], num_stages))
        if tokens[-1] in ends:
            break
    return tokens


@dataclass
class Guessing:
    """Drafts from the text itself, each right with a given chance."""

    text: Sequence[int]
    chance: float
    draws: random.Random
    num_done: int = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.num_done += len(tokens)
        assert list(self.text[self.num_done - len(tokens) : self.num_done]) == list(tokens)

    def propose(self, max_tokens: int) -> Sequence[int]:
        ahead = self.text[self.num_done : self.num_done + self.draws.randint(0, max_tokens)]
        return [token if self.draws.random() < self.chance else (token + 1) % VOCAB for token in ahead]


@dataclass(kw_only=True)
class Job(Caller):
    """One generation, and what its caller was told."""

    number: int
    client: SimulatedClient
    whole: list[int]
    is_cancelled: bool = False

    def take(self, item: Delivery | PShardError) -> bool:
        heard = super().take(item)
        assert self.tokens == self.whole[: len(self.tokens)]
        return heard

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or bool(self.ends)


JOBS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        st.integers(1, 30),
        st.booleans(),
        st.sampled_from([None, None, 0.0, 0.7, 1.0]),
    ),
    min_size=1,
    max_size=6,
)


def start(fleet: SimulatedFleet, client: SimulatedClient, number: int, job: tuple[list[int], int, bool, float | None]) -> Job:
    prompt, max_tokens, has_ends, chance = job
    num_stages = sum(len(worker.runners) for worker in fleet.workers)
    ends = ENDS if has_ends else frozenset()
    made = Job(number=number, client=client, whole=plain(prompt, max_tokens, ends, num_stages))
    drafting = None if chance is None else Guessing(made.whole, chance, random.Random(number))
    request = StreamRequest(
        prompt=tuple(prompt), max_tokens=max_tokens, sampling=SamplingParams(), eos_token_ids=ends, vocab_size=VOCAB, sink=made.take,
        drafting=drafting,
    )  # fmt: skip
    client.do(client.session.submit(StreamId(number), request, fleet.now))
    return made


def play(
    fleet: SimulatedFleet,
    jobs: list[Job],
    waiting: list[tuple[list[int], int, bool, float | None]],
    order: random.Random,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Things happen in any order, and `between` before each, until all have ended; then until nothing is left to happen."""
    while waiting or not all(job.is_over for job in jobs):
        fleet.now += 0.0005
        if waiting and (not jobs or order.random() < 0.05):
            jobs.append(start(fleet, order.choice(fleet.clients), len(jobs) + 1, waiting.pop(0)))
        between()
        choices = fleet.choices
        if choices:
            order.choice(choices)()
        else:
            fleet.tick(0.11)
    fleet.settle()


@settings(max_examples=150, deadline=None)
@given(
    chain=st.sampled_from(CHAINS),
    ahead=st.lists(st.sampled_from(AHEAD), min_size=1, max_size=3),
    jobs=JOBS,
    capacity=st.sampled_from([40, 100, 1024]),
    order=st.randoms(use_true_random=False),
)
def test_any_order_of_events(
    chain: list[int], ahead: list[int], jobs: list[tuple[list[int], int, bool, float | None]], capacity: int, order: random.Random
) -> None:
    fleet = SimulatedFleet(chain, capacity=capacity)
    for max_steps_ahead in ahead:
        fleet.add_client(max_steps_ahead=max_steps_ahead)
    done: list[Job] = []
    play(fleet, done, list(jobs), order)
    for job in done:
        assert job.tokens == job.whole
        assert len(job.ends) == 1
    fleet.check_idle()


@settings(max_examples=150, deadline=None)
@given(
    chain=st.sampled_from(CHAINS),
    max_steps_ahead=st.sampled_from(AHEAD),
    jobs=JOBS,
    trouble=st.sampled_from(["cancel", "double", "cannot send", "new epoch"]),
    chance=st.sampled_from([0.01, 0.1, 1.0]),
    order=st.randoms(use_true_random=False),
)
def test_any_trouble(
    chain: list[int],
    max_steps_ahead: int,
    jobs: list[tuple[list[int], int, bool, float | None]],
    trouble: str,
    chance: float,
    order: random.Random,
) -> None:
    fleet = SimulatedFleet(chain)
    for _ in range(2):
        fleet.add_client(max_steps_ahead=max_steps_ahead)
    done: list[Job] = []

    def num_copies(source: str, message: Message) -> int:
        happens = order.random() < chance
        if trouble == "double":
            return 1 + happens
        return int(not (trouble == "cannot send" and happens and source.startswith("w") and isinstance(message, MicroBatch)))

    def strike() -> None:
        if done and trouble == "cancel" and order.random() < chance / 10:
            job = order.choice(done)
            if not job.is_over:
                job.is_cancelled = True
                job.client.do(job.client.session.cancel(StreamId(job.number), fleet.now))
        if trouble == "new epoch" and order.random() < chance / 50:
            client = order.choice(fleet.clients)
            client.do(client.session.on_lost(order.choice(fleet.workers).address, fleet.now))

    fleet.num_copies = num_copies
    play(fleet, done, list(jobs), order, strike)
    for job in done:
        if job.is_cancelled:
            assert not job.ends
            continue
        [end] = job.ends
        if isinstance(end, PShardError):
            assert isinstance(end, WorkerLostError)
            assert trouble in ("cannot send", "new epoch")
        else:
            assert job.tokens == job.whole
    fleet.check_idle()
