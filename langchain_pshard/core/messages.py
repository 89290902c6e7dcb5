"""Every message that crosses a wire, and nothing else.

A message is a header: a tagged union of frozen structs, encoded as MessagePack arrays (a field added at the end is ignored by an older
peer). At most one tensor travels beside it, as an untouched buffer (`codec`). docs/protocol.md tells who sends what, when and why.

Three kinds of number order everything:
- `Epoch`: raised by the client alone, whenever it joins its chain anew. A message of an older epoch is dropped.
- `StepId`: counts a client's steps within an epoch, those included that the chain takes by itself. A repeated id is answered again; a stage
  ignores an id below the stream's last.
- `start`: the logical position at which a slice begins: the one rule of `Slice`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

import msgspec

from langchain_pshard.core.bundle import Fingerprint
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.numerics import Numerics, TensorSpec
from langchain_pshard.core.roles import DraftOffer, EngineStatus, StageOffer, StageStatus
from langchain_pshard.core.sampling import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 3
MAX_STEPS_AHEAD = 64
"""Most steps that a chain takes by itself behind one of the client's."""
MAX_STEP_ID = 1 << 62
"""Of a client's steps; those that follow it have numbers that can be written, too."""
MAX_END_TOKENS = 64

ClientId = NewType("ClientId", str)
"""Random, one per client object; keeps the streams of several clients apart."""
WorkerId = NewType("WorkerId", str)
"""Random, one per worker process: a restarted worker is another worker."""
StreamId = NewType("StreamId", int)
"""One generation, unique within its client."""
Epoch = NewType("Epoch", int)
StepId = NewType("StepId", int)
RequestId = NewType("RequestId", int)
"""Pairs a control request with its reply, per client and link."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; the struct's tag is its name on the wire."""


# --- getting to know one another -------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """Client or worker -> worker: who are you?"""

    request: RequestId
    protocol: int
    software: str


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """Worker -> client: answered only when every stage is warm, and the draft."""

    request: RequestId
    protocol: int
    software: str
    worker: WorkerId
    fingerprint: Fingerprint
    model_name: str
    numerics: Numerics
    stages: tuple[StageOffer, ...]
    draft: DraftOffer | None = None


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """One link of the chain: which worker serves the stage of this position, and where its peers reach it."""

    worker: WorkerId
    address: str


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """Client -> every worker: the chain of this epoch, `chain[i]` serving stage i. Frees what older epochs of the client hold."""

    request: RequestId
    client: ClientId
    epoch: Epoch
    chain: tuple[Hop, ...]
    is_ring: bool = False
    """Whether the last stage is to hand steps back to the first (`Slice.num_ahead`), for which it needs a way there."""


class Joined(_Message, frozen=True, kw_only=True, tag="joined"):
    """Worker -> client: the next workers of the chain have been reached; steps may come."""

    request: RequestId
    is_ring: bool = False
    """Whether steps ahead may be granted: asked for, and no worker is in the way. The last one is where it cannot reach the first."""


class Leave(_Message, frozen=True, kw_only=True, tag="leave"):
    """Client -> every worker: free everything of mine. Not answered."""

    client: ClientId


class Fetch(_Message, frozen=True, kw_only=True, tag="fetch"):
    """Client -> worker: a piece of the manifest (by fingerprint) or of a tokenizer file (by sha256). Paths never travel."""

    request: RequestId
    sha256: str
    offset: int


class Fetched(_Message, frozen=True, kw_only=True, tag="fetched"):
    """Worker -> client: at most `FETCH_CHUNK_BYTES` of the content from `offset`, and its whole size."""

    request: RequestId
    num_bytes: int
    data: bytes


FETCH_CHUNK_BYTES = 128 << 10


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """Worker -> client: a control request failed; `code` names a class of `errors`."""

    request: RequestId
    code: str
    message: str


# --- streams ---------------------------------------------------------------------------------------------------------


class Open(_Message, frozen=True, kw_only=True, tag="open"):
    """Client -> every worker: admit a stream of up to `num_tokens` positions (prompt and output) on every stage you serve."""

    request: RequestId
    client: ClientId
    epoch: Epoch
    stream: StreamId
    num_tokens: int
    sampling: SamplingParams
    prompt: bytes = b""
    """The prompt's token ids, int32 little-endian (its beginning will do): a stage may hold KV of it already. Empty: share nothing."""
    grammar: Grammar | None = None
    """What the generated text must conform to; the last stage refuses one that it cannot enforce."""
    shares_generated: bool = False
    """Whether a stage may also look the prompt up in generated text, and keep this stream's; tokens may then differ in close decisions."""
    end_tokens: tuple[int, ...] = ()
    """What ends the text, at most `MAX_END_TOKENS`: the chain does not go on by itself behind one of these."""


class Opened(_Message, frozen=True, kw_only=True, tag="opened"):
    """Worker -> client: the stream's KV is set aside on every stage of this worker."""

    request: RequestId
    cached: tuple[int, ...] = ()
    """Leading positions of the prompt that each stage of this worker holds: the first slice may start at the least of all, or before."""


class Close(_Message, frozen=True, kw_only=True, tag="close"):
    """Client -> every worker: free these streams. Not answered; unknown ones are ignored."""

    client: ClientId
    epoch: Epoch
    streams: tuple[StreamId, ...]


