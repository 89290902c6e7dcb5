"""The tensors of a checkpoint, by name: what there is, and the data of a few at a time.

Headers are read here rather than by safetensors, so that a damaged file, an index that points nowhere or a tensor in a format
that is no number of its own (an already quantized checkpoint) is refused by name before anything large is touched. Data is read, not
mapped: mapped pages would count as memory of the export for as long as the file is open.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    read_field,
)

from langchain_pshard.core.errors import SourceError, UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LARGEST_HEADER_BYTES = 100 << 20  # what safetensors itself allows
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_IGNORED_INTEGERS = ("position_ids", "attn.bias", "masked_bias")  # buffers that old checkpoints carry along


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies and how large it is on the disk."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class Checkpoint(Protocol):
    """Tensors under the names the checkpoint gives them."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, for errors and for telling one source from another."""
        ...

    def names(self, model: Any) -> Mapping[str, StoredTensor]:
        """Every tensor there is. `model` is the transformers model on the meta device, which a GGUF needs to translate its names."""
        ...

    def reading(
        self, names: Sequence[str], model: Any, on_bytes: Callable[[int], None]
    ) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Tensors, or slices that become tensors when they are indexed with `...`; valid inside the block.

        `on_bytes` hears of every tensor read, for a progress display.
        """
        ...


@dataclass(frozen=True, slots=True)
class _CountedSlice:
    """A slice of safetensors that tells when it is read."""

    slice: Any
    num_bytes: int
    on_bytes: Callable[[int], None]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.slice[index]
        self.on_bytes(self.num_bytes)
        return tensor


class SafetensorsCheckpoint:
    """`model.safetensors`, or the files that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        """Read all headers.

        Raises:
            SourceError: a file is missing, cut off or damaged, or the index and the files contradict one another.
            UnsupportedModelError: tensors are stored quantized.
        """
        self._tensors = _indexed(folder) if (folder / INDEX_NAME).is_file() else _single(folder)
        self.files = tuple(sorted({tensor.file for tensor in self._tensors.values()}))

    def names(self, model: Any) -> Mapping[str, StoredTensor]:  # noqa: ARG002  # the seam's argument
        """See `Checkpoint.names`."""
        return self._tensors

    @contextlib.contextmanager
    def reading(
        self,
        names: Sequence[str],
        model: Any,  # noqa: ARG002  # the seam's argument
        on_bytes: Callable[[int], None],
    ) -> Iterator[dict[str, Any]]:
        """See `Checkpoint.reading`."""
        with contextlib.ExitStack() as stack:
            files: dict[Path, Any] = {}
            for path in sorted({self._tensors[name].file for name in names}):
                files[path] = stack.enter_context(safe_open(str(path), framework="pt", device="cpu", backend="pread"))
            stored = {name: self._tensors[name] for name in names}
            slices = {
                name: _CountedSlice(files[tensor.file].get_slice(name), tensor.num_bytes, on_bytes) for name, tensor in stored.items()
            }
            try:
                yield slices
            finally:
                slices.clear()  # a slice keeps its file open, and an error's traceback would keep the slices


