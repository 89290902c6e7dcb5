"""Stages without a model: a deterministic engine whose every output depends on all earlier tokens of its stream, and what a worker needs
around it. A wrong rewind, a mixed-up stream or a lost row changes the tokens that come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from langchain_pshard.core.bundle import DraftEntry, FileEntry, LayerSpan, Manifest, StageEntry, WeightMode
from langchain_pshard.core.codec import Tensor, pack_tokens, unpack_tokens
from langchain_pshard.core.errors import CapacityError, InferenceError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.messages import ClientId, Epoch, Slice, SliceKind, SliceResult, Step, StepId, StreamId, WorkerId
from langchain_pshard.core.numerics import DType, Numerics
from langchain_pshard.core.roles import DraftOffer, StageOffer
from langchain_pshard.core.sampling import SamplingParams
from workers.runners.runner import NO_TOKENS, Logits, RunSlice, StreamKey, TokenArray
from workers.worker import Identity

VOCAB = 64
HIDDEN = 4
CONTEXT = 512
_MODULUS = 251

NUMERICS = Numerics(
    name="exact",
    runner="paged",
    device="fake",
    openvino="0",
    inference_precision="f32",
    kv_precision="f32",
    dynamic_quantization_group_size=0,
    head_quantization_group_size=0,
    boundary=DType.F32,
)


DRAFT = DraftEntry(
    model_name="fake draft",
    architecture="fake",
    span=LayerSpan(0, 1),
    hidden_size=HIDDEN,
    vocab_size=VOCAB + 1,  # one row of padding
    context_length=CONTEXT // 2,
    num_kv_heads=1,
    head_dim=4,
    attention_windows=(None,),
    weight_mode=WeightMode.FP32,
    embedding_mode=WeightMode.FP32,
    head_mode=WeightMode.FP32,
    group_size=None,
    activation_group_size=0,
    files=(),
)


def make_manifest(num_stages: int, tokenizer_files: tuple[FileEntry, ...] = (), draft: DraftEntry | None = None) -> Manifest:
    """A sealed manifest of a model with one layer a stage."""
    return Manifest(
        format_version=1,
        model_name="fake",
        architecture="fake",
        num_layers=num_stages,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        num_kv_heads=1,
        head_dim=4,
        attention_windows=(None,) * num_stages,
        bos_token_id=1,
        eos_token_ids=(2,),
        weight_mode=WeightMode.FP32,
        embedding_mode=WeightMode.FP32,
        head_mode=WeightMode.FP32,
        group_size=None,
        activation_group_size=0,
        stages=tuple(StageEntry(span=LayerSpan(idx, idx + 1), files=()) for idx in range(num_stages)),
        tokenizer_files=tokenizer_files,
        exported_with={},
        draft=draft,
    ).sealed()


def make_identity(
    worker: str,
    num_stages: int,
    *served: int,
    capacity: int = 1024,
    tokenizer_files: tuple[FileEntry, ...] = (),
    has_draft: bool = False,
    drafts: bool = False,
    allows_logits: bool = False,
) -> Identity:
    """A worker that serves the stages `served` of a model of `num_stages`; the bundle may have a draft model, and the worker serve it."""
    offers = (
        StageOffer(
            stage_idx=idx,
            num_stages=num_stages,
            span=LayerSpan(idx, idx + 1),
            num_bytes=0,
            kv_capacity_tokens=capacity,
            allows_logits=allows_logits,
        )
        for idx in served
    )
    return Identity(
        worker=WorkerId(worker),
        software="1.0",
        manifest=make_manifest(num_stages, tokenizer_files, DRAFT if has_draft or drafts else None),
        numerics=NUMERICS,
        offers=tuple(offers),
        draft=DraftOffer(model_name=DRAFT.model_name, num_bytes=0, kv_capacity_tokens=capacity, context_length=DRAFT.context_length)
        if drafts
        else None,
    )


def row(
    stream: int, start: int, tokens: Sequence[int], *, num_sampled: int = 1, kind: SliceKind = SliceKind.ROWS, num_ahead: int = 0
) -> Slice:
    """A slice as a client makes it."""
    return Slice(stream=StreamId(stream), start=start, tokens=pack_tokens(tokens), kind=kind, num_sampled=num_sampled, num_ahead=num_ahead)


def step(step_id: int, *slices: Slice, client: str = "ann", epoch: int = 1) -> Step:
    """One turn of a client."""
    return Step(client=ClientId(client), epoch=Epoch(epoch), step_id=StepId(step_id), slices=slices)


def _mix(values: Sequence[float], stage_idx: int) -> float:
    return float((sum((idx + 1) * int(value) for idx, value in enumerate(values)) + 7 * stage_idx + 3) % _MODULUS)


def expected_token(tokens: Sequence[int], num_stages: int) -> int:
    """What the fake model says after `tokens`."""
    values: list[float] = [float(token) for token in tokens]
    for stage_idx in range(num_stages):
        values = [_mix(values[: idx + 1], stage_idx) for idx in range(len(values))]
    return int(values[-1]) % VOCAB


@dataclass
class FakeRunner:
    """One stage of the fake model; checks what `Runner` promises its engine."""

    stage_idx: int
    is_last: bool
    kv_capacity_tokens: int = 1024
    numerics: Numerics = NUMERICS
    is_rewind_exact: bool = True
    poison: int | None = None
    """A token that makes the inference fail."""
    batches: list[list[RunSlice]] = field(default_factory=list)
    _reserved: dict[StreamKey, int] = field(default_factory=dict)
    _values: dict[StreamKey, list[float]] = field(default_factory=dict)

    @property
    def kv_stream_tokens(self) -> int | None:
        return None

    @property
    def kv_used_tokens(self) -> int:
        return sum(self._reserved.values())

    @property
    def num_streams(self) -> int:
        return len(self._reserved)

    def open(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS, *, shares_generated: bool = False) -> int:
        del shares_generated
        assert key not in self._reserved
        assert len(prompt) <= num_tokens
        free = self.kv_capacity_tokens - self.kv_used_tokens
        if num_tokens > free:
            raise CapacityError(f"stage {self.stage_idx} needs {num_tokens} positions, {free} of {self.kv_capacity_tokens} are free")
        self._reserved[key] = num_tokens
        self._values[key] = []
        return 0

    def close_stream(self, key: StreamKey) -> None:
        self._reserved.pop(key, None)
        self._values.pop(key, None)

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor | Logits:
        assert slices
        assert len({piece.key for piece in slices}) == len(slices)
        assert (hidden is None) == (self.stage_idx == 0)
        total = sum(len(piece.tokens) for piece in slices)
        assert hidden is None or (hidden.shape == (total, HIDDEN) and hidden.dtype == np.float32)
        self.batches.append(list(slices))
        if any(self.poison in piece.tokens for piece in slices):
            for piece in slices:
                del self._values[piece.key][piece.start :]  # undefined from there on
            raise InferenceError("poisoned")
        rows: list[float] = []
        sampled: list[float] = []
        first = 0
        for piece in slices:
            values = self._values[piece.key]
            assert piece.start <= len(values)
            assert piece.start + len(piece.tokens) <= self._reserved[piece.key]
            assert 0 <= piece.num_sampled <= len(piece.tokens)
            assert all(0 <= token < VOCAB for token in piece.tokens)
            del values[piece.start :]
            out = []
            for offset, token in enumerate(piece.tokens):
                values.append(float(token) if hidden is None else float(hidden[first + offset, 0]))
                out.append(_mix(values, self.stage_idx))
            first += len(piece.tokens)
            rows += out
            sampled += out[len(out) - piece.num_sampled :]
        if not self.is_last:
            return np.repeat(np.array(rows, dtype=np.float32)[:, None], HIDDEN, axis=1)
        logits = np.zeros((len(sampled), VOCAB), dtype=np.float32)
        logits[np.arange(len(sampled)), [int(value) % VOCAB for value in sampled]] = 1.0
        return logits

    def close(self) -> None:
        self._reserved.clear()
        self._values.clear()


@dataclass
class FakeSampler:
    """Greedy; checks that only open streams are sampled."""

    streams: dict[StreamKey, SamplingParams] = field(default_factory=dict)

    def open(self, key: StreamKey, params: SamplingParams, prompt: TokenArray, grammar: Grammar | None = None) -> None:
        self.streams[key] = params

    def close_stream(self, key: StreamKey) -> None:
        self.streams.pop(key, None)

    def sample(self, logits: Logits, slices: Sequence[RunSlice]) -> list[SliceResult]:
        results = []
        first = 0
        for piece in slices:
            assert piece.key in self.streams
            tokens = logits[first : first + piece.num_sampled].argmax(axis=1) if piece.num_sampled else []
            first += piece.num_sampled
            results.append(SliceResult(piece.key.stream, pack_tokens(tokens)))
        assert first == len(logits)
        return results


def tokens_of(result: SliceResult) -> list[int]:
    return unpack_tokens(result.tokens)
