"""The draft role: streams that are guessed for, and how far each guess has come. Pure.

A draft model is a model of one stage, and `stage` holds its streams, merges what waits into one inference and applies the one step rule.
Here an ask becomes steps of it: first the stream's tokens, in chunks, then a row for each guess but the last, fed with the guess before.
Asks of all streams and clients go on side by side, so that each inference carries a row of everybody who waits for a guess.

Nothing here may cost a stream its text: whatever is refused or goes wrong is told as a failure, and the client goes on without drafts.

Invariants:
- every ask ends once: in a result, in a failure, or with its stream;
- only the latest ask of a stream goes on guessing; the tokens of all are taken in, in order of arrival;
- a stream is known here exactly while the engine has set KV aside for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from langchain_pshard.core.bundle import DraftEntry
from langchain_pshard.core.codec import pack_tokens, unpack_tokens
from langchain_pshard.core.errors import (
    CapacityError,
    ContextOverflowError,
    InferenceError,
    ProtocolError,
    PShardError,
    StateLostError,
    WorkerLostError,
)
from langchain_pshard.core.messages import (
    ClientId,
    Draft,
    DraftAsk,
    Drafted,
    DraftResult,
    Epoch,
    Slice,
    SliceKind,
    SliceResult,
    Step,
    StepId,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.numerics import DType
from workers.instructions import CloseDraft, Instruction, OpenDraft, Reply, Run, RunDraft
from workers.membership import Membership
from workers.runners.runner import StreamKey
from workers.stage import TOKEN_BUDGET, Dropped, Stage, StageShape

CHUNK_TOKENS = 256
"""Tokens of a stream that one inference takes in at most: guesses of other streams, and stages beside the draft, wait no longer."""
MAX_DRAFTS = 64
"""Guesses of one ask."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Ask:
    key: StreamKey
    epoch: Epoch
    num_positions: int
    """Of the stream, with the ask's tokens."""
    num_drafts: int
    awaited: StepId | None = None
    """The step that brings the next guess, or the end of an ask for none."""
    guesses: list[int] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True)
class _Stream:
    num_reserved: int
    latest: _Ask | None = None


Ending = tuple[_Ask, StreamFailure | None]