@dataclass(frozen=True, slots=True, kw_only=True)
class _GgufTensor:
    """A tensor of a .gguf file, as its header has it."""

    name: str
    kind: Any
    """GGMLQuantizationType."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    stored_shape: tuple[int, ...]
    """Of the blocks that the numbers are packed in."""
    stored_dtype: Any


class GgufCheckpoint:
    """A .gguf file, dequantized tensor by tensor as transformers does it for a whole file at once."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Read the header, once: a large vocabulary makes that take seconds.

        Args:
            path: the file.
            config: of the model, as transformers names its fields.
        """
        self.files = (path,)
        self._path = path
        reader = GGUFReader(str(path))
        architecture = read_field(reader, "general.architecture")[0]
        self._processor: TensorProcessor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(config))
        self._tensors = tuple(
            _GgufTensor(
                name=tensor.name,
                kind=tensor.tensor_type,
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                offset=int(tensor.data_offset),
                num_bytes=int(tensor.n_bytes),
                stored_shape=tensor.data.shape,
                stored_dtype=tensor.data.dtype,
            )
            for tensor in reader.tensors
        )

    def names(self, model: Any) -> Mapping[str, StoredTensor]:
        """See `Checkpoint.names`; the names are those of transformers."""
        return {
            name: StoredTensor(file=self._path, dtype=tensor.kind.name, shape=tensor.shape, num_bytes=tensor.num_bytes)
            for tensor, name in self._translated(self._translation(model))
        }

    @contextlib.contextmanager
    def reading(self, names: Sequence[str], model: Any, on_bytes: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """See `Checkpoint.reading`; what is asked for is dequantized at once."""
        wanted = set(names)
        translation = self._translation(model)
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        for tensor, name in self._translated(translation):
            if name not in wanted:
                continue
            stored = np.fromfile(self._path, dtype=tensor.stored_dtype, count=math.prod(tensor.stored_shape), offset=tensor.offset)
            result = self._processor.process(
                weights=dequantize(stored.reshape(tensor.stored_shape), tensor.kind),
                name=tensor.name,
                tensor_key_mapping=translation,
                parsed_parameters=parsed,
            )
            if result.name is not None:  # a processor that merges experts puts the result into `parsed` itself
                parsed["tensors"][translation[result.name]] = torch.from_numpy(np.array(result.weights, dtype=np.float32))
            on_bytes(tensor.num_bytes)
        yield parsed["tensors"]

    def _translation(self, model: Any) -> dict[str, str]:
        translation: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        return translation

    def _translated(self, translation: Mapping[str, str]) -> Iterator[tuple[_GgufTensor, str]]:
        """Each tensor of the file that the model knows, with the model's name for it."""
        for tensor in self._tensors:
            # Merged experts stand in the map without their suffix.
            name = translation.get(tensor.name) or translation.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                yield tensor, name


def _single(folder: Path) -> dict[str, StoredTensor]:
    path = folder / SINGLE_NAME
    if path.is_file():
        return _read_header(path)
    pickles = sorted(found.name for found in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise SourceError(
            f"{folder} holds {pickles[0]} but no {SINGLE_NAME}: the pickle format can run code and is not read; convert the"
            " model to safetensors (transformers: model.save_pretrained)"
        )
    raise SourceError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}: the weights are missing; download the model again")


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_NAME
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(placed.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} cannot be read as an index ({error!r}): download it again") from error
    found: dict[str, StoredTensor] = {}
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise SourceError(f"{index} points outside its folder: {name!r}; download it again")
        if not (folder / name).is_file():
            raise SourceError(f"{folder / name} is missing, {INDEX_NAME} names it: download that file")
        found |= _read_header(folder / name)
    lost = sorted(set(placed) - set(found))
    if lost:
        raise SourceError(
            f"{folder / placed[lost[0]]} does not hold the tensor {lost[0]} that {INDEX_NAME} says it holds: download both again"
        )
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; format: 8 bytes of header length, the header in JSON, the data."""
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(_LARGEST_HEADER_BYTES, num_bytes):
                raise ValueError(f"a header of {header_bytes} bytes")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, name, entry) for name, entry in header.items()}
        end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise SourceError(f"{path} is not a safetensors file or is damaged ({error}): download it again") from error
    if end != num_bytes:
        raise SourceError(f"{path} is cut off or damaged: {num_bytes} bytes, its header describes {end}; download it again")
    return tensors


def _stored(path: Path, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype = entry["dtype"]
    if dtype not in _FLOATS and not name.endswith(_IGNORED_INTEGERS):
        raise UnsupportedModelError(
            f"{path} stores {name} as {dtype}: the checkpoint is already quantized; export from the original weights"
            f" ({', '.join(sorted(_FLOATS))})"
        )
    start, end = entry["data_offsets"]
    return StoredTensor(file=path, dtype=dtype, shape=tuple(entry["shape"]), num_bytes=end - start)
