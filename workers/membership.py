"""Who a worker serves and whom it sends steps to: clients, their epochs and leases, and the links to next workers.

Pure: events in, instructions out, time as a parameter. Streams live in `stage`; `worker` frees them when a client is replaced here.

Invariants:
- a client has joined only when every next worker its chain needs has answered with the id the chain names. The way from the last worker
  to the first is the exception: where there is none, the chain is no ring, and the client is told;
- a link to a next worker exists exactly while some client's chain needs its address, and is shared by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from langchain_pshard.core.errors import (
    CapacityError,
    FleetMismatchError,
    InvalidOptionError,
    ProtocolError,
    StateLostError,
    WorkerUnreachableError,
)
from langchain_pshard.core.messages import (
    PROTOCOL_VERSION,
    ClientId,
    Epoch,
    Hello,
    Hop,
    Join,
    Joined,
    Message,
    Refused,
    RequestId,
    Welcome,
    WorkerId,
)
from langchain_pshard.transport.address import Address
from langchain_pshard.transport.hub import Link
from workers.instructions import Dial, HangUp, Instruction, Reply

LEASE_S = 30.0
JOIN_TIMEOUT_S = 5.0
RING_TIMEOUT_S = 3.0
"""The same of a first worker that the last one reaches only to hand it steps: longer than an inference, but it is not worth more."""
HELLO_INTERVAL_S = 1.0
MAX_CLIENTS = 256
MAX_CLIENT_ID_LENGTH = 64


@dataclass(slots=True, kw_only=True)
class Client:
    """One client, in its present epoch."""

    id: ClientId
    epoch: Epoch
    chain: tuple[Hop, ...]
    asks_ring: bool
    has_ring: bool
    """Whether the last stage may hand steps to the first: the client asked for it, and nothing was found in the way."""
    link: Link
    seen_s: float
    join_request: RequestId
    joining_since_s: float
    first_hello: RequestId
    """Hellos from this one on were sent after the Join; the answer to an older one may come from a worker that has died since."""
    unconfirmed: dict[str, WorkerId] = field(default_factory=dict)
    """Next workers that have not answered since the Join: address to expected id."""

    @property
    def has_joined(self) -> bool:
        return not self.unconfirmed

    def stages_on(self, worker: WorkerId) -> tuple[int, ...]:
        """Stages of the chain that `worker` serves."""
        return tuple(stage_idx for stage_idx, hop in enumerate(self.chain) if hop.worker == worker)

    def next_hops(self, worker: WorkerId) -> dict[str, WorkerId]:
        """Address to id of the workers that `worker` hands this chain's steps to; itself left out."""
        after = (self.chain[idx + 1] for idx in self.stages_on(worker) if idx + 1 < len(self.chain))
        return {hop.address: hop.worker for hop in after if hop.worker != worker} | self._ring_hop(worker)

    def _ring_hop(self, worker: WorkerId) -> dict[str, WorkerId]:
        first, last = self.chain[0], self.chain[-1]
        return {first.address: first.worker} if self.has_ring and last.worker == worker != first.worker else {}

    def closes_ring_only(self, address: str, worker: WorkerId) -> bool:
        """Whether `worker` needs the way to an address for nothing but to hand steps of the last stage to the first."""
        first = self.chain[0]
        return address in self._ring_hop(worker) and first not in (self.chain[idx + 1] for idx in self.stages_on(worker)[:-1])


@dataclass(slots=True)
class _Peer:
    """A next worker: dialled as soon as a client needs it."""

    link: Link | None = None
    asked_s: float = 0.0


