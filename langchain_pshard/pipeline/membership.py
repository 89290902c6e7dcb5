"""The client's place in its fleet: greeting the workers, joining their chain, and noticing when it breaks. Pure: events and time in,
instructions out.

    OFFLINE -> GREETING (Hello to all) -> JOINING (Join to all, epoch raised) -> READY -> OFFLINE when a worker is lost

Only this module raises the epoch. Why the last way ended in OFFLINE is in `failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from langchain_pshard.pipeline.chain import Chain, assemble
from langchain_pshard.pipeline.instructions import Dial, Instruction, Send
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
        self._members: dict[str, _Member] = {}
        self._deadline = now
        self._repeat_at = now
        self._liveness = Liveness((), now, timeout_s=options.liveness_timeout_s, interval_s=options.ping_interval_s)

    @property
    def is_steady(self) -> bool:
        """Whether steps may be sent."""
        return self.phase is Phase.READY and not self._liveness.is_doubtful

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

    def leave(self) -> list[Instruction]:
        """Parting messages to everybody."""
        return [Send(address, Leave(client=self._client)) for address in self._members]

    def on_message(self, address: str, message: Message, now: float) -> list[Instruction]:
        """Take note of any message; Welcome, Joined and the Refused of their requests are for this module alone."""
        if self.phase is Phase.READY:
            self._liveness.heard(address, now)
        member = self._members[address]
        match message:
            case Welcome():
                return self._on_welcome(address, member, message, now)
            case Joined(request=request) if self.phase is Phase.JOINING and request == member.request:
                member.is_joined = True
                if all(other.is_joined for other in self._members.values()):
                    self._become_ready(now)
            case Refused(request=request) if request == member.request and self.phase in (Phase.GREETING, Phase.JOINING):
                self.drop(error_from_code(message.code, f"the worker at {address} refused: {message.message}"))
        return []

    def on_lost(self, address: str, now: float) -> list[Instruction]:
        """A link broke. While READY it is asked at once who answers there now; on the way to READY the repeats do."""
        if self.phase is not Phase.READY:
            return []
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
                if lost:
                    self.drop(self._lost(lost))
                    return []
                due = self._liveness.due_pings(now)
                return [Send(address, Ping(request=self._new_request(), client=self._client)) for address in due]

    def _on_welcome(self, address: str, member: _Member, welcome: Welcome, now: float) -> list[Instruction]:
        known, member.welcome = member.welcome, welcome
        if self.phase is Phase.READY:
            if known is not None and known.worker != welcome.worker:
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
        if len(welcomes) < len(self._members):
            return []
        try:
            chain = assemble(welcomes)
            self._check_model(chain)
        except FleetMismatchError as error:
            self.drop(error)
            return []
        self.phase = Phase.JOINING
        self.chain = chain
        self.epoch = Epoch(self.epoch + 1)
        for member in self._members.values():
            member.is_joined = False
            member.request = self._new_request()
        return self._ask(now)

    def _check_model(self, chain: Chain) -> None:
        if self._fingerprint is not None and chain.fingerprint != self._fingerprint:
            raise FleetMismatchError(
                f"the workers now serve another bundle ({chain.model_name} {chain.fingerprint[:12]}) than when this client connected"
                f" ({self._fingerprint[:12]}): make a new client"
            )

    def _become_ready(self, now: float) -> None:
        assert self.chain is not None
        self.phase = Phase.READY
        self._fingerprint = self.chain.fingerprint
        self._liveness = Liveness(
            self._addresses, now, timeout_s=self._options.liveness_timeout_s, interval_s=self._options.ping_interval_s
        )

    def _ask(self, now: float) -> list[Instruction]:
        """Hello or Join to everybody who has not answered it yet."""
        self._repeat_at = now + REPEAT_S
        if self.phase is Phase.GREETING:
            return [self._hello(address) for address, member in self._members.items() if member.welcome is None]
        assert self.chain is not None
        return [
            Send(address, Join(request=member.request, client=self._client, epoch=self.epoch, chain=self.chain.hops))
            for address, member in self._members.items()
            if not member.is_joined
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
