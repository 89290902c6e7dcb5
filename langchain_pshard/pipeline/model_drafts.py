"""Guesses from the fleet's draft model: what a stream asks for, how long it waits, and what comes of it. Pure: time is a parameter.

A stream that is ready for its turn asks first, and takes the turn when the guess is there. Until then it counts as not ready, so all
others go on. It waits twice as long as a guess takes of late, between `MIN_WAIT_S` and `MAX_WAIT_S`; then it takes a plain step, and asks
again once the late answer has come. While the draft model still reads the prompt, the stream does not wait at all.

How many tokens it asks for follows from what they cost: the round trip to the draft model, measured, comes on top of the step. Where no
number pays it asks for none, and tries a few now and then, ever more rarely, to see whether its text has become easier to guess. Where not
even right guesses would pay, only the costs can change that: all streams of the client together try once in `MAX_PROBE_EVERY` tokens.

Nothing that happens here ends a stream. One that is refused or gets no answer goes on without drafts, and the first time is told (`Warn`).

Invariants:
- at most one ask of a stream waits for its answer, and it was made for a text that the stream's own begins with;
- the draft model holds at least the tokens before `start` of the next ask, as far as answers tell; where it does not, it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.errors import DeadlineError, ProtocolError
from langchain_pshard.core.messages import ClientId, Draft, DraftAsk, Drafted, DraftResult, Epoch, SliceKind, StreamId
from langchain_pshard.pipeline.adaptive_k import num_to_ask
from langchain_pshard.pipeline.chain import DraftRole
from langchain_pshard.pipeline.cost_line import CostLine
from langchain_pshard.pipeline.generation import MAX_DRAFT_TOKENS
from langchain_pshard.pipeline.instructions import Instruction, Send, Warn
from langchain_pshard.pipeline.speculation import num_accepted
from langchain_pshard.pipeline.stream import Stream

MIN_WAIT_S = 0.05
MAX_WAIT_S = 1.0
LATE_FACTOR = 2.0
"""A guess that takes longer than this times its expected time is waited for no longer."""
GUESS_FORGET = 0.8
"""Weight of the past at each guess: what others ask of the same worker is part of the price, and comes and goes with them."""
GUESS_SLOPE = 0.8
"""Prior: what one more token guessed adds, as a part of the time of one: they are computed one after another."""
PROBE_DRAFTS = 2
PROBE_EVERY = 16
"""Tokens between two tries of a stream that no number of drafts pays for; doubled at each that changes nothing."""
MAX_PROBE_EVERY = 256
PIECE_TOKENS = 16 << 10
"""Of a prompt, in one ask: a sixteenth of what a message's header may have."""


@dataclass(slots=True)
class _Ask:
    """An ask under way."""

    num_positions: int
    """Of the text that the guess is to follow."""
    num_drafts: int
    num_tokens: int
    asked_at: float
    late_at: float


