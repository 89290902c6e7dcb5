"""Everything one worker believes, put together: messages in, instructions out.

Pure: no sockets, clocks, threads or engines; `server` carries the instructions out and reports back. This module decides what each
message means; `membership` knows clients and next workers, `streams` who is admitted, `steps` what runs and where results go, `stage` the
one step rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from langchain_pshard.core.bundle import Manifest
from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import (
    BundleError,
    CapacityError,
    ContextOverflowError,
    InferenceError,
    InvalidOptionError,
    ProtocolError,
    PShardError,
    StateLostError,
    WorkerLostError,
)
from langchain_pshard.core.messages import (
    FETCH_CHUNK_BYTES,
    MAX_END_TOKENS,
    PROTOCOL_VERSION,
    ClientId,
    Close,
    Draft,
    Drafted,
    Fetch,
    Fetched,
    GetStatus,
    Hello,
    Join,
    Leave,
    MicroBatch,
    Open,
    Ping,
    Pong,
    Refused,
    RequestId,
    SliceResult,
    StreamFailure,
    Welcome,
    WorkerId,
)
from langchain_pshard.core.numerics import Numerics
from langchain_pshard.core.roles import DraftOffer, StageOffer
from langchain_pshard.transport.hub import Arrived, Link
from workers.draft import Drafts
from workers.instructions import Forward, Instruction, Reply, ReplyPiece, ReplyStatus, Run
from workers.membership import Client, Membership
from workers.runners.boundary import row_width
from workers.runners.runner import StreamKey
from workers.stage import TOKEN_BUDGET, Stage, StageShape
from workers.steps import Steps
from workers.streams import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a worker says about itself; fixed once it is warm."""

    worker: WorkerId
    software: str
    manifest: Manifest
    numerics: Numerics
    offers: tuple[StageOffer, ...]
    draft: DraftOffer | None = None

    def welcome(self, request: RequestId) -> Welcome:
        return Welcome(
            request=request,
            protocol=PROTOCOL_VERSION,
            software=self.software,
            worker=self.worker,
            fingerprint=self.manifest.fingerprint,
            model_name=self.manifest.model_name,
            numerics=self.numerics,
            stages=self.offers,
            draft=self.draft,
        )


