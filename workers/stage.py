"""What one stage believes about its streams: steps in, batches and failures out.

Pure: no sockets, clocks, engines. Here live the one step rule, the checks that keep a peer's nonsense away from the engine, and the
merging of waiting steps into one inference. Who the clients are and where results go is `worker`'s business.

Invariants:
- a stream's length never exceeds what it reserved, and is exactly what the engine holds for it after the last batch;
- a batch holds each stream at most once, and the steps of one stream keep their order of arrival;
- every slice that waits belongs to a stream that was open when it came and has been since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from langchain_pshard.core.codec import MAX_LOGITS_BYTES, NUMPY_DTYPES, Tensor
from langchain_pshard.core.errors import CapacityError, InvalidOptionError, ProtocolError, StateLostError
from langchain_pshard.core.kv import MAX_SLICE_TOKENS
from langchain_pshard.core.messages import (
    MAX_STEP_ID,
    MAX_STEPS_AHEAD,
    Slice,
    SliceKind,
    SliceResult,
    Step,
    StepId,
    StreamFailure,
    StreamId,
)
from langchain_pshard.core.numerics import DType
from workers.instructions import Run, WaitingStep
from workers.rows import pick_rows
from workers.runners.runner import RunSlice, StreamKey, TokenArray

TOKEN_BUDGET = 512
"""Tokens merged into one inference; a single step may have more. Beyond this a prefill gets no quicker, and the engine keeps working memory
for the largest inference it ever ran: 1,024 tokens took 120 MiB more than 512 on two stages of Gemma 3 270M."""
MAX_STEP_TOKENS = 8192
"""Tokens of one step; keeps a forwarded tensor below the codec's limit for hidden sizes up to 8192."""
MAX_WAITING_STEPS = 1024
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The fixed facts of a stage that its checks need."""

    stage_idx: int
    is_last: bool
    vocab_size: int
    row_width: int
    """Elements of a row of hidden states in the boundary's type."""
    boundary: DType
    is_draft: bool = False
    """The only stage of the draft model, not one of the bundle's."""
    allows_logits: bool = False

    @property
    def title(self) -> str:
        """For messages."""
        return "the draft" if self.is_draft else f"stage {self.stage_idx}"


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Slices of a step that go no further, for the client to hear of."""

    step: Step
    failures: tuple[StreamFailure, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch, or the attempt to make one, came to."""

    run: Run | None
    dropped: tuple[Dropped, ...]


@dataclass(slots=True, kw_only=True)
class _Stream:
    reserved: int
    length: int = 0
    end_tokens: frozenset[int] = frozenset()
    last_step: StepId | None = None
    last_ahead: StepId | None = None
    """The last step that the chain went on behind by itself."""


