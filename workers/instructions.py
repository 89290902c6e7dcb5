"""What the pure parts of a worker ask its loop to do: a closed set, matched exhaustively in `server`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from langchain_pshard.core.bundle import FileEntry
from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.messages import Message, MicroBatch, RequestId, Step
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.transport.hub import Link
from workers.rows import join_rows
from workers.runners.runner import RunSlice, StreamKey


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to whoever is at the end of a link; when the link is gone, so is the need for it."""

    link: Link
    message: Message
    tensor: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPiece:
    """Answer a Fetch with a piece of a file of the bundle."""

    link: Link
    request: RequestId
    file: FileEntry
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStatus:
    """Answer a GetStatus; memory and KV figures are the loop's to read."""

    link: Link
    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Dial the next worker at `address`; the link comes back through `Worker.dialled`."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangUp:
    """Give up the link to a next worker that no client needs any more."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """Set aside KV on one stage; how many positions of the prompt are there already, or why there is no room, comes back through
    `Worker.opened`."""

    stage_idx: int
    key: StreamKey
    num_tokens: int
    sampling: SamplingParams
    prompt: bytes = b""
    """Token ids, int32 little-endian; empty when it shares nothing."""
    grammar: Grammar | None = None
    shares_generated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """Free the KV of one stream on one stage."""

    stage_idx: int
    key: StreamKey


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft:
    """Set aside KV of the draft model; how that went comes back through `Drafts.opened`."""

    key: StreamKey
    num_tokens: int
    prompt: bytes
    """Token ids, int32 little-endian; empty when the stream shares nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseDraft:
    """Free the draft model's KV of one stream."""

    key: StreamKey


class Forward(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Send steps on to the next worker; a link that cannot take them comes back through `Worker.not_sent`."""

    link: Link
    message: MicroBatch
    hidden: Tensor | None  # [tokens, hidden]; None towards the first stage


class WaitingStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One client's step at one stage: the slices that passed every check, and their rows."""

    step: Step
    slices: tuple[RunSlice, ...]
    hidden: Tensor | None  # [tokens of the slices, hidden]; None on the first stage
    arrived_s: float
    is_alone: bool = False
    """It was in a batch that failed, and runs by itself now."""

    @property
    def num_tokens(self) -> int:
        return sum([len(piece.tokens) for piece in self.slices])


class Run(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Compute these steps of one stage as one inference; how it went comes back through
    `Worker.computed`, `Worker.sampled` or `Worker.failed`."""

    stage_idx: int
    steps: tuple[WaitingStep, ...]

    @property
    def slices(self) -> tuple[RunSlice, ...]:
        """The slices of all steps, in order; a stream appears once."""
        steps = self.steps
        return steps[0].slices if len(steps) == 1 else tuple([piece for waiting in steps for piece in waiting.slices])

    @property
    def hidden(self) -> Tensor | None:
        """[num_tokens, hidden], or None on the first stage; a single step's rows are not copied."""
        tensors = [waiting.hidden for waiting in self.steps if waiting.hidden is not None]
        return join_rows(tensors) if tensors else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunDraft:
    """Compute these steps of the draft model, each of one slice; how it went comes back through `Drafts.sampled` or `Drafts.failed`."""

    run: Run


Instruction = (
    Reply | ReplyPiece | ReplyStatus | Dial | HangUp | OpenStream | CloseStream | OpenDraft | CloseDraft | Forward | Run | RunDraft
)
