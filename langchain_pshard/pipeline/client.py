"""`PipelineClient`: a model served by a fleet of workers, for any number of threads and event loops. Knows nothing of LangChain."""

from __future__ import annotations

import functools
import logging
import operator
import queue
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import Manifest
from langchain_pshard.core.errors import CapacityError, ContextOverflowError, InvalidOptionError, PShardError, WorkerUnreachableError
from langchain_pshard.core.messages import ClientId, Fetch, Fetched, GetStatus, Message, RequestId, Status
from langchain_pshard.core.version import software_version
from langchain_pshard.output import TextStream
from langchain_pshard.pipeline.assembler import Assembler, joined
from langchain_pshard.pipeline.chain import Chain
from langchain_pshard.pipeline.generation import DEFAULT_MAX_TOKENS, Generation, GenerationParams
from langchain_pshard.pipeline.iterators import AsyncGenerationIterator, GenerationIterator, MakeRequest
from langchain_pshard.pipeline.ngram import NgramDrafter
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.reactor import Reactor
from langchain_pshard.pipeline.requests import Reply
from langchain_pshard.pipeline.scoring import gather_logits
from langchain_pshard.pipeline.session import Session
from langchain_pshard.pipeline.speculation import Drafter, begin
from langchain_pshard.pipeline.store import default_cache_dir, model_files
from langchain_pshard.pipeline.stream import Sink, StreamRequest
from langchain_pshard.tokenizer import Tokenizer
from langchain_pshard.transport.address import Address
from langchain_pshard.transport.hub import Hub
from langchain_pshard.transport.zeromq import ZmqHub