class SliceKind(IntEnum):
    """How a stage computes a slice. The two write KV that differs in its last bits, so the client chooses, never a stage."""

    PREFILL = 0
    """One run of two or more tokens (a prompt of one token is the only exception)."""
    ROWS = 1
    """Every token on its own, over the stream's shared blocks: plain decoding and verification."""


class Slice(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Consecutive tokens of one stream, and the one step rule.

    A stage that holds `length` positions for the stream: start == length continues; start < length rewinds to start first;
    start > length means the stage has lost state, and says so.
    """

    stream: StreamId
    start: int
    tokens: bytes
    """Token ids, int32 little-endian; every stage gets them (the first embeds them, the last needs them as history)."""
    kind: SliceKind
    num_sampled: int
    """How many trailing positions the last stage samples a next token for."""
    returns_logits: bool = False
    """Whether the last stage answers with the logits of those positions as well; refused by workers that were not started for it."""
    num_ahead: int = 0
    """How many more tokens the chain generates behind this slice without being asked: the last stage sends the one it sampled to the first
    as a row of the next step id, and so on. Only for slices that sample one token, in a chain that is a ring."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """What one stage spent on the micro-batch that carried a step, in microseconds."""

    queue_us: int
    """From arrival to the start of inference."""
    compute_us: int


class Step(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One turn of one client: slices of its streams, each stream at most once."""

    client: ClientId
    epoch: Epoch
    step_id: StepId
    slices: tuple[Slice, ...]
    timings: tuple[StageTiming, ...] = ()
    """One entry for each stage passed so far."""

    @property
    def num_tokens(self) -> int:
        return sum([piece.num_tokens for piece in self.slices])


class MicroBatch(_Message, frozen=True, kw_only=True, tag="batch"):
    """Client -> first stage, and stage -> next stage: steps that run as one inference.

    The tensor beside it holds the hidden states of all slices in order, [tokens, hidden]; the first stage gets none.
    """

    stage_idx: int
    steps: tuple[Step, ...]
    hidden: TensorSpec | None = None


class SliceResult(msgspec.Struct, frozen=True, array_like=True):
    """The tokens sampled for one slice, in order of position."""

    stream: StreamId
    tokens: bytes
    """Token ids, int32 little-endian, `num_sampled` of them."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    forced: bytes = b""
    """Token ids that the stream's grammar leaves no choice about, after those that count: the best of drafts for the next step."""


class StepResult(_Message, frozen=True, kw_only=True, tag="result"):
    """Last stage -> client: what a step came to. Slices that failed on the way are missing here and named in a `StepFailed`."""

    epoch: Epoch
    step_id: StepId
    results: tuple[SliceResult, ...]
    timings: tuple[StageTiming, ...]
    logits: TensorSpec | None = None
    """Of the tensor beside it, [positions, vocab]: the logits that `logits_of` asked for, stream after stream. Nearly always none."""
    logits_of: tuple[StreamId, ...] = ()


class StreamFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why one stream's slice was dropped from a step."""

    stream: StreamId
    code: str
    message: str


class StepFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """Any stage -> client: these streams of a step go no further; the others went on."""

    epoch: Epoch
    step_id: StepId
    stage_idx: int
    failures: tuple[StreamFailure, ...]


class DraftAsk(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one stream goes on, and how many tokens to guess behind that: a `Slice` by the same one step rule. A new stream begins at 0."""

    stream: StreamId
    start: int
    tokens: bytes
    kind: SliceKind
    num_drafts: int
    num_positions: int
    """To set aside for a stream that is new here: prompt and output."""
    is_shared: bool = False
    """Whether a prompt may share KV with others that begin alike."""


class Draft(_Message, frozen=True, kw_only=True, tag="draft"):
    """Client -> worker that drafts: guess. A stream's later ask ends the guessing of an earlier one, whose tokens it still takes in."""

    client: ClientId
    epoch: Epoch
    asks: tuple[DraftAsk, ...]


class DraftResult(msgspec.Struct, frozen=True, array_like=True):
    """What may follow the first `num_positions` tokens of a stream."""

    stream: StreamId
    num_positions: int
    tokens: bytes
    """Token ids, int32 little-endian; fewer than were asked for when there was no room for more, or a later ask came."""


class Drafted(_Message, frozen=True, kw_only=True, tag="drafted"):
    """Worker -> client: every ask of a known client comes to a result or a failure. Who fails goes on without drafts."""

    epoch: Epoch
    results: tuple[DraftResult, ...]
    failures: tuple[StreamFailure, ...] = ()


# --- liveness and status ---------------------------------------------------------------------------------------------


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Client or worker -> worker, answered by the inference loop itself; renews the lease of the client's streams."""

    request: RequestId
    client: ClientId | None = None


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    request: RequestId


class GetStatus(_Message, frozen=True, kw_only=True, tag="get-status"):
    request: RequestId


class Status(_Message, frozen=True, kw_only=True, tag="status"):
    """Worker -> client."""

    request: RequestId
    worker: WorkerId
    uptime_s: float
    rss_bytes: int
    num_clients: int
    num_malformed: int
    """Messages dropped because they could not be decoded, or made no sense as a whole."""
    stages: tuple[StageStatus, ...]
    draft: EngineStatus | None = None


Message = (
    Hello
    | Welcome
    | Join
    | Joined
    | Leave
    | Fetch
    | Fetched
    | Refused
    | Open
    | Opened
    | Close
    | MicroBatch
    | StepResult
    | StepFailed
    | Draft
    | Drafted
    | Ping
    | Pong
    | GetStatus
    | Status
)
