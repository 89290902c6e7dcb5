"""One shard of a bundle, a stage or the draft, made ready to run: model, device, precisions, engine.

OpenVINO is imported where it is used, so that options can be checked, and a missing installation explained, without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, get_args

import numpy as np

from langchain_pshard.core.bundle import DRAFT_DIR, MODEL_XML, DraftEntry, LayerSpan, Manifest, WeightMode, stage_dir
from langchain_pshard.core.codec import NUMPY_DTYPES, Tensor
from langchain_pshard.core.errors import BundleError, InvalidOptionError, MissingExtraError
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from langchain_pshard.core.numerics import DType, Numerics
from workers.draft import MAX_DRAFTS
from workers.runners.boundary import Int8Boundary, check_hidden_size, row_width
from workers.runners.runner import Runner, RunSlice, StreamKey

RunnerName = Literal["paged", "stateful"]
NumericsName = Literal["fast", "exact"]
KvPrecision = Literal["f16", "f32", "u8"]
ActivationName = Literal["f32", "int8"]

DEFAULT_KV_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a worker runs its stages.

    Raises:
        InvalidOptionError: a value outside its range; the message names option, value and range.
    """

    device: str = "CPU"
    runner: RunnerName = "paged"
    numerics: NumericsName = "fast"
    kv_precision: KvPrecision | None = None
    """None: f16 under `fast`, f32 under `exact`. u8 halves the memory of f16 and gives up exact rewinds: its keys share scales."""
    threads: int | None = None
    """Inference threads; None leaves the choice to the device."""
    kv_memory_bytes: int = DEFAULT_KV_MEMORY_BYTES
    """KV memory of each stage, and of the draft."""
    prefix_cache: bool | None = None
    """Whether prompts that begin alike share the KV of their beginning; None: where that is exact."""
    activation: ActivationName = "f32"
    """How hidden states cross from stage to stage; int8 takes about a quarter of the bytes, and tokens then depend on the cuts."""
    cache_dir: Path | None = None
    """Where compiled models are kept between starts; None: nowhere."""

    def __post_init__(self) -> None:
        _check_one_of("runner", self.runner, get_args(RunnerName))
        _check_one_of("numerics", self.numerics, get_args(NumericsName))
        _check_one_of("activation", self.activation, get_args(ActivationName))
        if self.kv_precision is not None:
            _check_one_of("kv_precision", self.kv_precision, get_args(KvPrecision))
        if self.threads is not None and self.threads < 1:
            raise InvalidOptionError(f"threads={self.threads} is out of range; valid: 1 or more")
        if self.kv_memory_bytes < 1:
            raise InvalidOptionError(f"kv_memory_bytes={self.kv_memory_bytes} is out of range; valid: 1 or more")

    @property
    def is_sharing_exact(self) -> bool:
        """Whether a prompt that begins on shared KV says what it says without."""
        # The keys of a u8 block share scales, so its bits depend on the chunks that filled it. So do those of the stateful runner under
        # `fast`, and a shared beginning is a chunk.
        return self.kv_precision != "u8" and (self.runner == "paged" or self.numerics == "exact")

    @property
    def has_prefix_cache(self) -> bool:
        """What `prefix_cache` comes to."""
        return self.is_sharing_exact if self.prefix_cache is None else self.prefix_cache


def _check_one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise InvalidOptionError(f"{name}={value!r} is unknown; valid: {', '.join(valid)}")


def make_runner(bundle: Path, manifest: Manifest, stage_idx: int, settings: Settings) -> Runner:
    """Load a stage, compile it and warm it up: the first inference re-packs the weights, so only now is it ready.

    Raises:
        MissingExtraError: OpenVINO is not installed.
        InvalidOptionError: the stage or device does not exist, or the device cannot run the stage with these settings.
        BundleError: the stage's model cannot be read.
        CapacityError: the KV pool does not fit into the memory available.
    """
    if not 0 <= stage_idx < manifest.num_stages:
        raise InvalidOptionError(f"stage {stage_idx} is not in this bundle; valid: 0 to {manifest.num_stages - 1}")
    if settings.activation == "int8":
        check_hidden_size(manifest.hidden_size)
    return _make_runner(bundle / stage_dir(stage_idx), f"stage {stage_idx}", manifest, manifest.stages[stage_idx].span, settings)


def make_draft_runner(bundle: Path, draft: DraftEntry, settings: Settings) -> Runner:
    """The same for the bundle's draft model, which is one stage: nothing of it crosses to another.

    Raises:
        See `make_runner`.
    """
    settings = replace(settings, activation="f32")
    # Guesses are written one by one, and all of them may have to be taken back.
    return _make_runner(bundle / DRAFT_DIR, "the draft", draft, draft.span, settings, num_taken_back=MAX_DRAFTS)