STATUS_TIMEOUT_S = 2.0
FETCH_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 0.5
_log = logging.getLogger(__name__)
_DEFAULT_PARAMS = GenerationParams()
_DEFAULT_OPTIONS = ClientOptions()
_LOGITS_PARAMS = GenerationParams(max_tokens=1, ignore_eos=True, prefix_cache=False, draft=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """One worker, as it answered just now."""

    address: str
    stages: tuple[int, ...]
    round_trip_ms: float | None
    """None when it did not answer."""
    status: Status | None
    error: str | None

    @property
    def is_alive(self) -> bool:
        return self.status is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet, as it answered just now; one entry a worker, in the order the client was given."""

    workers: tuple[WorkerHealth, ...]

    @property
    def is_healthy(self) -> bool:
        return all(worker.is_alive for worker in self.workers)


class PipelineClient:
    """A connection to a fleet, made by `connect`. A context manager. All methods may be called from any thread.

    When a worker is lost, running generations end with `WorkerLostError`; waiting ones and the next call connect anew.

    Attributes:
        manifest: what the bundle says about the model.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, reactor: Reactor, addresses: tuple[str, ...], manifest: Manifest, tokenizer: Tokenizer) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self._addresses = addresses
        self._reactor = reactor
        self._has_told_inexact = False
        self._logits_lock = threading.Lock()  # so that a step never asks for more logits than a stage allows
        self._close = weakref.finalize(self, reactor.close)

    @classmethod
    def connect(
        cls,
        workers: Sequence[str],
        *,
        connect_timeout_s: float = 30.0,
        options: ClientOptions = _DEFAULT_OPTIONS,
        hub_factory: Callable[[], Hub] = ZmqHub,
        on_lost: Callable[[PShardError], object] | None = None,
    ) -> PipelineClient:
        """Find the workers, join them into a chain, and get manifest and tokenizer from the first stage (or the cache).

        Args:
            workers: `tcp://host:port` of every worker, in any order. They may still be loading.
            connect_timeout_s: longest wait for all of them, now and whenever the client connects anew.
            options: the client's other bounds.
            hub_factory: the transport.
            on_lost: hears why, whenever the chain is lost, in the client's own thread: it must not block.

        Raises:
            InvalidOptionError: no address, one twice, or one that is none.
            WorkerUnreachableError: a worker did not answer in time; `addresses` names all that did not.
            FleetMismatchError: the workers are not the stages of one model under one numerics class.
            ProtocolError, BundleError: a worker speaks another version, or sent something else than it should.
        """
        addresses = _addresses(workers)
        if not connect_timeout_s > 0:
            raise InvalidOptionError(f"connect_timeout_s={connect_timeout_s} is out of range; valid: above 0")

        def make_session(now: float) -> Session:
            return Session(
                ClientId(secrets.token_hex(8)),
                addresses,
                software=software_version(),
                connect_timeout_s=connect_timeout_s,
                options=options,
                now=now,
                on_lost=on_lost,
            )

        reactor = Reactor(hub_factory(), make_session)
        try:
            chain = _connected(reactor)
            cache_dir = default_cache_dir() if options.cache_dir is None else options.cache_dir
            fetch = functools.partial(_fetch_piece, reactor, chain.first.address)
            with model_files(chain.fingerprint, fetch, cache_dir) as files:
                return cls(reactor, addresses, files.manifest, Tokenizer.from_folder(files.tokenizer))
        except BaseException:
            reactor.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether calls can be made: not when it was closed, or has failed inside."""
        return self._reactor.is_open

    @property
    def chain(self) -> Chain:
        """The stages, where they are served, and how."""
        chain = self._reactor.chain
        assert chain is not None  # `connect` has joined one
        return chain

    def generate(
        self, prompt: str | Sequence[int], params: GenerationParams = _DEFAULT_PARAMS, *, drafter: Drafter | None = None
    ) -> GenerationIterator:
        """Generate; the work begins at once, and stops when the iterator is closed or abandoned.

        Args:
            prompt: text (special tokens are added as the model wants them) or token ids.
            params: options of this generation.
            drafter: guesses tokens ahead, instead of what `params.draft` names.

        Returns:
            An iterator over `GenerationChunk`s, of which the last one has an `end`.

        Raises:
            InvalidOptionError: a prompt that is empty or neither text nor token ids, ids that the vocabulary does not have, a drafter that
                fails, or `draft="model"` on a fleet without a draft model.
            ContextOverflowError: prompt and max_tokens exceed the model's context.
            CapacityError: a stage cannot hold so many positions at all; later, while iterating: room did not come free in time.
            WorkerLostError, WorkerUnreachableError, StateLostError, DeadlineError, InferenceError, ClosedError: while iterating.
        """
        return GenerationIterator(self._reactor, self._assembler(params), self._request(prompt, params, drafter), self)

    def agenerate(
        self, prompt: str | Sequence[int], params: GenerationParams = _DEFAULT_PARAMS, *, drafter: Drafter | None = None
    ) -> AsyncGenerationIterator:
        """`generate` for event loops, without a thread; the work begins at the first `anext` and stops at `aclose` or cancellation."""
        return AsyncGenerationIterator(self._reactor, self._assembler(params), self._request(prompt, params, drafter), self)

    def complete(
        self, prompt: str | Sequence[int], params: GenerationParams = _DEFAULT_PARAMS, *, drafter: Drafter | None = None
    ) -> Generation:
        """`generate`, joined."""
        return joined(self.generate(prompt, params, drafter=drafter))

    async def acomplete(
        self, prompt: str | Sequence[int], params: GenerationParams = _DEFAULT_PARAMS, *, drafter: Drafter | None = None
    ) -> Generation:
        """`agenerate`, joined."""
        return joined([chunk async for chunk in self.agenerate(prompt, params, drafter=drafter)])

    def logits(self, prompt: str | Sequence[int]) -> npt.NDArray[np.float32]:
        """What the model says after every token of the prompt, [tokens, vocab], to compare it with another implementation.

        Not for production: a vocabulary of floats travels for every token, where `generate` needs four bytes. Workers refuse it unless
        that of the last stage was started with --allow-logits. One call at a time; others wait.

        Raises:
            InvalidOptionError: the fleet does not allow it, or as `generate`.
            ContextOverflowError, CapacityError, FleetError: as `generate`.
        """
        last = self.chain.stages[-1]
        if not last.allows_logits:
            raise InvalidOptionError(
                f"the worker of the last stage at {last.address} returns no logits: start it with --allow-logits, for comparison only"
            )
        make_request = self._request(prompt, _LOGITS_PARAMS, None)
        with self._logits_lock:
            return gather_logits(self._reactor, make_request)

    def status(self) -> FleetStatus:
        """Ask every worker how it is; waits at most `STATUS_TIMEOUT_S`.

        Raises:
            ClosedError: the client is closed.
        """
        inboxes = [
            _ask(self._reactor, address, lambda request: GetStatus(request=request), STATUS_TIMEOUT_S) for address in self._addresses
        ]
        chain = self.chain
        return FleetStatus(
            workers=tuple(
                _health(address, chain.stages_at(address), self._reactor.take(inbox))
                for address, inbox in zip(self._addresses, inboxes, strict=True)
            )
        )

    def close(self) -> None:
        """End running generations with `ClosedError`, leave the fleet and free the sockets. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assembler(self, params: GenerationParams) -> Assembler:
        return Assembler(TextStream(self.tokenizer, params.stop, params.marks))

    def _request(self, prompt: str | Sequence[int], params: GenerationParams, drafter: Drafter | None) -> MakeRequest:
        """The checked request, but for its sink."""
        tokens = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else _token_ids(prompt)
        self._check_prompt(tokens)
        context_length = self.manifest.context_length
        max_tokens = min(DEFAULT_MAX_TOKENS, context_length - len(tokens)) if params.max_tokens is None else params.max_tokens
        if max_tokens < 1 or len(tokens) + max_tokens > context_length:
            raise ContextOverflowError.of(num_prompt_tokens=len(tokens), max_tokens=max(1, max_tokens), context_length=context_length)
        self._check_capacity(len(tokens), max_tokens)
        drafts_by_model = drafter is None and params.draft == "model"
        drafter = self._drafter(params, drafter)
        if params.prefix_cache == "all" and not self._has_told_inexact:
            self._has_told_inexact = True
            _log.warning(
                "prefix_cache='all' is not exact: KV of generated text differs in its last bits from that of a prompt, so texts may differ"
                " from those without it; prefix_cache=True reuses only what is exact"
            )

        def make(sink: Sink) -> StreamRequest:
            return StreamRequest(
                prompt=tokens,
                max_tokens=max_tokens,
                sampling=params.sampling,
                eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.manifest.eos_token_ids),
                vocab_size=self.manifest.vocab_size,
                sink=sink,
                timeout_s=params.timeout_s,
                drafting=None if drafter is None else begin(drafter, tokens),
                drafts_by_model=drafts_by_model,
                num_drafts=None if params.draft_tokens == "auto" else params.draft_tokens,
                prefix_cache=params.prefix_cache,
                grammar=params.grammar,
            )

        return make

    def _drafter(self, params: GenerationParams, drafter: Drafter | None) -> Drafter | None:
        """What drafts for this call. `auto` keeps the promise that text depends on nothing but the stream; who asks for drafts where
        the fleet cannot take them back exactly gets them, and is told."""
        inexact = [stage for stage in self.chain.stages if not stage.is_resumable]
        is_model = drafter is None and params.draft == "model"
        if is_model and self.chain.draft is None:
            raise InvalidOptionError(
                "draft='model' needs a worker that serves the draft model, and none of this fleet does: start one with"
                " `pshard-worker BUNDLE --draft`, on a bundle exported with --draft, and name it too, or let ChatPShard(bundle=...,"
                " draft='model') start it; valid without one: 'auto', 'ngram', None"
            )
        if drafter is None and (params.draft == "ngram" or (params.draft == "auto" and not inexact)):
            drafter = NgramDrafter()
        if (drafter is not None or is_model) and inexact:
            stage = inexact[0]
            _log.warning(
                "drafts are not exact on this fleet (stage %d at %s: runner %s, numerics %s, KV %s): texts may differ from those without"
                " drafts; exact are the paged runner with KV f16 or f32, and any runner with --numerics exact",
                stage.stage_idx, stage.address, stage.numerics.runner, stage.numerics.name, stage.numerics.kv_precision,
            )  # fmt: skip
        return drafter

    def _check_prompt(self, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise InvalidOptionError("the prompt is empty; at least one token is needed, such as the model's begin token")
        vocab_size = self.manifest.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise InvalidOptionError(f"the prompt has token id {wrong}; valid: 0 to {vocab_size - 1}")

    def _check_capacity(self, num_prompt_tokens: int, max_tokens: int) -> None:
        num_positions = num_prompt_tokens + max_tokens
        stage = self.chain.tightest(num_positions)
        needed = stage.kv_needed(num_positions)
        if needed > stage.kv_capacity_tokens:
            raise CapacityError(
                f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) need {needed} KV positions; stage {stage.stage_idx} at"
                f" {stage.address} holds {stage.kv_capacity_tokens} in all: lower max_tokens, or start that worker with more --kv-memory",
                is_retryable=False,
            )


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in prompt)  # numpy's integers too, but no 1.5
    except TypeError as error:
        raise InvalidOptionError(
            f"a prompt of type {type(prompt).__name__} is neither text nor a sequence of token ids: {error}"
        ) from error