class Worker:
    """Decides for one worker process. Not thread-safe; owned by the loop."""

    def __init__(self, identity: Identity, *, token_budget: int = TOKEN_BUDGET) -> None:
        manifest = identity.manifest
        self._identity = identity
        self._stages = {
            offer.stage_idx: Stage(
                StageShape(
                    stage_idx=offer.stage_idx,
                    is_last=offer.stage_idx == manifest.num_stages - 1,
                    vocab_size=manifest.vocab_size,
                    row_width=row_width(identity.numerics.boundary, manifest.hidden_size),
                    boundary=identity.numerics.boundary,
                    allows_logits=offer.allows_logits,
                ),
                token_budget=token_budget,
            )
            for offer in identity.offers
        }
        self._members = Membership(
            worker=identity.worker,
            served=frozenset(self._stages),
            num_stages=manifest.num_stages,
            software=identity.software,
            drafts=identity.draft is not None,
        )
        self._streams = Streams(self._stages)
        self._steps = Steps(identity.worker, self._stages, self._members)
        self.drafts: Drafts | None = None
        """The draft role, for the loop to report to; None when this worker does not draft."""
        if identity.draft is not None and manifest.draft is not None:
            self.drafts = Drafts.of(manifest.draft, self._members, vocab_size=manifest.vocab_size, token_budget=token_budget)
        self._is_drafts_turn = False
        self._manifest_json = manifest.to_json()
        self._files = {file.sha256: file for file in manifest.tokenizer_files}
        self._is_draining = False
        self._num_unasked = 0

    @property
    def num_malformed(self) -> int:
        """Messages that could be decoded and made no sense."""
        return self._num_unasked + self._steps.num_malformed

    @property
    def num_clients(self) -> int:
        return self._members.num_clients

    @property
    def num_streams(self) -> int:
        return self._streams.num_streams

    @property
    def has_work(self) -> bool:
        """Whether `next_run` has something to choose from."""
        return self._steps.has_work or (self.drafts is not None and self.drafts.has_work)

    @property
    def expects_more(self) -> bool:
        """Whether steps may arrive that would run together with those that wait."""
        return self._steps.expects_more

    @property
    def id(self) -> WorkerId:
        return self._identity.worker

    def address_of(self, link: Link) -> str:
        """The address of a next worker, for people."""
        return self._members.address_of(link) or "an address that is not needed any more"

    def stage(self, stage_idx: int) -> Stage:
        return self._stages[stage_idx]

    def drain(self) -> None:
        """Admit nothing more; the streams that are open go on."""
        self._is_draining = True

    # --- messages ----------------------------------------------------------------------------------------------------

    def received(self, event: Arrived, now_s: float) -> list[Instruction]:
        """Decide on a message."""
        link = event.link
        match event.message:
            case MicroBatch() as batch:
                return self._steps.take(batch, event.tensor, now_s)
            case Draft() as message:
                self._members.heard(message.client, now_s, link)
                return self._draft(link, message, now_s)
            case Ping(request=request, client=client):
                if client is not None:
                    self._members.heard(client, now_s, link)
                return [Reply(link=link, message=Pong(request=request))]
            case Open() as ask:
                self._members.heard(ask.client, now_s, link)
                return self._open(link, ask)
            case Close() as close:
                self._members.heard(close.client, now_s, link)
                return self._close(close)
            case Hello() as hello:
                return [Reply(link=link, message=self._greet(hello))]
            case Join() as join:
                return self._join(link, join, now_s)
            case Leave(client=client):
                return self._forget(client)
            case Fetch() as fetch:
                return [self._fetch(link, fetch)]
            case GetStatus(request=request):
                return [ReplyStatus(link=link, request=request)]
            case Welcome() as welcome:
                return self._members.welcomed(link, welcome)
            case Refused() as refused:
                return self._members.refused(link, refused)
            case _:
                self._num_unasked += 1  # an answer to a question that this worker never asks
                return []

    def dialled(self, address: str, link: Link, now_s: float) -> list[Instruction]:
        """The link that a Dial asked for."""
        return self._members.dialled(address, link, now_s)

    def lost(self, link: Link) -> list[Instruction]:
        """The connection to a next worker broke; it is being dialled again."""
        return self._members.lost(link)

    def time_passed(self, now_s: float) -> list[Instruction]:
        """Call about once a second: leases, and next workers that do not answer."""
        out: list[Instruction] = []
        for client in self._members.expired(now_s):
            out += self._forget(client.id)
        return out + self._members.time_passed(now_s)

    def _greet(self, hello: Hello) -> Welcome | Refused:
        if hello.protocol == PROTOCOL_VERSION:
            return self._identity.welcome(hello.request)
        older, newer = ("yourself", "this worker's") if hello.protocol < PROTOCOL_VERSION else ("this worker", "your")
        return Refused(
            request=hello.request,
            code=ProtocolError.code,
            message=(
                f"you speak protocol {hello.protocol} (PShard {hello.software}), worker {self._identity.worker} speaks"
                f" {PROTOCOL_VERSION} (PShard {self._identity.software}): upgrade {older} to {newer} version"
            ),
        )

    def _fetch(self, link: Link, fetch: Fetch) -> Instruction:
        def refused(code: str, message: str) -> Reply:
            return Reply(link=link, message=Refused(request=fetch.request, code=code, message=message))

        file = self._files.get(fetch.sha256)
        is_manifest = fetch.sha256 == self._identity.manifest.fingerprint
        if file is None and not is_manifest:
            return refused(BundleError.code, f"no manifest and no tokenizer file of this bundle has the hash {fetch.sha256[:64]!r}")
        num_bytes = file.num_bytes if file else len(self._manifest_json)
        if not 0 <= fetch.offset <= num_bytes:
            return refused(ProtocolError.code, f"offset {fetch.offset} of {num_bytes} bytes")
        if file is not None:
            return ReplyPiece(link=link, request=fetch.request, file=file, offset=fetch.offset)
        data = self._manifest_json[fetch.offset : fetch.offset + FETCH_CHUNK_BYTES]
        return Reply(link=link, message=Fetched(request=fetch.request, num_bytes=num_bytes, data=data))

    # --- clients and streams -----------------------------------------------------------------------------------------

    def _join(self, link: Link, join: Join, now_s: float) -> list[Instruction]:
        if self._is_draining:
            return [Reply(link=link, message=self._is_leaving(join.request))]
        freed = self._free_all(join.client) if self._members.is_newer(join) else []
        return freed + self._members.join(link, join, now_s)

    def _open(self, link: Link, ask: Open) -> list[Instruction]:
        key = StreamKey(ask.client, ask.stream)
        client = self._members.find(ask.client)
        known = self._streams.find(key)
        refusal = self._refusal(client, known, ask)
        if refusal:
            return [Reply(link=link, message=refusal)]
        if known is not None:
            return [Reply(link=link, message=self._streams.opened_again(ask))]
        assert client is not None  # `_refusal` refuses strangers
        return self._streams.admit(ask, link, client.stages_on(self._identity.worker))

    def _refusal(self, client: Client | None, known: Open | None, ask: Open) -> Refused | None:
        def refused(code: str, message: str) -> Refused:
            return Refused(request=ask.request, code=code, message=message)

        if client is None or not client.has_joined or client.epoch != ask.epoch:
            at = "does not know this client" if client is None else f"has this client at epoch {client.epoch}"
            state = "" if client is None or client.has_joined else ", still joining"
            return refused(
                StateLostError.code, f"worker {self._identity.worker} {at}{state}; the stream is of epoch {ask.epoch}: join first"
            )
        if not client.stages_on(self._identity.worker):
            return refused(ProtocolError.code, f"worker {self._identity.worker} has no stage in this chain: open streams elsewhere")
        if known is not None:
            is_same = msgspec.structs.replace(known, request=ask.request) == ask
            return None if is_same else refused(ProtocolError.code, f"stream {ask.stream} is open with other parameters: use another id")
        if self._is_draining:
            return self._is_leaving(ask.request)
        if ask.num_tokens < 1:
            return refused(InvalidOptionError.code, f"a stream of {ask.num_tokens} positions; valid: 1 or more")
        context = self._identity.manifest.context_length
        if ask.num_tokens > context:
            return refused(ContextOverflowError.code, f"a stream of {ask.num_tokens} positions; the model's context holds {context}")
        if fault := _prompt_fault(ask, self._identity.manifest.vocab_size):
            return refused(ProtocolError.code, f"malformed prompt of stream {ask.stream}: {fault}")
        if fault := _ends_fault(ask, self._identity.manifest.vocab_size):
            return refused(ProtocolError.code, f"malformed end tokens of stream {ask.stream}: {fault}")
        return None

    def _is_leaving(self, request: RequestId) -> Refused:
        text = f"worker {self._identity.worker} is shutting down and takes nothing new: use another worker, or start it again"
        return Refused(request=request, code=WorkerLostError.code, message=text)

    def opened(self, key: StreamKey, outcome: int | PShardError) -> list[Instruction]:
        """How the last OpenStream went: positions of the prompt that the stage holds already, or why it refuses."""
        return self._streams.opened(key, outcome)

    def _close(self, close: Close) -> list[Instruction]:
        client = self._members.find(close.client)
        if client is None or client.epoch != close.epoch:
            return []
        return [step for stream in close.streams for step in self._free(StreamKey(close.client, stream))]

    def _free(self, key: StreamKey) -> list[Instruction]:
        return self._streams.free(key) + (self.drafts.free(key) if self.drafts else [])

    def _free_all(self, client: ClientId) -> list[Instruction]:
        return self._streams.free_all(client) + (self.drafts.free_all(client) if self.drafts else [])

    def _forget(self, client: ClientId) -> list[Instruction]:
        return self._free_all(client) + self._members.forget(client)

    # --- steps: see `steps` ------------------------------------------------------------------------------------------

    def next_run(self) -> list[Instruction]:
        """The next inference (at most one, as the last instruction), with what was refused on the way to it.

        Stages and the draft take turns where both have work: neither can keep the other waiting for longer than one inference.
        """
        self._is_drafts_turn = self.drafts is not None and self.drafts.has_work and not (self._is_drafts_turn and self._steps.has_work)
        return self.drafts.next_run() if self.drafts and self._is_drafts_turn else self._steps.next_run()

    def computed(self, run: Run, hidden: Tensor, *, started_s: float, ended_s: float) -> list[Instruction]:
        """A stage before the last one computed `run`; `hidden` is [tokens of the run, hidden]."""
        return self._steps.computed(run, hidden, started_s=started_s, ended_s=ended_s)

    def sampled(self, run: Run, results: Sequence[SliceResult], logits: Tensor, *, started_s: float, ended_s: float) -> list[Instruction]:
        """The last stage computed `run`; `results` has one entry a slice, in order, and `logits` the rows that were sampled."""
        return self._steps.sampled(run, results, logits, started_s=started_s, ended_s=ended_s)

    def failed(self, run: Run, error: InferenceError | CapacityError | StateLostError) -> list[Instruction]:
        """The engine failed on `run`."""
        return self._steps.failed(run, error)

    def not_sent(self, forward: Forward) -> list[Instruction]:
        """The link to the next worker did not take these steps."""
        return self._steps.not_sent(forward)

    # --- drafts: see `draft` -----------------------------------------------------------------------------------------

    def _draft(self, link: Link, message: Draft, now_s: float) -> list[Instruction]:
        client = self._members.find(message.client)
        if client is not None and message.epoch < client.epoch:
            return []
        if client is not None and client.has_joined and client.epoch == message.epoch and self.drafts is not None:
            return self.drafts.ask(message, is_draining=self._is_draining, now_s=now_s)
        text, code = f"worker {self._identity.worker} does not know this client at epoch {message.epoch}: join first", StateLostError.code
        if self.drafts is None:
            text, code = f"worker {self._identity.worker} serves no draft: ask the one whose Welcome offers it", ProtocolError.code
        failures = tuple(StreamFailure(ask.stream, code, text) for ask in message.asks)
        return [Reply(link=link, message=Drafted(epoch=message.epoch, results=(), failures=failures))]


def _ends_fault(ask: Open, vocab_size: int) -> str | None:
    if len(ask.end_tokens) > MAX_END_TOKENS:
        return f"{len(ask.end_tokens)} of them; valid: at most {MAX_END_TOKENS}"
    if outside := [token for token in ask.end_tokens if not 0 <= token < vocab_size]:
        return f"token id {outside[0]} in a vocabulary of {vocab_size}"
    return None


def _prompt_fault(ask: Open, vocab_size: int) -> str | None:
    if len(ask.prompt) % 4 or len(ask.prompt) > 4 * ask.num_tokens:
        return f"{len(ask.prompt)} bytes of token ids; valid: 4 for each of at most {ask.num_tokens} tokens"
    tokens = np.frombuffer(ask.prompt, dtype="<i4")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        return f"token ids from {tokens.min()} to {tokens.max()} in a vocabulary of {vocab_size}"
    return None