class _Talk:
    """What one stream has asked, and what the draft model holds of it."""

    def __init__(self, stream: Stream, role: DraftRole) -> None:
        self.stream = stream
        self.num_positions = min(stream.request.num_positions, role.context_length)
        self.is_off = len(stream.request.prompt) >= role.context_length
        self.ask: _Ask | None = None
        self.has_begun = False
        self._answered = 0  # positions of the text that the last guess followed
        self._guess: tuple[int, ...] = ()
        self._decided_at = 0  # positions of the text for which it was decided whether to ask
        self._probe_at = 0
        self._probe_every = PROBE_EVERY

    @property
    def _num_positions_now(self) -> int:
        return len(self.stream.request.prompt) + len(self.stream.tokens)

    def begin(self, now: float) -> list[DraftAsk]:
        """The prompt, for the draft model to take in while the target does."""
        self.has_begun = True
        num_tokens = len(self.stream.request.prompt)
        asks = []
        start = 0
        while start < num_tokens:
            length = min(PIECE_TOKENS, num_tokens - start)
            if num_tokens - start - length == 1:  # a prefill of one token behind others runs another kernel, and is refused
                length -= 1
            asks.append(self._make(start, self.stream.request.prompt[start : start + length], SliceKind.PREFILL, 0))
            start += length
        self.ask = _Ask(num_tokens, 0, num_tokens, now, now)
        return asks

    @property
    def is_due(self) -> bool:
        """Whether it is to be decided how many tokens to ask for; once for each text."""
        stream, now = self.stream, self._num_positions_now
        is_idle = self.has_begun and not self.is_off and self.ask is None
        return is_idle and now != self._decided_at and stream.is_ready and not stream.has_guess

    def decide(self, num_drafts: int, guess_ms: Callable[[int], float] | None, now: float) -> DraftAsk | None:
        """What to ask for the stream's next turn.

        Args:
            num_drafts: how many tokens, where there is room; 0: nothing.
            guess_ms: expected time of a guess of so many; None when that is not known yet.
            now: the time.
        """
        end = self._decided_at = self._num_positions_now
        # The draft model has to hold the text, and all guesses but the last.
        num_drafts = min(num_drafts, self.stream.num_drafts_left, self.num_positions - end + 1)
        if num_drafts < 1 or end > self.num_positions:
            return None
        start = self._num_held(end)
        tokens = self.stream.tokens[start - len(self.stream.request.prompt) :]
        wait_s = MAX_WAIT_S if guess_ms is None else min(max(LATE_FACTOR * guess_ms(num_drafts) / 1e3, MIN_WAIT_S), MAX_WAIT_S)
        self.ask = _Ask(end, num_drafts, len(tokens), now, now + wait_s)
        self.stream.await_guess(now)
        return self._make(start, tokens, SliceKind.ROWS, num_drafts)

    def pays(self) -> None:
        """Guesses are worth asking for; when they are no longer, the first try comes soon."""
        self._probe_every = PROBE_EVERY
        self._probe_at = self._num_positions_now + self._probe_every

    def probe(self) -> int:
        """How many tokens to ask for though it does not seem to pay: now and then a few."""
        end = self._num_positions_now
        if end < self._probe_at:
            return 0
        self._probe_at = end + self._probe_every
        self._probe_every = min(2 * self._probe_every, MAX_PROBE_EVERY)
        return PROBE_DRAFTS

    def _num_held(self, end: int) -> int:
        """Leading positions of the text that the draft model holds: those that it answered for, and the guesses that came true. It never
        took in the last one; and one token at least is to be sent."""
        prompt = len(self.stream.request.prompt)
        came_true = num_accepted(self._guess[:-1], self.stream.tokens[self._answered - prompt :])
        return min(self._answered + came_true, end - 1)

    def _make(self, start: int, tokens: Iterable[int], kind: SliceKind, num_drafts: int) -> DraftAsk:
        return DraftAsk(
            stream=self.stream.id,
            start=start,
            tokens=pack_tokens(tuple(tokens)),
            kind=kind,
            num_drafts=num_drafts,
            num_positions=self.num_positions,
            is_shared=bool(self.stream.request.prefix_cache),
        )

    def answered(self, ask: _Ask, tokens: tuple[int, ...], now: float) -> None:
        """The guess that `ask` wanted; it is of use when the stream has waited for it."""
        self.ask = None
        self._answered, self._guess = ask.num_positions, tokens
        self.stream.guessed(tokens, now)

    def end(self, now: float) -> None:
        """No more asks; the stream goes on plain."""
        self.is_off = True
        self.ask = None
        self.stream.guessed((), now)