def _addresses(workers: Sequence[str]) -> tuple[str, ...]:
    if isinstance(workers, str) or not workers:
        raise InvalidOptionError(f"workers={workers!r} is no list of addresses; valid: ['tcp://host:port', ...], one for each worker")
    for worker in workers:
        if not isinstance(worker, str):
            raise InvalidOptionError(f"workers has {worker!r}, which is no address; valid: 'tcp://host:port'")
    addresses = tuple(str(Address.parse_peer(worker)) for worker in workers)
    for address in addresses:
        if addresses.count(address) > 1:
            raise InvalidOptionError(f"workers names {address} twice: name every worker once")
    return addresses


def _connected(reactor: Reactor) -> Chain:
    inbox: queue.SimpleQueue[Chain | PShardError] = queue.SimpleQueue()
    reactor.post(lambda session, now: session.connect(inbox.put, now))
    outcome = reactor.take(inbox)
    if isinstance(outcome, WorkerUnreachableError) and outcome.addresses:
        raise WorkerUnreachableError(f"{outcome}. {_probed(outcome.addresses)}", addresses=outcome.addresses)
    if isinstance(outcome, PShardError):
        raise outcome
    return outcome


def _probed(addresses: Sequence[str]) -> str:
    """What a plain connection says about workers that did not answer."""
    found = []
    for text in addresses:
        address = Address.parse(text)
        try:
            with socket.socket(socket.AF_INET6 if address.is_ipv6 else socket.AF_INET) as probe:  # as the transport dials
                probe.settimeout(_PROBE_TIMEOUT_S)
                probe.connect((address.host, address.port))
        except OSError as error:
            found.append(f"{text}: no connection ({error.strerror or error}); is the worker started, and the address right?")
        else:
            found.append(f"{text}: something accepts connections there; is it a worker that still loads, or hangs?")
    return " ".join(found)