class Stage:
    """Streams and waiting steps of one stage."""

    def __init__(self, shape: StageShape, *, token_budget: int = TOKEN_BUDGET) -> None:
        self.shape = shape
        self.num_steps = 0
        self.num_tokens = 0
        self.compute_s = 0.0
        self._token_budget = token_budget
        self._streams: dict[StreamKey, _Stream] = {}
        self._waiting: deque[WaitingStep] = deque()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def expects_more(self) -> bool:
        """Whether steps wait and not every stream has one among them: others may come that would run together with them."""
        if not self._waiting or len(self._streams) == 1:
            return False
        return sum([len(waiting.slices) for waiting in self._waiting]) < len(self._streams)

    def length(self, key: StreamKey) -> int:
        """Positions held for an open stream."""
        return self._streams[key].length

    def open(self, key: StreamKey, num_tokens: int, *, length: int = 0, end_tokens: Iterable[int] = ()) -> None:
        """Know a stream that the engine has opened with `length` positions that are there already."""
        self._streams[key] = _Stream(reserved=num_tokens, length=length, end_tokens=frozenset(end_tokens))

    def close(self, key: StreamKey) -> None:
        """Forget an open stream, and its slices that wait."""
        del self._streams[key]
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            left = _only(waiting, [idx for idx, piece in enumerate(waiting.slices) if piece.key != key])
            if left is not None:
                self._waiting.append(left)

    # --- steps come in -----------------------------------------------------------------------------------------------

    def tensor_fault(self, steps: Iterable[Step], hidden: Tensor | None) -> str | None:
        """What is wrong with the tensor that came with `steps`, or None."""
        if self.shape.stage_idx == 0:
            return None if hidden is None else "the first stage takes token ids, and a tensor came with them"
        dtype = NUMPY_DTYPES[self.shape.boundary]
        wanted = (sum([step.num_tokens for step in steps]), self.shape.row_width)
        if hidden is not None and hidden.shape == wanted and hidden.dtype == dtype:
            return None
        found = "none" if hidden is None else f"{hidden.dtype}{list(hidden.shape)}"
        return f"stage {self.shape.stage_idx} needs hidden states {dtype}{list(wanted)}, got {found}"

    def enqueue(self, step: Step, hidden: Tensor | None, now_s: float) -> Dropped:
        """Take in a step whose tensor passed `tensor_fault`; returns the slices that are refused at once (possibly none).

        Args:
            hidden: [tokens of the step, row_width], or None on the first stage.
        """
        if len(self._waiting) >= MAX_WAITING_STEPS:
            text = f"{MAX_WAITING_STEPS} steps wait at {self.shape.title} already: send less at once"
            return all_dropped(step, CapacityError.code, text)
        if not 0 <= step.step_id <= MAX_STEP_ID:
            return all_dropped(step, ProtocolError.code, f"step id {step.step_id}; valid: 0 to {MAX_STEP_ID}")
        num_tokens = step.num_tokens
        if num_tokens > MAX_STEP_TOKENS:
            text = f"a step of {num_tokens} tokens; at most {MAX_STEP_TOKENS} are allowed: send several"
            return all_dropped(step, ProtocolError.code, text)
        if self.shape.allows_logits:
            num_logits = sum(piece.num_sampled for piece in step.slices if piece.returns_logits) * self.shape.vocab_size
            if 4 * num_logits > MAX_LOGITS_BYTES:
                text = f"a step that asks for {4 * num_logits} bytes of logits; at most {MAX_LOGITS_BYTES} are allowed: send several"
                return all_dropped(step, ProtocolError.code, text)
        times = Counter(piece.stream for piece in step.slices) if len(step.slices) > 1 else {}
        kept: list[int] = []
        slices: list[RunSlice] = []
        failures: dict[StreamId, StreamFailure] = {}
        for idx, piece in enumerate(step.slices):
            tokens = np.frombuffer(piece.tokens[: piece.num_tokens * 4], _TOKEN)
            fault = "the stream comes twice in one step" if times.get(piece.stream, 1) > 1 else self._fault(piece, tokens)
            key = StreamKey(step.client, piece.stream)
            if fault:
                failures[piece.stream] = StreamFailure(piece.stream, ProtocolError.code, f"malformed slice: {fault}")
                continue
            if key not in self._streams:
                text = f"{self.shape.title} holds no stream {piece.stream}: open it again"
                failures[piece.stream] = StreamFailure(piece.stream, StateLostError.code, text)
                continue
            if piece.returns_logits and self.shape.is_last and not self.shape.allows_logits:
                text = f"stage {self.shape.stage_idx} returns no logits: start its worker with --allow-logits, for comparison only"
                failures[piece.stream] = StreamFailure(piece.stream, InvalidOptionError.code, text)
                continue
            kept.append(idx)
            slices.append(
                RunSlice(
                    key=key,
                    start=piece.start,
                    tokens=tokens,
                    kind=piece.kind,
                    num_sampled=piece.num_sampled,
                    returns_logits=piece.returns_logits,
                )
            )
        if slices:
            rows = hidden if not failures else pick_rows([piece.num_tokens for piece in step.slices], kept, hidden)
            self._waiting.append(WaitingStep(step=step, slices=tuple(slices), hidden=rows, arrived_s=now_s))
        return Dropped(step=step, failures=tuple(failures.values()))

    def _fault(self, piece: Slice, tokens: TokenArray) -> str | None:
        num_tokens = piece.num_tokens
        if len(piece.tokens) % 4 or not num_tokens:
            return f"{len(piece.tokens)} bytes of token ids; valid: 4 for each of one or more tokens"
        if num_tokens > MAX_SLICE_TOKENS:
            return f"a slice of {num_tokens} tokens; at most {MAX_SLICE_TOKENS} are allowed: send several"
        if not 0 <= piece.num_sampled <= num_tokens:
            return f"{piece.num_sampled} positions to sample of {num_tokens} tokens"
        if piece.start < 0:
            return f"start {piece.start}"
        if piece.num_ahead and not (piece.num_sampled == 1 and 0 < piece.num_ahead <= MAX_STEPS_AHEAD):
            return f"{piece.num_ahead} steps ahead of {piece.num_sampled} sampled positions; valid: 0 to {MAX_STEPS_AHEAD}, of one"
        if piece.kind is SliceKind.PREFILL and num_tokens == 1 and piece.start > 0:
            return f"a prefill chunk of one token at position {piece.start}; join it to its neighbour or send it as a row"
        # A decode row is one token, and two reductions over it cost more than everything else here.
        lowest, highest = (tokens.item(),) * 2 if num_tokens == 1 else (int(tokens.min()), int(tokens.max()))
        if lowest < 0 or highest >= self.shape.vocab_size:
            return f"token id {lowest if lowest < 0 else highest} in a vocabulary of {self.shape.vocab_size}"
        return None

    # --- batches go out ----------------------------------------------------------------------------------------------

    def next_run(self) -> Verdict:
        """Merge waiting steps, in order of arrival, into one inference.

        A step whose stream is in the batch already, or waits ahead of it, waits for the next turn. The one step rule is applied here
        and not on arrival, because what a stream's length will be is known only when the steps before it have run.
        """
        dropped: list[Dropped] = []
        chosen: list[WaitingStep] = []
        later: deque[WaitingStep] = deque()
        busy: set[StreamKey] = set()
        num_tokens = 0
        while self._waiting:
            waiting = self._waiting.popleft()
            keys = {piece.key for piece in waiting.slices}
            if keys & busy:
                busy |= keys
                later.append(waiting)
                continue
            admitted, failures = self._admit(waiting)
            if failures:
                dropped.append(Dropped(step=waiting.step, failures=failures))
            if admitted is None:
                continue
            if chosen and (admitted.is_alone or num_tokens + admitted.num_tokens > self._token_budget):
                self._waiting.appendleft(admitted)
                break
            busy |= keys
            chosen.append(admitted)
            num_tokens += admitted.num_tokens
            if admitted.is_alone:
                break
        self._waiting = later + self._waiting
        run = Run(stage_idx=self.shape.stage_idx, steps=tuple(chosen)) if chosen else None
        if run:
            self._begin(run)
        return Verdict(run=run, dropped=tuple(dropped))

    def _admit(self, waiting: WaitingStep) -> tuple[WaitingStep | None, tuple[StreamFailure, ...]]:
        """The step without the slices that the one step rule refuses, None when nothing is left, and why."""
        kept: list[int] = []
        failures: list[StreamFailure] = []
        for idx, piece in enumerate(waiting.slices):
            stream = self._streams[piece.key]
            if stream.last_step is not None and waiting.step.step_id < stream.last_step:
                continue  # a late duplicate: its answer was given, and its positions may have been rewound since
            failure = self._breaks_rule(piece, stream)
            if failure:
                failures.append(failure)
            else:
                kept.append(idx)
        return _only(waiting, kept), tuple(failures)

    def _breaks_rule(self, piece: RunSlice, stream: _Stream) -> StreamFailure | None:
        end = piece.start + len(piece.tokens)
        if piece.start <= stream.length and end <= stream.reserved:
            return None
        where, name = self.shape.title, piece.key.stream
        if piece.start > stream.length:
            text = f"{where} holds {stream.length} positions of stream {name}, the slice starts at {piece.start}: send it again from there"
            return StreamFailure(name, StateLostError.code, text)
        text = f"{where} reserved {stream.reserved} positions for stream {name}, the slice ends at {end}: open it with more"
        return StreamFailure(name, ProtocolError.code, text)

    def _begin(self, run: Run) -> None:
        for waiting in run.steps:
            for piece in waiting.slices:
                self._streams[piece.key].last_step = waiting.step.step_id

    def succeeded(self, run: Run, compute_s: float) -> None:
        """The engine computed `run`: its streams are as long as their slices reach."""
        for piece in run.slices:
            count = len(piece.tokens)
            self._streams[piece.key].length = piece.start + count
            self.num_tokens += count
        self.num_steps += 1
        self.compute_s += compute_s

    def step_ahead(self, step: Step, results: Sequence[SliceResult]) -> Step | None:
        """How a step that was sampled goes on without being asked: each slice that may, and did not come to its end, as one row.

        Args:
            step: with the slices that were sampled.
            results: one for each of them.
        """
        slices: list[Slice] = []
        for piece, result in zip(step.slices, results, strict=True):
            if not piece.num_ahead:
                continue
            stream = self._streams[StreamKey(step.client, piece.stream)]
            if stream.last_ahead is not None and step.step_id <= stream.last_ahead:
                continue  # a repeated step: twice on its way it would be four times where messages are doubled, then eight
            if stream.end_tokens and int.from_bytes(result.tokens, "little") in stream.end_tokens:
                continue
            stream.last_ahead = step.step_id
            slices.append(
                Slice(
                    stream=piece.stream,
                    start=piece.start + piece.num_tokens,
                    tokens=result.tokens,
                    kind=SliceKind.ROWS,
                    num_sampled=1,
                    num_ahead=piece.num_ahead - 1,
                )
            )
        if not slices:
            return None
        return Step(client=step.client, epoch=step.epoch, step_id=StepId(step.step_id + 1), slices=tuple(slices))

    def failed(self, run: Run, code: str, message: str) -> tuple[Dropped, ...]:
        """The engine failed on `run`: merged steps run again, each alone; one that was alone already is given up."""
        for piece in run.slices:
            self._streams[piece.key].length = piece.start  # what lies beyond is undefined
        if len(run.steps) > 1:
            self._waiting.extendleft(msgspec.structs.replace(waiting, is_alone=True) for waiting in reversed(run.steps))
            return ()
        waiting = run.steps[0]
        failures = tuple(StreamFailure(piece.key.stream, code, message) for piece in waiting.slices)
        return (Dropped(step=waiting.step, failures=failures),)


def _only(waiting: WaitingStep, kept: list[int]) -> WaitingStep | None:
    """The step with the kept slices and their rows; None when there are none."""
    if len(kept) == len(waiting.slices):
        return waiting
    if not kept:
        return None
    rows = pick_rows([len(piece.tokens) for piece in waiting.slices], kept, waiting.hidden)
    return msgspec.structs.replace(waiting, slices=tuple(waiting.slices[idx] for idx in kept), hidden=rows)


def all_dropped(step: Step, code: str, message: str) -> Dropped:
    """A step that fails as a whole."""
    names = dict.fromkeys(piece.stream for piece in step.slices)
    return Dropped(step=step, failures=tuple(StreamFailure(name, code, message) for name in names))
