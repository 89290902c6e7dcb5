"""Whole fleets in one thread: real sessions and real worker loops around a fake engine, over links that deliver when they are told to.

Whoever tests chooses what happens next (`choices`), so any order of events that a real network and real processes could bring about can be
had, and had again. A link keeps its order, as TCP does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.messages import ClientId, Message
from langchain_pshard.pipeline.instructions import Deliver, Instruction, Send
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.pipeline.session import Session
from langchain_pshard.transport.hub import Arrived, Link
from tests.support.fake_stages import FakeRunner, FakeSampler, make_identity
from workers.server import Server
from workers.worker import Worker


class SimulatedWorker:
    """One worker, its engine and its end of the links."""

    num_malformed = 0

    def __init__(self, fleet: SimulatedFleet, name: str, address: str, num_stages: int, served: Sequence[int], capacity: int) -> None:
        self.name, self.address = name, address
        self._fleet = fleet
        self._num_links = 0
        self.routes: dict[Link, Callable[[Message, Tensor | None], bool]] = {}
        self.runners = {idx: FakeRunner(idx, is_last=idx == num_stages - 1, kv_capacity_tokens=capacity) for idx in served}
        self.sampler = FakeSampler()
        self.worker = Worker(make_identity(name, num_stages, *served, capacity=capacity))
        self.server = Server(
            hub=self, worker=self.worker, runners=self.runners, sampler=self.sampler, bundle=Path(), clock=lambda: fleet.now
        )

    # --- the hub, as the server sees it ---

    def send(self, link: Link, message: Message, tensor: Tensor | None = None) -> bool:
        route = self.routes.get(link)
        return route is not None and route(message, tensor)

    def dial(self, address: str) -> Link:
        self._num_links += 1
        link = Link(self._num_links)
        there = next(worker for worker in self._fleet.workers if worker.address == address)
        back = Link(0, f"{self.name} {self._num_links}".encode())
        self.routes[link] = self._fleet.route(self.name, there.name, lambda message, tensor: there.hear(back, message, tensor))
        there.routes[back] = self._fleet.route(there.name, self.name, lambda message, tensor: self.hear(link, message, tensor))
        return link

    def hang_up(self, link: Link) -> None:
        del self.routes[link]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nothing calls {name} here")

    # --- what may happen ---

    def hear(self, link: Link, message: Message, tensor: Tensor | None) -> None:
        self.server._carry_out(self.server._decide(Arrived(link, message, tensor)))

    def run(self) -> None:
        self.server._carry_out(self.worker.next_run())


class SimulatedClient:
    """A session and its end of the links."""

    def __init__(self, fleet: SimulatedFleet, name: str, options: ClientOptions) -> None:
        self._fleet = fleet
        addresses = [worker.address for worker in fleet.workers]
        self.session = Session(ClientId(name), addresses, software="1.0", connect_timeout_s=30.0, options=options, now=0.0)
        self._routes: dict[str, Callable[[Message, Tensor | None], bool]] = {}
        for worker in fleet.workers:
            self._connect(name, worker)

    def _connect(self, name: str, worker: SimulatedWorker) -> None:
        link = Link(0, name.encode())
        self._routes[worker.address] = self._fleet.route(name, worker.name, lambda message, tensor: worker.hear(link, message, tensor))
        worker.routes[link] = self._fleet.route(
            worker.name,
            name,
            lambda message, tensor: self.do(self.session.on_message(worker.address, message, self._fleet.now, tensor)),
        )

    def do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Deliver(sink=sink, item=item):
                    sink(item)
                case Send(address=address, message=message):
                    self._routes[address](message, None)
                case _:
                    pass


class SimulatedFleet:
    """Workers `w0`, `w1`, ... and clients; `chain[i]` is the worker of stage i."""

    def __init__(self, chain: Sequence[int], *, capacity: int = 1024) -> None:
        self.now = 0.0
        self.num_copies: Callable[[str, Message], int] = lambda source, message: 1
        """How often a message of a client or worker arrives; 0 when it cannot be sent."""
        self._queues: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        self.clients: list[SimulatedClient] = []
        self.workers: list[SimulatedWorker] = []
        for number in range(max(chain) + 1):
            served = [idx for idx, owner in enumerate(chain) if owner == number]
            self.workers.append(SimulatedWorker(self, f"w{number}", f"tcp://127.0.0.1:{number + 1}", len(chain), served, capacity))

    def add_client(self, **options: Any) -> SimulatedClient:
        self.clients.append(SimulatedClient(self, f"c{len(self.clients)}", ClientOptions(**options)))
        return self.clients[-1]

    def route(self, source: str, target: str, arrive: Callable[[Message, Tensor | None], None]) -> Callable[[Message, Tensor | None], bool]:
        """One direction of a link; all links of a pair share its order."""
        queue = self._queues.setdefault((source, target), deque())

        def send(message: Message, tensor: Tensor | None) -> bool:
            num_copies = self.num_copies(source, message)
            for _ in range(num_copies):
                queue.append(lambda: arrive(message, tensor))
            return num_copies > 0

        return send

    @property
    def choices(self) -> list[Callable[[], object]]:
        """Everything that could happen next: a message arrives, a worker runs."""
        arrivals: list[Callable[[], object]] = [lambda queue=queue: queue.popleft()() for queue in self._queues.values() if queue]  # type: ignore[misc]
        return arrivals + [worker.run for worker in self.workers if worker.worker.has_work]

    def tick(self, seconds: float) -> None:
        """Time passes for the clients. Pings are answered like everything else."""
        self.now += seconds
        for client in self.clients:
            client.do(client.session.tick(self.now))

    def settle(self) -> None:
        """Until nothing is left to happen."""
        while choices := self.choices:
            choices[0]()

    def check_idle(self) -> None:
        """No stream, KV, step, flight or client's state of one is left anywhere."""
        for worker in self.workers:
            assert not worker.worker.has_work
            assert worker.worker.num_streams == len(worker.sampler.streams) == 0
            for idx, runner in worker.runners.items():
                assert (runner.num_streams, runner.kv_used_tokens, worker.worker.stage(idx).num_streams) == (0, 0, 0)
        for client in self.clients:
            assert client.session._turns._flights == {}
            assert client.session._streams == {}
