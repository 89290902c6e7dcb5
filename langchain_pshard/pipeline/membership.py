"""The client's place in its fleet: greeting the workers, joining their chain, and noticing when it breaks. Pure: events and time in,
instructions out.

    OFFLINE -> GREETING (Hello to all) -> JOINING (Join to all, epoch raised) -> READY -> OFFLINE when a worker is lost

Only this module raises the epoch. Why the last way ended in OFFLINE is in `failure`.

A worker without stages, which only drafts, is nobody's loss: when it goes away the chain stays READY without it, and it is asked again and
again until it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from langchain_pshard.core.bundle import Fingerprint
from langchain_pshard.core.errors import FleetMismatchError, PShardError, WorkerLostError, WorkerUnreachableError, error_from_code
from langchain_pshard.core.messages import (
    PROTOCOL_VERSION,
    ClientId,
    Epoch,
    Hello,
    Join,
    Joined,
    Leave,
    Message,
    Ping,
    Refused,
    RequestId,
    Welcome,
)
from langchain_pshard.pipeline.chain import Chain, DraftRole, assemble
from langchain_pshard.pipeline.instructions import Dial, Instruction, Send, Warn
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.recovery import Liveness

REPEAT_S = 1.0
"""Hello and Join are repeated so often until answered: a worker may still be loading, a message may get lost."""


class Phase(Enum):
    OFFLINE = "offline"
    GREETING = "greeting"
    JOINING = "joining"
    READY = "ready"


@dataclass(slots=True)
class _Member:
    """What is known of one worker in the way that is under way."""

    request: RequestId
    welcome: Welcome | None = None
    is_joined: bool = False
    is_ring: bool = False
    """Joined, and says that steps ahead may be granted."""
    is_away: bool = False
    """A worker without stages that went away, or has not come back."""
    is_told: bool = False
    """The log says that somebody else is there now."""


class Membership:
    """Invariant: `chain` is the one of the current epoch while READY; an epoch is never used for two chains."""

    def __init__(
        self,
        client: ClientId,
        addresses: Sequence[str],
        *,
        software: str,
        connect_timeout_s: float,
        options: ClientOptions,
        new_request: Callable[[], RequestId],
        now: float,
    ) -> None:
        self.phase = Phase.OFFLINE
        self.epoch = Epoch(0)
        self.chain: Chain | None = None
        self.failure: PShardError | None = None
        self._client = client
        self._addresses = tuple(addresses)
        self._software = software
        self._timeout_s = connect_timeout_s
        self._options = options
        self._new_request = new_request
        self._fingerprint: Fingerprint | None = None
        self._without_stages: frozenset[str] = frozenset()  # of the chain joined last
        self._members: dict[str, _Member] = {}
        self._is_told_of_ring = False
        self._warn_of_ring_at: float | None = None
        self._deadline = now
        self._repeat_at = now
        self._liveness = Liveness((), now, timeout_s=options.liveness_timeout_s, interval_s=options.ping_interval_s)

    @property
    def is_steady(self) -> bool:
        """Whether steps may be sent."""
        return self.phase is Phase.READY and not self._liveness.is_doubtful

    @property
    def has_ring(self) -> bool:
        """Whether the chain may take steps by itself."""
        return self.chain is not None and all(self._members[address].is_ring for address in self.chain.addresses)

    @property
    def draft(self) -> DraftRole | None:
        """Who drafts, as long as it is there."""
        role = None if self.chain is None else self.chain.draft
        return None if role is None or self._members[role.address].is_away else role

    def connect(self, now: float) -> list[Instruction]:
        """Begin anew with fresh links; for `OFFLINE` only."""
        assert self.phase is Phase.OFFLINE
        self.phase = Phase.GREETING
        self.failure = None
        self._deadline = now + self._timeout_s
        self._members = {address: _Member(self._new_request()) for address in self._addresses}
        return [*(Dial(address) for address in self._addresses), *self._ask(now)]

    def drop(self, failure: PShardError) -> None:
        """Give the chain up, for a reason found elsewhere."""
        self.phase = Phase.OFFLINE
        self.failure = failure
        self._warn_of_ring_at = None

    def leave(self) -> list[Instruction]:
        """Parting messages to everybody."""
        return [Send(address, Leave(client=self._client)) for address in self._members]

    def on_message(self, address: str, message: Message, now: float) -> list[Instruction]:
        """Take note of any message; Welcome, Joined and the Refused of their requests are for this module alone."""
        if self.phase is Phase.READY and not self._members[address].is_away:
            self._liveness.heard(address, now)
        member = self._members[address]
        match message:
            case Welcome():
                return self._on_welcome(address, member, message, now)
            case Joined(request=request, is_ring=is_ring) if self.phase is Phase.JOINING and request == member.request:
                member.is_joined, member.is_ring = True, is_ring
                return self._become_ready_if_joined(now)
            case Joined(request=request, is_ring=False) if self.phase is Phase.READY and request == member.request and member.is_ring:
                # The way from the last worker to the first broke. Perhaps because one of them is gone, which is told in other words.
                member.is_ring, self._warn_of_ring_at = False, now + REPEAT_S
            case Joined(request=request) if self.phase is Phase.READY and request == member.request and member.is_away:
                member.is_away = member.is_told = False
                member.is_joined = True
                self._liveness.add(address, now)
            case Refused(request=request) if request == member.request and self.phase in (Phase.GREETING, Phase.JOINING):
                if member.is_away:
                    return []  # asked again with the next repeat
                self.drop(error_from_code(message.code, f"the worker at {address} refused: {message.message}"))
        return []

    def on_lost(self, address: str, now: float) -> list[Instruction]:
        """A link broke. While READY it is asked at once who answers there now; on the way to READY the repeats do."""
        if self.phase is not Phase.READY:
            return []
        if address in self._without_stages:
            return self._miss({address: "its connection broke"}, now)
        self._liveness.broke(address, now)
        return [self._hello(address)]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: repeat, ping, give up."""
        match self.phase:
            case Phase.OFFLINE:
                return []
            case Phase.GREETING | Phase.JOINING:
                if now >= self._deadline:
                    self.drop(self._unreachable())
                    return []
                return self._ask(now) if now >= self._repeat_at else []
            case Phase.READY:
                lost = self._liveness.check(now)
                if lost.keys() - self._without_stages:
                    self.drop(self._lost({address: why for address, why in lost.items() if address not in self._without_stages}))
                    return []
                out = self._miss(lost, now)
                if now >= self._repeat_at:
                    out += self._ask(now)
                if self._warn_of_ring_at is not None and now >= self._warn_of_ring_at and self.is_steady:
                    self._warn_of_ring_at = None
                    out += self._warn_of_ring()
                due = self._liveness.due_pings(now)
                return out + [Send(address, Ping(request=self._new_request(), client=self._client)) for address in due]

    def _on_welcome(self, address: str, member: _Member, welcome: Welcome, now: float) -> list[Instruction]:
        known, member.welcome = member.welcome, welcome
        if self.phase is Phase.READY and member.is_away:
            return self._ask_back(address, member, welcome)
        if self.phase is Phase.READY:
            if known is not None and known.worker != welcome.worker:
                if address in self._without_stages:
                    return self._miss({address: "it was restarted"}, now)
                self.drop(self._lost({address: "it was restarted"}))
            elif self._liveness.is_doubtful:
                # The worker knows us by the connection that broke; its replies would go nowhere.
                self.drop(self._lost({address: "its connection broke; it is back, but what was under way is lost"}))
            return []
        if self.phase is Phase.JOINING and known is not None and known.worker != welcome.worker:
            self.phase = Phase.GREETING  # restarted in the middle: form the chain again
        if self.phase is Phase.GREETING:
            return self._join_if_complete(now)
        return []

    def _join_if_complete(self, now: float) -> list[Instruction]:
        welcomes = {address: member.welcome for address, member in self._members.items() if member.welcome is not None}
        missing = self._members.keys() - welcomes.keys()
        if missing - self._without_stages:
            return []
        try:
            chain = assemble(welcomes)
            self._check_model(chain)
            if self.chain is not None and self.chain.draft is not None and self.chain.draft.address in missing:
                chain = replace(chain, draft=self.chain.draft)  # it is away, and asked to come back
        except FleetMismatchError as error:
            self.drop(error)
            return []
        self.phase = Phase.JOINING
        self.chain = chain
        self.epoch = Epoch(self.epoch + 1)
        for address, member in self._members.items():
            member.is_joined = member.is_ring = False
            member.is_away = address in missing
            member.request = self._new_request()
        return self._ask(now)

    def _check_model(self, chain: Chain) -> None:
        if self._fingerprint is not None and chain.fingerprint != self._fingerprint:
            raise FleetMismatchError(
                f"the workers now serve another bundle ({chain.model_name} {chain.fingerprint[:12]}) than when this client connected"
                f" ({self._fingerprint[:12]}): make a new client"
            )

    def _become_ready_if_joined(self, now: float) -> list[Instruction]:
        assert self.chain is not None
        if not all(member.is_joined or member.is_away for member in self._members.values()):
            return []
        self.phase = Phase.READY
        self._without_stages = frozenset(self._members) - frozenset(self.chain.addresses)
        self._fingerprint = self.chain.fingerprint
        self._liveness = Liveness(
            (address for address, member in self._members.items() if not member.is_away),
            now,
            timeout_s=self._options.liveness_timeout_s,
            interval_s=self._options.ping_interval_s,
        )
        return self._warn_of_ring()

    def _warn_of_ring(self) -> list[Instruction]:
        """Once: steps ahead were asked for, and there is no way for them."""
        assert self.chain is not None
        if self.has_ring or not self._options.max_steps_ahead or self._is_told_of_ring:
            return []
        self._is_told_of_ring = True
        first, last = self.chain.stages[0].address, self.chain.stages[-1].address
        return [
            Warn(
                f"the worker at {last} cannot reach the one at {first}: every token goes from the last stage to the first over this client,"
                " which takes longer. Make that address reachable from there; or set max_steps_ahead=0 (of ChatPShard or ClientOptions),"
                " which does not ask for it and spares each connection up to 3 s"
            )
        ]

    def _ask(self, now: float) -> list[Instruction]:
        """Hello or Join to everybody who has not answered it yet; Hello to those that went away."""
        self._repeat_at = now + REPEAT_S
        if self.phase is Phase.GREETING:
            return [self._hello(address) for address, member in self._members.items() if member.welcome is None]
        return [
            self._hello(address) if member.is_away else self._join(address, member)
            for address, member in self._members.items()
            if not member.is_joined
        ]

    def _join(self, address: str, member: _Member) -> Send:
        assert self.chain is not None
        is_ring = self._options.max_steps_ahead > 0
        join = Join(request=member.request, client=self._client, epoch=self.epoch, chain=self.chain.hops, is_ring=is_ring)
        return Send(address, join)

    def _miss(self, reasons: Mapping[str, str], now: float) -> list[Instruction]:
        """Workers without stages are gone: the chain goes on without them, and they are asked to come back."""
        out: list[Instruction] = []
        for address, why in reasons.items():
            member = self._members[address]
            if not member.is_away:
                member.is_away, member.is_joined = True, False
                member.request = self._new_request()
                self._liveness.remove(address)
                out.append(Warn(f"the worker at {address}, which drafts, is lost: {why}. Texts go on without its drafts until it is back"))
        if out:
            self._repeat_at = now + REPEAT_S
        return out

    def _ask_back(self, address: str, member: _Member, welcome: Welcome) -> list[Instruction]:
        """A worker without stages is there again: it joins if it is still what the chain knows it as."""
        assert self.chain is not None
        if welcome.fingerprint == self.chain.fingerprint and not welcome.stages and welcome.draft is not None:
            return [self._join(address, member)]
        if member.is_told:
            return []
        member.is_told = True
        return [
            Warn(
                f"the worker at {address} does not serve this model's draft any more ({welcome.model_name} {welcome.fingerprint[:12]},"
                f" {len(welcome.stages)} stages): texts go on without drafts until one that does is back"
            )
        ]

    def _hello(self, address: str) -> Send:
        return Send(address, Hello(request=self._members[address].request, protocol=PROTOCOL_VERSION, software=self._software))

    def _unreachable(self) -> WorkerUnreachableError:
        if self.phase is Phase.GREETING:
            silent = [address for address, member in self._members.items() if member.welcome is None]
            what = "answered"
        else:
            silent = [address for address, member in self._members.items() if not member.is_joined]
            what = "joined the chain"
        names = ", ".join(silent)
        return WorkerUnreachableError(
            f"{len(silent)} of {len(self._members)} workers have not {what} within {self._timeout_s:g} s: {names}", addresses=tuple(silent)
        )

    def _lost(self, reasons: dict[str, str]) -> WorkerLostError:
        assert self.chain is not None
        lost = "; ".join(f"the worker at {address} ({_stages(self.chain, address)}) is lost: {why}" for address, why in reasons.items())
        return WorkerLostError(f"{lost}. The next call connects anew", addresses=tuple(reasons))


def _stages(chain: Chain, address: str) -> str:
    indices = chain.stages_at(address)
    return f"stage{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
