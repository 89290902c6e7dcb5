"""The stateful engine: one InferRequest per stream from one compiled model, KV in the request's own state.

A state cannot shrink, so rejected tokens stay in their physical slots, masked out, and logical positions are tracked here: the graph's
mask derives a slot's logical position from `attention_mask` alone. When the physical limit comes near, the live slots are moved together.

Rewinds are exact under `exact` numerics only: under `fast`, holes in the cache change the order of sums by 1e-7, which dynamic
quantization amplifies until tokens diverge. So are chunks: under `fast` a chunk sees its own KV in float32 and that before it in f16, so
where a prompt is cut shows in the logits (by 0.06 in a tiny model).

A prompt's state is captured when it is complete, and a stream whose prompt begins alike starts on a copy of its leading positions, as if
its prompt had been cut there: the same bits as a cut prompt. Captures live in the part of the KV memory that no stream has set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import CapacityError, InferenceError, InvalidOptionError
from langchain_pshard.core.messages import SliceKind
from langchain_pshard.core.numerics import Numerics
from workers.runners.captures import Capture, Captures
from workers.runners.engine import (
    KV_TYPES,
    OV_TYPES,
    Port,
    Request,
    StageModel,
    aligned,
    check_memory,
    input_indices,
    share,
)
from workers.runners.lm_head import LmHead
from workers.runners.runner import NO_TOKENS, Logits, RunSlice, StreamKey, TokenArray

Int64s = npt.NDArray[np.int64]

SHARED_STATE_DEVICES = frozenset({"GPU"})
"""Where requests of one compiled model share some of their state (openvino #36458, #36560): each stream gets a compiled model of its own,
which costs the shard's memory once more."""
_SLACK = 1.5
"""Physical slots per reserved position: a compaction costs tens of decode steps; half a reservation of rejected tokens lies between two."""
_MIN_PREFILL_TOKENS = 2
"""What a prefix leaves to compute at least, as in the paged engine: clients and stages count on one rule."""


@dataclass(slots=True, kw_only=True)
class SlotMap:
    """Which physical slot holds which logical position of one stream. Pure.

    Invariants: `slots` is increasing (so the graph's cumulative mask gives every live slot its position); a slot is unmasked exactly
    when it is in `slots`; no slot is at or beyond `limit`; `limit >= num_reserved`, so moving together always makes room.
    """

    num_reserved: int
    mask: Int64s = field(init=False)  # [limit], 1 on live slots
    num_slots: int = field(default=0, init=False)
    slots: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.mask = np.zeros(int(self.num_reserved * _SLACK) + 1, dtype=np.int64)

    @property
    def limit(self) -> int:
        return len(self.mask)

    @property
    def length(self) -> int:
        """Logical positions held."""
        return len(self.slots)

    def rewind(self, start: int) -> None:
        """Forget the positions from `start` on: their slots stay, masked."""
        assert 0 <= start <= self.length, f"slice starts at {start}, the stream holds {self.length}"
        self.mask[self.slots[start:]] = 0
        del self.slots[start:]

    def needs_compaction(self, num_tokens: int) -> bool:
        """Whether `num_tokens` more slots pass the limit."""
        assert self.length + num_tokens <= self.num_reserved, f"{self.length + num_tokens} positions, {self.num_reserved} are reserved"
        return self.num_slots + num_tokens > self.limit

    def compact(self) -> list[int]:
        """Renumber the live slots 0, 1, ..; returns where each was."""
        moved = self.slots
        self.slots = list(range(len(moved)))
        self.num_slots = len(moved)
        self.mask[:] = 0
        self.mask[: self.num_slots] = 1
        return moved

    def take_back(self, length: int, num_slots: int) -> None:
        """Undo the last `append`, which began at these numbers of positions and slots."""
        self.mask[num_slots:] = 0
        del self.slots[length:]
        self.num_slots = num_slots

    def append(self, num_tokens: int) -> Int64s:
        """Take slots for the next positions; returns the mask over all slots, [num_slots], a view."""
        self.slots.extend(range(self.num_slots, self.num_slots + num_tokens))
        self.mask[self.num_slots : self.num_slots + num_tokens] = 1
        self.num_slots += num_tokens
        return self.mask[: self.num_slots]


@dataclass(slots=True, kw_only=True)
class _Stream:
    request: Request  # its state holds slot_map.num_slots slots
    slot_map: SlotMap
    prompt: TokenArray  # empty when it shares nothing
    num_prefilled: int = 0
    """Leading positions that PREFILL slices of `prompt` wrote."""
    found: Capture | None = None
    """What the first slice begins on."""


class StatefulRunner:
    """A `Runner` with one InferRequest per stream; the slices of a batch run one after another.

    A ROWS slice runs as one inference of its tokens: in this graph rows are no kernel of their own.
    """

    def __init__(self, stage: StageModel) -> None:
        """Compile the stage.

        Raises:
            InvalidOptionError: the device refuses the model, or `kv_memory_bytes` holds not even one position.
            CapacityError: the machine has less memory available than the KV budget.
        """
        self._stage = stage
        self._head = LmHead(stage) if stage.is_last else None
        self._compiled = stage.compile_layers()
        self._inputs = input_indices(self._compiled)
        self._beam_idx = np.zeros(1, dtype=np.int32)  # one sequence per request: the only valid row is 0
        self._streams: dict[StreamKey, _Stream] = {}
        self._captures = Captures()
        self._has_shared_state = stage.numerics.device.split(".")[0] in SHARED_STATE_DEVICES
        # Each of a compiled model of its own; kept when a stream ends, since compiling takes as long as loading.
        self._spare_requests = [Request(self._compiled, stage.stage_name)] if self._has_shared_state else []
        kv_type = KV_TYPES[stage.numerics.kv_precision]
        self._token_bytes = int(2 * len(stage.windows) * stage.num_kv_heads * stage.head_dim * kv_type.size * _SLACK)
        self._capacity = stage.kv_memory_bytes // self._token_bytes
        if self._capacity < 1:
            raise InvalidOptionError(
                f"--kv-memory of {stage.kv_memory_bytes} bytes holds no position on {stage.stage_name};"
                f" valid: {self._token_bytes} bytes or more"
            )
        check_memory(self._capacity * self._token_bytes, stage)

    @property
    def numerics(self) -> Numerics:
        return self._stage.numerics

    @property
    def is_rewind_exact(self) -> bool:
        return self._stage.numerics.name == "exact" and self._stage.numerics.kv_precision != "u8"

    @property
    def kv_capacity_tokens(self) -> int:
        return self._capacity

    @property
    def kv_stream_tokens(self) -> int | None:
        return None

    @property
    def kv_used_tokens(self) -> int:
        return sum(stream.slot_map.num_reserved for stream in self._streams.values())

    def open(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS, *, shares_generated: bool = False) -> int:
        del shares_generated  # only prompts are captured
        assert key not in self._streams, f"{key} is open already"
        free = self._capacity - self.kv_used_tokens
        if num_tokens > free:
            raise CapacityError(
                f"a stream needs {self._size(num_tokens)} of KV; {self._size(free)} are free of {self._size(self._capacity)}:"
                " wait for other streams to end, ask for fewer tokens, or raise --kv-memory"
            )
        if not self._stage.has_prefix_cache:
            prompt = NO_TOKENS
        found, num_cached = self._captures.find(prompt[:-_MIN_PREFILL_TOKENS]) or (None, 0)
        self._streams[key] = _Stream(request=self._new_request(), slot_map=SlotMap(num_reserved=num_tokens), prompt=prompt, found=found)
        self._captures.shrink(self._spare_bytes)
        return num_cached

    @property
    def _spare_bytes(self) -> int:
        """KV memory that no stream has set aside. What a stream was opened on is its own until its first slice, whose memory it takes."""
        return self._stage.kv_memory_bytes - self.kv_used_tokens * self._token_bytes

    def _new_request(self) -> Request:
        if not self._has_shared_state:
            return Request(self._compiled, self._stage.stage_name)
        if self._spare_requests:
            return self._spare_requests.pop()
        try:
            return Request(self._stage.compile_layers(), self._stage.stage_name)
        except InvalidOptionError as error:  # it could be compiled before: what lacks is room
            raise CapacityError(
                f"{self._stage.stage_name} has no room for one stream more, which needs a model of its own: {error}"
            ) from error

    def _size(self, num_tokens: int) -> str:
        return f"{num_tokens} positions ({num_tokens * self._token_bytes / 2**20:.1f} MiB)"

    def close_stream(self, key: StreamKey) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None and self._has_shared_state:
            self._spare_requests.append(stream.request)

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor | Logits:
        outputs: list[npt.NDArray[Any]] = []
        sampled: list[int] = []
        begin = 0
        for piece in slices:
            end = begin + len(piece.tokens)
            outputs.append(self._run_one(piece, None if hidden is None else hidden[begin:end]))
            sampled.extend(range(end - piece.num_sampled, end))
            begin = end
        joined = outputs[0] if len(outputs) == 1 else np.concatenate(outputs)
        return joined if self._head is None else self._head.logits(joined, np.array(sampled, dtype=np.int32))

    def _run_one(self, piece: RunSlice, hidden: Tensor | None) -> npt.NDArray[Any]:
        stream = self._streams[piece.key]
        count = len(piece.tokens)
        if stream.found is not None:
            self._resume(stream, stream.found, piece.start)
        stream.slot_map.rewind(piece.start)
        if piece.start == 0:
            stream.request.native.reset_state()
            stream.slot_map.compact()
        elif stream.slot_map.needs_compaction(count):
            self._keep(stream, stream.slot_map.compact())
        output, element_type = self._stage.empty_output(count)
        num_before = stream.slot_map.num_slots
        mask = stream.slot_map.append(count)
        try:
            stream.request.infer_into(self._step_inputs(piece, mask, hidden), Port(0, output[None], element_type))
        except InferenceError:
            stream.slot_map.take_back(piece.start, num_before)
            self._keep(stream, range(num_before))
            raise
        self._wrote(stream, piece)
        return output

    def _step_inputs(self, piece: RunSlice, mask: Int64s, hidden: Tensor | None) -> list[Port]:
        at = self._inputs
        count = len(piece.tokens)
        if hidden is None:
            assert self._stage.is_first, "a later stage needs hidden states"
            inputs = [Port(at["input_ids"], piece.tokens.astype(np.int64)[None], ov.Type.i64)]
        else:
            boundary = self._stage.numerics.boundary
            inputs = [Port(at["inputs_embeds"], aligned(hidden, boundary)[None], OV_TYPES[boundary])]
        inputs += [
            Port(at["attention_mask"], mask[None], ov.Type.i64),
            Port(at["position_ids"], np.arange(piece.start, piece.start + count, dtype=np.int64)[None], ov.Type.i64),
            Port(at["beam_idx"], self._beam_idx, ov.Type.i32),
        ]
        return inputs

    def _resume(self, stream: _Stream, found: Capture, start: int) -> None:
        """Begin on a copy of the first `start` positions: what this stage found may be more than the others did."""
        try:
            for variable in stream.request.native.query_state() if start else ():
                kept = np.ascontiguousarray(found.states[variable.name][:, :, :start])
                variable.state = share(kept, variable.state.element_type)
        except RuntimeError as error:
            raise InferenceError(f"{self._stage.stage_name} cannot give the KV of a prompt to a stream: {error}") from error
        stream.slot_map.append(start)
        stream.num_prefilled = start
        stream.found = None

    def _wrote(self, stream: _Stream, piece: RunSlice) -> None:
        """Capture the prompt when this slice completed it."""
        end = piece.start + len(piece.tokens)
        is_next = piece.kind is SliceKind.PREFILL and piece.start <= stream.num_prefilled
        if is_next and np.array_equal(stream.prompt[piece.start : end], piece.tokens):
            stream.num_prefilled = end
            if end == len(stream.prompt) and self._captures.wants(stream.prompt):
                self._capture(stream)
        else:
            stream.num_prefilled = min(stream.num_prefilled, piece.start)

    def _capture(self, stream: _Stream) -> None:
        slots = stream.slot_map.slots
        try:
            states = {variable.name: variable.state.data[:, :, slots] for variable in stream.request.native.query_state()}  # copies
        except RuntimeError as error:
            raise InferenceError(f"{self._stage.stage_name} cannot read the KV of a stream: {error}") from error
        self._captures.add(Capture(prompt=stream.prompt, states=states))
        self._captures.shrink(self._spare_bytes)

    def _keep(self, stream: _Stream, slots: Sequence[int]) -> None:
        """Move these slots of every layer's state to its front, and drop the others."""
        try:
            for variable in stream.request.native.query_state():
                state = variable.state  # [1, kv_heads, slots, head_dim]
                kept = np.ascontiguousarray(state.data[:, :, slots])
                variable.state = share(kept, state.element_type)
        except RuntimeError as error:
            raise InferenceError(f"{self._stage.stage_name} cannot move the KV of a stream: {error}") from error

    def close(self) -> None:
        self._streams.clear()
        self._spare_requests.clear()
        self._captures.shrink(0)
        self._compiled = self._head = None