def _make_runner(
    folder: Path, name: str, model: Manifest | DraftEntry, span: LayerSpan, settings: Settings, *, num_taken_back: int = 0
) -> Runner:
    ov = _openvino()
    if settings.runner not in model.runners:
        raise InvalidOptionError(
            f"the {settings.runner} runner cannot run {model.model_name} ({model.architecture}): its attention has no such form;"
            f" valid: --runner {' or '.join(model.runners)}"
        )
    core = ov.Core()
    _check_device(core, settings)
    numerics, properties = _choose_numerics(ov, model, settings)

    from workers.runners.engine import StageModel
    from workers.runners.paged import PagedRunner
    from workers.runners.stateful import StatefulRunner

    stage = StageModel(
        model=_read(core, folder / MODEL_XML),
        core=core,
        properties=MappingProxyType(properties),
        head_properties=MappingProxyType(properties | {_GROUP_SIZE: numerics.head_quantization_group_size}),
        numerics=numerics,
        stage_name=name,
        is_first=span.start == 0,
        is_last=span.end == len(model.attention_windows),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        windows=model.attention_windows[span.start : span.end],
        kv_memory_bytes=settings.kv_memory_bytes,
        has_prefix_cache=settings.has_prefix_cache,
        num_taken_back=num_taken_back,
    )
    runner: Runner = PagedRunner(stage) if settings.runner == "paged" else StatefulRunner(stage)
    if settings.activation == "int8":
        runner = Int8Boundary(runner, hidden_size=model.hidden_size, is_last=stage.is_last)
    _warm_up(runner, None if stage.is_first else row_width(runner.numerics.boundary, model.hidden_size))
    return runner


def _openvino() -> ModuleType:
    try:
        import openvino
        import psutil  # noqa: F401  # the runners need it; part of the same extra
    except ImportError as error:
        raise MissingExtraError("pshard-worker", "worker") from error
    module: ModuleType = openvino
    return module


def _check_device(core: Any, settings: Settings) -> None:
    available = core.available_devices
    if settings.device not in available and settings.device not in {name.split(".")[0] for name in available}:
        raise InvalidOptionError(f"device {settings.device!r} does not exist on this machine; available: {', '.join(available)}")
    if settings.runner == "paged" and settings.device != "CPU":
        raise InvalidOptionError(f"the paged runner runs on CPU, not on {settings.device}; valid: --runner stateful")


def _read(core: Any, path: Path) -> Any:
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise BundleError(f"{path} cannot be read as an OpenVINO model: copy or export it again ({str(error).splitlines()[-1]})") from error


_GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
_GROUP_STEP, _LARGEST_HEAD_GROUP = 32, 512


def head_activation_group_size(model: Manifest | DraftEntry) -> int:
    """Values of a hidden state that share a scale in front of the head, under `fast`. Pure.

    Each group is a sum of its own, so fewer are quicker: 320 instead of 128 spare Gemma 3 270M's int8 head 5 % with one row and 15 % with
    eight. It costs 0.2 % of perplexity where layers are int8 (docs/decisions/0012-head.md). int4 weights have groups that bound those of
    activations.
    """
    if model.head_mode is not WeightMode.INT8 or not model.activation_group_size:
        return model.activation_group_size
    sizes = range(_GROUP_STEP, _LARGEST_HEAD_GROUP + 1, _GROUP_STEP)
    return max([size for size in sizes if model.hidden_size % size == 0], default=model.activation_group_size)


def _choose_numerics(ov: ModuleType, model: Manifest | DraftEntry, settings: Settings) -> tuple[Numerics, dict[str, Any]]:
    """The numerics class and the properties that compile a stage's layers into it."""
    is_fast = settings.numerics == "fast"
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": settings.kv_precision or ("f16" if is_fast else "f32"),
        _GROUP_SIZE: model.activation_group_size if is_fast else 0,
        "EXECUTION_MODE_HINT": "PERFORMANCE" if is_fast else "ACCURACY",
    }
    if settings.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = settings.threads
    if settings.cache_dir is not None:
        properties["CACHE_DIR"] = str(settings.cache_dir)
    numerics = Numerics(
        name=settings.numerics,
        runner=settings.runner,
        device=settings.device,
        openvino=str(ov.__version__).split("-")[0],
        inference_precision="f32",
        kv_precision=properties["KV_CACHE_PRECISION"],
        dynamic_quantization_group_size=int(properties[_GROUP_SIZE]),
        head_quantization_group_size=head_activation_group_size(model) if is_fast else 0,
        boundary=DType.F32,
    )
    return numerics, properties


def _warm_up(runner: Runner, width: int | None) -> None:
    """Run each kind of kernel once: a prefill, one row, several rows, as many as a busy fleet has and each sampled, so that the engine's
    own output is there before pages are looked at. `width` of a row of hidden states is None on a first stage."""
    key = StreamKey(ClientId("warm-up"), StreamId(0))
    num_prefill, num_rows = 16, 8
    runner.open(key, num_prefill + 1 + num_rows)
    try:
        start = 0
        for count, kind, num_sampled in (
            (num_prefill, SliceKind.PREFILL, 1),
            (1, SliceKind.ROWS, 1),
            (num_rows, SliceKind.ROWS, num_rows),
        ):
            piece = RunSlice(key=key, start=start, tokens=np.zeros(count, dtype=np.int32), kind=kind, num_sampled=num_sampled)
            runner.run([piece], None if width is None else _zeros(count, width, runner.numerics.boundary))
            start += count
    finally:
        runner.close_stream(key)


def _zeros(num_tokens: int, width: int, boundary: DType) -> Tensor:
    hidden: Tensor = np.zeros((num_tokens, width), dtype=NUMPY_DTYPES[boundary])
    return hidden