class Drafts:
    """Guesses for the streams of all clients; owned by `worker`."""

    def __init__(self, stage: Stage, members: Membership, *, vocab_size: int, context_length: int) -> None:
        """
        Args:
            stage: the draft model as the only stage of itself; nobody else's.
            members: who the clients are.
            vocab_size: of the model that is guessed for. A token beyond it, of padding rows, ends a guess.
            context_length: of the draft model.
        """
        self.stage = stage
        self._members = members
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._streams: dict[StreamKey, _Stream] = {}
        self._opening: dict[StreamKey, tuple[Epoch, DraftAsk]] = {}
        self._asks: dict[StepId, _Ask] = {}
        self._step_ids = itertools.count(1)

    @classmethod
    def of(cls, draft: DraftEntry, members: Membership, *, vocab_size: int, token_budget: int = TOKEN_BUDGET) -> Drafts:
        """The role for a bundle's draft, with nobody asking yet."""
        shape = StageShape(
            stage_idx=0,
            is_last=True,
            vocab_size=draft.vocab_size,
            row_width=draft.hidden_size,
            boundary=DType.F32,  # no hidden states leave or enter a model of one stage
            is_draft=True,
        )
        return cls(Stage(shape, token_budget=token_budget), members, vocab_size=vocab_size, context_length=draft.context_length)

    @property
    def has_work(self) -> bool:
        return self.stage.has_work

    # --- asks come in ------------------------------------------------------------------------------------------------

    def ask(self, message: Draft, *, is_draining: bool, now_s: float) -> list[Instruction]:
        """Take in the asks of a client that has joined, in the epoch of the message."""
        out: list[Instruction] = []
        endings: list[Ending] = []
        seen: set[StreamId] = set()
        for ask in message.asks:
            key = StreamKey(message.client, ask.stream)
            is_known = key in self._streams
            fault = self._fault(ask, is_known=is_known, is_twice=ask.stream in seen, is_draining=is_draining)
            seen.add(ask.stream)
            if fault is not None:
                endings.append((_over(key, message.epoch, ask), StreamFailure(ask.stream, *fault)))
            elif is_known:
                endings += self._begin(key, message.epoch, ask, ask.start, now_s)
            else:
                self._opening[key] = message.epoch, ask
                prompt = ask.tokens if ask.is_shared and ask.kind is SliceKind.PREFILL else b""
                out.append(OpenDraft(key=key, num_tokens=ask.num_positions, prompt=prompt))
        return [*out, *self._tell(endings)]

    def _fault(self, ask: DraftAsk, *, is_known: bool, is_twice: bool, is_draining: bool) -> tuple[str, str] | None:
        """Code and message of what is wrong with an ask; `stage` looks at the tokens themselves."""
        num_tokens = len(ask.tokens) // 4
        if is_twice:
            return ProtocolError.code, "malformed ask: the stream comes twice in one message"
        if len(ask.tokens) % 4 or not num_tokens:
            return ProtocolError.code, f"malformed ask: {len(ask.tokens)} bytes of token ids; valid: 4 for each of one or more tokens"
        if not 0 <= ask.num_drafts <= MAX_DRAFTS:
            return ProtocolError.code, f"malformed ask: {ask.num_drafts} drafts; valid: 0 to {MAX_DRAFTS}"
        if is_known:
            return None
        if is_draining:
            return WorkerLostError.code, "the draft takes no new streams: its worker is shutting down"
        if ask.start > 0:
            return StateLostError.code, f"the draft holds no stream {ask.stream}: begin again with its prompt"
        if not num_tokens <= ask.num_positions:
            return ProtocolError.code, f"malformed ask: {num_tokens} tokens for {ask.num_positions} positions"
        if ask.num_positions > self._context_length:
            text = f"a stream of {ask.num_positions} positions; the draft's context holds {self._context_length}"
            return ContextOverflowError.code, text
        return None

    def opened(self, key: StreamKey, outcome: int | PShardError, now_s: float) -> list[Instruction]:
        """How an OpenDraft went: positions of the prompt that the engine holds already, or why there is no room."""
        epoch, ask = self._opening.pop(key)
        if isinstance(outcome, PShardError):
            return self._tell([(_over(key, epoch, ask), StreamFailure(key.stream, outcome.code, f"the draft: {outcome}"))])
        self.stage.open(key, ask.num_positions, length=outcome)
        self._streams[key] = _Stream(ask.num_positions)
        return self._tell(self._begin(key, epoch, ask, outcome, now_s))

    def _begin(self, key: StreamKey, epoch: Epoch, asked: DraftAsk, start: int, now_s: float) -> list[Ending]:
        """Send the ask's tokens from `start` on to the stage."""
        end = asked.start + len(asked.tokens) // 4
        ask = _Ask(key=key, epoch=epoch, num_positions=end, num_drafts=asked.num_drafts)
        self._streams[key].latest = ask
        for begin, stop in chunks(start, end, asked.kind):
            data = asked.tokens[4 * (begin - asked.start) : 4 * (stop - asked.start)]
            endings = self._send(ask, begin, data, asked.kind, is_sampled=stop == end and ask.num_drafts > 0, now_s=now_s)
            if endings:
                return endings
        return []

    def _send(self, ask: _Ask, start: int, tokens: bytes, kind: SliceKind, *, is_sampled: bool, now_s: float) -> list[Ending]:
        """One step of an ask; returns how that ended it, when the stage refuses it at once."""
        ask.awaited = step_id = StepId(next(self._step_ids))
        piece = Slice(stream=ask.key.stream, start=start, tokens=tokens, kind=kind, num_sampled=1 if is_sampled else 0)
        step = Step(client=ask.key.client, epoch=ask.epoch, step_id=step_id, slices=(piece,))
        self._asks[step_id] = ask
        return self._dropped([self.stage.enqueue(step, None, now_s)])

    # --- inferences --------------------------------------------------------------------------------------------------

    def next_run(self) -> list[Instruction]:
        """The next inference, as the last instruction, with what was refused on the way to it."""
        verdict = self.stage.next_run()
        out = self._tell(self._dropped(verdict.dropped))
        return out if verdict.run is None else [*out, RunDraft(run=verdict.run)]

    def sampled(self, run: Run, results: Sequence[SliceResult], *, started_s: float, ended_s: float) -> list[Instruction]:
        """The engine computed `run`; `results` has one entry a slice, in order."""
        self.stage.succeeded(run, ended_s - started_s)
        endings: list[Ending] = []
        for waiting, result in zip(run.steps, results, strict=True):  # each step has one slice
            ask = self._asks.pop(waiting.step.step_id)
            if waiting.step.step_id == ask.awaited and not ask.is_over:
                endings += self._go_on(ask, unpack_tokens(result.tokens), ended_s)
        return self._tell(endings)

    def _go_on(self, ask: _Ask, sampled: list[int], now_s: float) -> list[Ending]:
        """A step of an ask came back, its last one or one that brought a guess."""
        stream = self._streams[ask.key]
        if sampled and sampled[0] < self._vocab_size:
            ask.guesses += sampled
            start = ask.num_positions + len(ask.guesses) - 1
            if len(ask.guesses) < ask.num_drafts and start < stream.num_reserved and stream.latest is ask:
                return self._send(ask, start, pack_tokens(sampled), SliceKind.ROWS, is_sampled=True, now_s=now_s)
        ask.is_over = True
        return [(ask, None)]

    def failed(self, run: Run, error: InferenceError | CapacityError | StateLostError) -> list[Instruction]:
        """The engine failed on `run`: merged steps will run again, each alone; a single one is given up."""
        return self._tell(self._dropped(self.stage.failed(run, error.code, f"the draft: {error}")))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _dropped(self, dropped: Iterable[Dropped]) -> list[Ending]:
        """The asks that dropped steps belong to; each ends once, whatever else of it is dropped."""
        endings: list[Ending] = []
        for each in dropped:
            for failure in each.failures:
                ask = self._asks.pop(each.step.step_id)
                if not ask.is_over:
                    ask.is_over = True
                    endings.append((ask, failure))
        return endings

    def _tell(self, endings: Iterable[Ending]) -> list[Instruction]:
        """One message to each client."""
        by_client: dict[tuple[ClientId, Epoch], tuple[list[DraftResult], list[StreamFailure]]] = {}
        for ask, failure in endings:
            results, failures = by_client.setdefault((ask.key.client, ask.epoch), ([], []))
            if failure is None:
                results.append(DraftResult(ask.key.stream, ask.num_positions, pack_tokens(ask.guesses)))
            else:
                failures.append(failure)
        out: list[Instruction] = []
        for (client_id, epoch), (results, failures) in by_client.items():
            client = self._members.find(client_id)
            assert client is not None  # the streams of whoever leaves are freed
            out.append(Reply(link=client.link, message=Drafted(epoch=epoch, results=tuple(results), failures=tuple(failures))))
        return out

    def free(self, key: StreamKey) -> list[Instruction]:
        """Forget a stream and its asks; unknown ones are ignored."""
        if self._streams.pop(key, None) is None:
            return []
        self.stage.close(key)
        self._asks = {step: ask for step, ask in self._asks.items() if ask.key != key}
        return [CloseDraft(key=key)]

    def free_all(self, client: ClientId) -> list[Instruction]:
        """Free every stream of a client."""
        return [close for key in [key for key in self._streams if key.client == client] for close in self.free(key)]


def chunks(start: int, end: int, kind: SliceKind) -> Iterator[tuple[int, int]]:
    """Positions [start, end) in steps of at most `CHUNK_TOKENS`; a prefill chunk behind others is never a single token."""
    while start < end:
        length = min(CHUNK_TOKENS, end - start)
        if kind is SliceKind.PREFILL and end - start - length == 1:
            length -= 1
        yield start, start + length
        start += length


def _over(key: StreamKey, epoch: Epoch, ask: DraftAsk) -> _Ask:
    """An ask that ends before it began."""
    return _Ask(key=key, epoch=epoch, num_positions=ask.start, num_drafts=0, is_over=True)
