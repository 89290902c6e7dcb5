"""The way of a step through a worker: taken in, run, and sent to the next stage or answered.

Pure. `stage` decides what may run together; this module splits micro-batches into steps, finds the next hop of each, and puts together what
leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from langchain_pshard.core.codec import Tensor, tensor_spec
from langchain_pshard.core.errors import CapacityError, InferenceError, ProtocolError, StateLostError, WorkerLostError
from langchain_pshard.core.messages import MicroBatch, SliceResult, StageTiming, Step, StepFailed, StepResult, WorkerId
from langchain_pshard.transport.hub import Link
from workers.instructions import Forward, Instruction, Reply, Run, WaitingStep
from workers.membership import Client, Membership
from workers.rows import join_rows
from workers.runners.runner import RunSlice
from workers.stage import Dropped, Stage, all_dropped


class Steps:
    """Steps of all clients at all stages of a worker."""

    def __init__(self, worker: WorkerId, stages: Mapping[int, Stage], members: Membership) -> None:
        self._worker = worker
        self._stages = stages
        self._last_first = tuple(sorted(stages.items(), reverse=True))
        self._members = members
        self.num_malformed = 0

    @property
    def has_work(self) -> bool:
        return any(stage.has_work for stage in self._stages.values())

    @property
    def expects_more(self) -> bool:
        return any(stage.expects_more for stage in self._stages.values())

    # --- in ----------------------------------------------------------------------------------------------------------

    def take(self, batch: MicroBatch, hidden: Tensor | None, now_s: float) -> list[Instruction]:
        """Queue the steps of a micro-batch; steps of unknown clients and of older epochs are dropped."""
        fault = self._fault(batch, hidden)
        if fault:
            self.num_malformed += 1
        out: list[Instruction] = []
        first = 0
        for step in batch.steps:
            rows = hidden
            if len(batch.steps) > 1 and hidden is not None and not fault:
                rows = hidden[first : first + step.num_tokens]
                first += step.num_tokens
            client = self._members.find(step.client)
            if client is None or step.epoch < client.epoch:
                continue
            self._members.heard(step.client, now_s)
            out += self._tell(batch.stage_idx, self._take_step(batch.stage_idx, step, rows, client, fault, now_s))
        return out

    def _fault(self, batch: MicroBatch, hidden: Tensor | None) -> str | None:
        stage = self._stages.get(batch.stage_idx)
        if stage is None:
            return f"stage {batch.stage_idx} is not served by worker {self._worker}; valid: {sorted(self._stages)}"
        if not batch.steps or not all(step.slices for step in batch.steps):
            return "a step without slices"
        return stage.tensor_fault(batch.steps, hidden)

    def _take_step(self, stage_idx: int, step: Step, rows: Tensor | None, client: Client, fault: str | None, now_s: float) -> Dropped:
        if step.epoch > client.epoch:
            text = f"worker {self._worker} has this client at epoch {client.epoch}, the step is of epoch {step.epoch}: join first"
            return all_dropped(step, StateLostError.code, text)
        if fault:
            return all_dropped(step, ProtocolError.code, f"malformed micro-batch: {fault}")
        if not client.asks_ring and any(piece.num_ahead for piece in step.slices):
            return all_dropped(step, ProtocolError.code, "malformed micro-batch: steps ahead in a chain that was not joined as a ring")
        return self._stages[stage_idx].enqueue(step, rows, now_s)

    def _tell(self, stage_idx: int, dropped: Dropped) -> list[Instruction]:
        if not dropped.failures:
            return []
        client = self._members.find(dropped.step.client)
        if client is None:
            return []
        step = dropped.step
        message = StepFailed(epoch=step.epoch, step_id=step.step_id, stage_idx=stage_idx, failures=dropped.failures)
        return [Reply(link=client.link, message=message)]

    # --- run ---------------------------------------------------------------------------------------------------------

    def next_run(self) -> list[Instruction]:
        """The next inference, as the last instruction, with what was refused on the way to it.

        The last of several stages goes first: results leave early, and meanwhile steps gather at the first one.
        """
        out: list[Instruction] = []
        for stage_idx, stage in self._last_first:
            verdict = stage.next_run()
            for dropped in verdict.dropped:
                out += self._tell(stage_idx, dropped)
            if verdict.run is not None:
                out.append(verdict.run)
                break
        return out

    def failed(self, run: Run, error: InferenceError | CapacityError | StateLostError) -> list[Instruction]:
        """The engine failed on `run`: merged steps will run again, each alone; a single one is given up."""
        dropped = self._stages[run.stage_idx].failed(run, error.code, f"stage {run.stage_idx}: {error}")
        return [reply for one in dropped for reply in self._tell(run.stage_idx, one)]

    # --- out ---------------------------------------------------------------------------------------------------------

    def sampled(self, run: Run, results: Sequence[SliceResult], logits: Tensor, *, started_s: float, ended_s: float) -> list[Instruction]:
        """The last stage computed `run`: every client gets its own result, and the logits that it asked for."""
        stage = self._stages[run.stage_idx]
        stage.succeeded(run, ended_s - started_s)
        out: list[Instruction] = []
        ahead: list[tuple[Step, None]] = []
        first = first_row = 0
        for waiting in run.steps:
            step = _passed(waiting, started_s, ended_s)
            own = tuple(results[first : first + len(step.slices)])
            first += len(step.slices)
            num_rows = sum([piece.num_sampled for piece in waiting.slices])
            asking = [piece for piece in waiting.slices if piece.returns_logits]  # nearly always none
            tensor = _asked_for(waiting.slices, logits[first_row : first_row + num_rows]) if asking else None
            first_row += num_rows
            message = StepResult(
                epoch=step.epoch,
                step_id=step.step_id,
                results=own,
                timings=step.timings,
                logits=None if tensor is None else tensor_spec(tensor),
                logits_of=tuple([piece.key.stream for piece in asking]),
            )
            client = self._client_of(step)
            # Where the way to the first stage has broken, the client knows, and has sent this step's successor itself.
            if client.has_ring and (following := stage.step_ahead(step, own)) is not None:
                ahead.append((following, None))
            out.append(Reply(link=client.link, message=message, tensor=tensor))
        # The next step is under way before anybody hears of this one's tokens.
        return self._send_on(0, ahead, None, ended_s) + out if ahead else out

    def computed(self, run: Run, hidden: Tensor, *, started_s: float, ended_s: float) -> list[Instruction]:
        """An earlier stage computed `run`: its steps go to the next stage."""
        self._stages[run.stage_idx].succeeded(run, ended_s - started_s)
        steps: list[tuple[Step, Tensor]] = []
        first = 0
        for waiting in run.steps:
            rows = hidden if len(run.steps) == 1 else hidden[first : first + waiting.num_tokens]
            first += waiting.num_tokens
            steps.append((_passed(waiting, started_s, ended_s), rows))
        return self._send_on(run.stage_idx + 1, steps, hidden, ended_s)

    def _send_on(
        self, stage_idx: int, steps: Sequence[tuple[Step, Tensor | None]], hidden: Tensor | None, now_s: float
    ) -> list[Instruction]:
        """Hand steps with their rows to the workers that serve stage `stage_idx` of their chains, together where they share the way.

        Args:
            stage_idx: the stage that comes next.
            steps: each with its own rows; without any towards the first stage.
            hidden: the rows of all.
            now_s: the time.
        """
        out: list[Instruction] = []
        ways: dict[Link, list[tuple[Step, Tensor | None]]] = {}
        for step, rows in steps:
            hop = self._client_of(step).chain[stage_idx]
            if hop.worker == self._worker:
                out += self._tell(stage_idx, self._stages[stage_idx].enqueue(step, rows, now_s))
                continue
            link = self._members.link_to(hop.address)
            assert link is not None  # a client has joined only when its next workers were reached
            ways.setdefault(link, []).append((step, rows))
        for link, passed in ways.items():
            is_whole = hidden is None or len(passed) == len(steps)
            tensor = hidden if is_whole else join_rows([rows for _, rows in passed if rows is not None])
            message = MicroBatch(
                stage_idx=stage_idx,
                steps=tuple([step for step, _ in passed]),
                hidden=None if tensor is None else tensor_spec(tensor),
            )
            out.append(Forward(link=link, message=message, hidden=tensor))
        return out

    def not_sent(self, forward: Forward) -> list[Instruction]:
        """The link to the next worker is gone or full."""
        text = f"worker {self._worker} cannot reach the next one, which serves stage {forward.message.stage_idx}"
        steps = forward.message.steps
        return [reply for step in steps for reply in self._tell(forward.message.stage_idx, all_dropped(step, WorkerLostError.code, text))]

    def _client_of(self, step: Step) -> Client:
        client = self._members.find(step.client)
        assert client is not None  # the steps of whoever leaves are dropped with the streams
        return client


def _asked_for(slices: Sequence[RunSlice], logits: Tensor) -> Tensor | None:
    """A copy of the logits of the slices that ask for them, [positions, vocab]; None when they sample nothing."""
    parts: list[Tensor] = []
    begin = 0
    for piece in slices:
        if piece.returns_logits and piece.num_sampled:
            parts.append(logits[begin : begin + piece.num_sampled])
        begin += piece.num_sampled
    return join_rows(parts).copy() if parts else None


def _passed(waiting: WaitingStep, started_s: float, ended_s: float) -> Step:
    """The step as it leaves a stage: only the slices that were computed, and one timing more."""
    timing = StageTiming(round(1e6 * (started_s - waiting.arrived_s)), round(1e6 * (ended_s - started_s)))
    step = waiting.step
    slices = step.slices
    if len(waiting.slices) < len(slices):
        kept = {piece.key.stream for piece in waiting.slices}
        slices = tuple(piece for piece in slices if piece.stream in kept)
    return Step(client=step.client, epoch=step.epoch, step_id=step.step_id, slices=slices, timings=(*step.timings, timing))