def _ask(reactor: Reactor, address: str, build: Callable[[RequestId], Message], timeout_s: float) -> queue.SimpleQueue[Reply | PShardError]:
    """Send a control request; its reply, or the error, arrives in the inbox within `timeout_s`."""
    inbox: queue.SimpleQueue[Reply | PShardError] = queue.SimpleQueue()
    reactor.post(lambda session, now: session.ask(address, build, inbox.put, timeout_s, now))
    return inbox


def _fetch_piece(reactor: Reactor, address: str, sha256: str, offset: int) -> Fetched:
    inbox = _ask(reactor, address, lambda request: Fetch(request=request, sha256=sha256, offset=offset), FETCH_TIMEOUT_S)
    outcome = reactor.take(inbox)
    if isinstance(outcome, PShardError):
        raise outcome
    assert isinstance(outcome.message, Fetched)
    return outcome.message


def _health(address: str, stages: tuple[int, ...], outcome: Reply | PShardError) -> WorkerHealth:
    if isinstance(outcome, Reply) and isinstance(outcome.message, Status):
        return WorkerHealth(address=address, stages=stages, round_trip_ms=1e3 * outcome.round_trip_s, status=outcome.message, error=None)
    return WorkerHealth(address=address, stages=stages, round_trip_ms=None, status=None, error=str(outcome))