class ModelDrafts:
    """The talks of all streams of a client that want guesses from the draft model."""

    def __init__(self, client: ClientId, *, max_draft_tokens: int, lost_after_s: float) -> None:
        """
        Args:
            client: in whose name it asks.
            max_draft_tokens: most drafts that a stream asks for where it may choose.
            lost_after_s: an ask that has no answer by then is lost.
        """
        self._client = client
        self._epoch = Epoch(0)
        self._max_draft_tokens = max_draft_tokens
        self._lost_after_s = lost_after_s
        self._role: DraftRole | None = None
        self._talks: dict[StreamId, _Talk] = {}
        self._costs = _guess_costs()
        self._num_observed = 0
        self._num_hopeless = 0  # turns since the last try, while no guess could pay
        self._told: set[str] = set()

    def follow(self, epoch: Epoch, role: DraftRole | None, streams: Iterable[Stream], now: float) -> None:
        """Who drafts in which epoch. When that is new, what was held is gone, and `streams` begin anew."""
        if (epoch, role) == (self._epoch, self._role):
            return
        for talk in self._talks.values():
            talk.end(now)
        self._talks.clear()
        self._epoch, self._role = epoch, role
        self._costs = _guess_costs()
        self._num_observed = 0
        self._num_hopeless = 0
        self._told.clear()
        for stream in streams:
            self.add(stream)

    def add(self, stream: Stream) -> None:
        """A stream runs from now on."""
        if self._role is not None and stream.request.drafts_by_model:
            self._talks[stream.id] = _Talk(stream, self._role)

    def forget(self, stream_ids: Iterable[StreamId]) -> None:
        """Streams that ended; the worker frees what it holds of them with their Close."""
        for stream_id in stream_ids:
            self._talks.pop(stream_id, None)

    def ask(self, step_ms: Callable[[int], float], now: float) -> list[Instruction]:
        """Ask for all that is due.

        Args:
            step_ms: what a step takes in which a stream has so many rows.
            now: the time.
        """
        out: list[Instruction] = []
        for talk in self._talks.values():
            if not (talk.has_begun or talk.is_off):
                out += [self._send(ask) for ask in talk.begin(now)]
        due = [talk for talk in self._talks.values() if talk.is_due]
        if not due:
            return out
        guess_ms = self._costs.at if self._num_observed else None

        def best(gains: Sequence[float]) -> int:
            return num_to_ask(gains, step_ms=step_ms, guess_ms=guess_ms or _free)

        wanted = [self._num_wanted(talk, best) for talk in due]
        # Those who ask together ask for the same number: so the answers come together, and the streams go on in one step. Which guesses
        # ride is decided then.
        most = max((count for talk, count in zip(due, wanted, strict=True) if talk.stream.request.num_drafts is None), default=0)
        asks = []
        for talk, count in zip(due, wanted, strict=True):
            is_free = talk.stream.request.num_drafts is None
            ask = talk.decide(most if is_free and count else count, guess_ms, now)
            if ask is not None:
                asks.append(ask)
        return [*out, self._send(*asks)] if asks else out

    def _send(self, *asks: DraftAsk) -> Send:
        assert self._role is not None  # without one there are no talks
        return Send(self._role.address, Draft(client=self._client, epoch=self._epoch, asks=asks))

    def _num_wanted(self, talk: _Talk, best: Callable[[Sequence[float]], int]) -> int:
        """How many tokens a stream asks for; `best` of drafts with these gains pay."""
        stream = talk.stream
        if stream.request.num_drafts is not None:
            return stream.request.num_drafts
        limit = max(0, min(self._max_draft_tokens, stream.num_drafts_left))
        if num_drafts := best(stream.gains(limit)):
            talk.pays()
            return num_drafts
        if best([1.0] * limit):
            return talk.probe()
        self._num_hopeless = (self._num_hopeless + 1) % MAX_PROBE_EVERY
        return 0 if self._num_hopeless else PROBE_DRAFTS

    def on_drafted(self, message: Drafted, now: float) -> list[Instruction]:
        """The draft model's worker answered."""
        out: list[Instruction] = []
        for failure in message.failures:
            if (talk := self._talks.get(failure.stream)) is not None and not talk.is_off:
                talk.end(now)
                out += self._tell(failure.code, failure.message)
        for result in message.results:
            talk = self._talks.get(result.stream)
            if talk is None or talk.ask is None or talk.ask.num_positions != result.num_positions:
                continue  # of a piece of the prompt, of a stream that has ended, or a repeated one
            try:
                tokens = _checked(result, talk.ask, talk.stream.request.vocab_size)
            except ProtocolError as error:
                talk.end(now)
                out += self._tell(error.code, str(error))
                continue
            self._observe(talk.ask, len(tokens), now)
            talk.answered(talk.ask, tokens, now)
        return out

    def _observe(self, ask: _Ask, num_tokens: int, now: float) -> None:
        """Learn what a guess costs; one that takes in much text, or was cut short, says little about it."""
        if num_tokens and num_tokens == ask.num_drafts and ask.num_tokens <= MAX_DRAFT_TOKENS:
            self._costs.observe(num_tokens, 1e3 * (now - ask.asked_at))
            self._num_observed += 1

    def expire(self, now: float) -> list[Instruction]:
        """Time has passed: streams stop waiting for what is late, and expecting what is lost."""
        out: list[Instruction] = []
        for talk in self._talks.values():
            if talk.ask is None:
                continue
            if now >= talk.ask.late_at:
                talk.stream.guessed((), now)
            if now - talk.ask.asked_at >= self._lost_after_s:
                talk.end(now)
                out += self._tell(DeadlineError.code, f"the draft has not answered for {self._lost_after_s:g} s")
        return out

    def _tell(self, code: str, message: str) -> list[Instruction]:
        if code in self._told:
            return []
        self._told.add(code)
        return [Warn(f"a text goes on without drafts ({code}): {message}. The same is not told again")]


def _guess_costs() -> CostLine:
    return CostLine(GUESS_SLOPE, forget=GUESS_FORGET, late_weight=1.0)


def _free(_: int) -> float:
    return 0.0


def _checked(result: DraftResult, ask: _Ask, vocab_size: int) -> tuple[int, ...]:
    tokens = tuple(unpack_tokens(result.tokens))
    if len(tokens) > ask.num_drafts:
        raise ProtocolError(f"the draft answered {len(tokens)} tokens where {ask.num_drafts} were asked for")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ProtocolError(f"the draft answered token {token}; the vocabulary has {vocab_size}")
    return tokens