class Membership:
    """Clients and next workers of one worker."""

    def __init__(self, *, worker: WorkerId, served: frozenset[int], num_stages: int, software: str, drafts: bool = False) -> None:
        """`drafts`: whether a chain may ask nothing of this worker, because it serves the draft."""
        self._worker = worker
        self._served = served
        self._drafts = drafts
        self._num_stages = num_stages
        self._software = software
        self._clients: dict[ClientId, Client] = {}
        self._peers: dict[str, _Peer] = {}
        self._next_request = 0

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def find(self, client: ClientId) -> Client | None:
        return self._clients.get(client)

    def link_to(self, address: str) -> Link | None:
        """The link to a next worker, None when no client needs it."""
        peer = self._peers.get(address)
        return peer.link if peer else None

    def is_newer(self, join: Join) -> bool:
        """Whether `join` starts an epoch that this worker does not know yet."""
        known = self._clients.get(join.client)
        return known is None or join.epoch > known.epoch

    # --- joining -----------------------------------------------------------------------------------------------------

    def join(self, link: Link, join: Join, now_s: float) -> list[Instruction]:
        """Take in a client's chain, or answer a repeated Join. What older epochs held is the caller's to free first."""
        known = self._clients.get(join.client)
        refusal = self._refusal(known, join)
        if refusal:
            return [Reply(link=link, message=refusal)]
        if known is not None and join.epoch == known.epoch:
            known.link, known.seen_s, known.join_request = link, now_s, join.request
            return self._joined(known)
        client = Client(
            id=join.client,
            epoch=join.epoch,
            chain=join.chain,
            asks_ring=join.is_ring,
            has_ring=join.is_ring,
            link=link,
            seen_s=now_s,
            join_request=join.request,
            joining_since_s=now_s,
            first_hello=RequestId(self._next_request + 1),
        )
        client.unconfirmed = client.next_hops(self._worker)
        self._clients[client.id] = client
        out = self._hang_up_unneeded()
        for address in client.unconfirmed:
            peer = self._peers.get(address)
            if peer is None:
                self._peers[address] = _Peer()
                out.append(Dial(address=address))
            elif peer.link is not None:
                out.append(self._hello(peer, peer.link, now_s))
        return out + self._joined(client)

    def _joined(self, client: Client) -> list[Instruction]:
        """Tell a client that it has joined, if it has."""
        joined = Joined(request=client.join_request, is_ring=client.has_ring)
        return [Reply(link=client.link, message=joined)] if client.has_joined else []

    def _refusal(self, known: Client | None, join: Join) -> Refused | None:
        def refused(code: str, message: str) -> Refused:
            return Refused(request=join.request, code=code, message=message)

        if known is not None and join.epoch < known.epoch:
            return refused(StateLostError.code, f"epoch {join.epoch} is over, this client is at {known.epoch}: join with a higher one")
        if known is not None and join.epoch == known.epoch and (join.chain, join.is_ring) != (known.chain, known.asks_ring):
            return refused(ProtocolError.code, f"another chain under the same epoch {join.epoch}: raise the epoch")
        if not 0 < len(join.client) <= MAX_CLIENT_ID_LENGTH:
            return refused(ProtocolError.code, f"client id of {len(join.client)} characters; valid: 1 to {MAX_CLIENT_ID_LENGTH}")
        if len(join.chain) != self._num_stages:
            return refused(
                FleetMismatchError.code, f"the chain has {len(join.chain)} workers for the {self._num_stages} stages of this bundle"
            )
        asked = {stage_idx for stage_idx, hop in enumerate(join.chain) if hop.worker == self._worker}
        if not asked <= self._served or not (asked or self._drafts):
            return refused(
                FleetMismatchError.code,
                f"the chain asks worker {self._worker} for stages {sorted(asked)}, it serves {sorted(self._served)}:"
                " the worker was restarted or the address is another's; connect again",
            )
        names = {hop.address: hop.worker for hop in join.chain}
        for hop in join.chain:
            if names[hop.address] != hop.worker:
                text = f"the chain names workers {hop.worker} and {names[hop.address]} at one address {hop.address}"
                return refused(FleetMismatchError.code, text)
            try:
                Address.parse_peer(hop.address)
            except InvalidOptionError as error:
                return refused(InvalidOptionError.code, str(error))
        if known is None and len(self._clients) >= MAX_CLIENTS:
            return refused(CapacityError.code, f"this worker serves {MAX_CLIENTS} clients already: try again later")
        return None

    # --- next workers ------------------------------------------------------------------------------------------------

    def dialled(self, address: str, link: Link, now_s: float) -> list[Instruction]:
        """The link that a Dial asked for."""
        peer = self._peers.get(address)
        if peer is None:
            return [HangUp(link=link)]
        peer.link = link
        return [self._hello(peer, link, now_s)]

    def welcomed(self, link: Link, welcome: Welcome) -> list[Instruction]:
        """A next worker said who it is; every client that waits for it has joined, or has named another."""
        address = self.address_of(link)
        out: list[Instruction] = []
        for client in list(self._clients.values()):
            expected = client.unconfirmed.get(address) if address else None
            if address is None or expected is None or welcome.request < client.first_hello:
                continue
            if expected != welcome.worker and client.closes_ring_only(address, self._worker):
                out += self._open_ring(client, address)
                continue
            if expected != welcome.worker:
                text = (
                    f"{self._place(client)} expects worker {expected} at {address}, where worker {welcome.worker} answers:"
                    " it was restarted or the address is another's; connect again"
                )
                out += self._give_up(client, FleetMismatchError.code, text)
                continue
            del client.unconfirmed[address]
            out += self._joined(client)
        return out

    def refused(self, link: Link, refused: Refused) -> list[Instruction]:
        """A next worker will not talk to us (another protocol version)."""
        address = self.address_of(link)
        out: list[Instruction] = []
        for client in [client for client in self._clients.values() if address in client.unconfirmed]:
            if address is not None and client.closes_ring_only(address, self._worker):
                out += self._open_ring(client, address)
                continue
            text = f"{self._place(client)} was refused by the next worker at {address}: {refused.message}"
            out += self._give_up(client, FleetMismatchError.code, text)
        return out

    def address_of(self, link: Link) -> str | None:
        """The address of a next worker by its link."""
        return next((address for address, peer in self._peers.items() if peer.link == link), None)

    def _place(self, client: Client) -> str:
        own = client.chain[client.stages_on(self._worker)[0]].address
        return f"the worker at {own}"

    def _hello(self, peer: _Peer, link: Link, now_s: float) -> Instruction:
        peer.asked_s = now_s
        self._next_request += 1
        hello: Message = Hello(request=RequestId(self._next_request), protocol=PROTOCOL_VERSION, software=self._software)
        return Reply(link=link, message=hello)

    # --- leaving and time --------------------------------------------------------------------------------------------

    def heard(self, client: ClientId, now_s: float, link: Link | None = None) -> None:
        """Renew a lease; `link` is given when the message came from the client itself, which may have reconnected."""
        known = self._clients.get(client)
        if known is not None:
            known.seen_s = now_s
            known.link = link or known.link

    def forget(self, client: ClientId) -> list[Instruction]:
        """The client left."""
        self._clients.pop(client, None)
        return self._hang_up_unneeded()

    def expired(self, now_s: float) -> Iterator[Client]:
        """Clients whose lease has run out."""
        return (client for client in list(self._clients.values()) if now_s - client.seen_s >= LEASE_S)

    def time_passed(self, now_s: float) -> list[Instruction]:
        """Ask silent next workers again, and give up joins that took too long."""
        out: list[Instruction] = []
        for client in list(self._clients.values()):
            waited_s = now_s - client.joining_since_s
            for address in [one for one in client.unconfirmed if client.closes_ring_only(one, self._worker)]:
                if waited_s >= RING_TIMEOUT_S:
                    out += self._open_ring(client, address)
            if not client.has_joined and waited_s >= JOIN_TIMEOUT_S:
                silent = " and ".join(client.unconfirmed)
                text = (
                    f"{self._place(client)} got no answer from the next worker at {silent} within {JOIN_TIMEOUT_S:g} s:"
                    " is it running, and can this machine reach it?"
                )
                out += self._give_up(client, WorkerUnreachableError.code, text)
        waited_for = {address for client in self._clients.values() for address in client.unconfirmed}
        for address in waited_for:
            peer = self._peers[address]
            if peer.link is not None and now_s - peer.asked_s >= HELLO_INTERVAL_S:
                out.append(self._hello(peer, peer.link, now_s))
        return out

    def _open_ring(self, client: Client, address: str) -> list[Instruction]:
        """The first worker cannot be reached, or is another, from here, where the chain ends: steps go over the client."""
        client.has_ring = False
        client.unconfirmed.pop(address, None)
        return self._hang_up_unneeded() + self._joined(client)

    def lost(self, link: Link) -> list[Instruction]:
        """The connection to a next worker broke. Clients watch every worker themselves, but not the way from the last to the first: those
        that have it are told that they have it no more."""
        address = self.address_of(link)
        if address is None:
            return []
        affected = [one for one in self._clients.values() if one.has_joined and one.closes_ring_only(address, self._worker)]
        return [step for client in affected for step in self._open_ring(client, address)]

    def _give_up(self, client: Client, code: str, message: str) -> list[Instruction]:
        refused = Refused(request=client.join_request, code=code, message=message)
        return [Reply(link=client.link, message=refused), *self.forget(client.id)]

    def _hang_up_unneeded(self) -> list[Instruction]:
        needed = {address for client in self._clients.values() for address in client.next_hops(self._worker)}
        gone = [(address, peer) for address, peer in self._peers.items() if address not in needed]
        for address, _ in gone:
            del self._peers[address]
        return [HangUp(link=peer.link) for _, peer in gone if peer.link is not None]
