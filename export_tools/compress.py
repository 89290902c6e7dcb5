"""Weight compression that gives a layer the same bytes whatever the split.

NNCF decides by position in the graph it sees: left alone it gives the last product and the embedding of every model it is handed the
backup mode, so the last down-projection of a middle stage would be stored otherwise than inside the unsplit model. Here nothing
is left to position: embedding and head are named, kept out of the first pass, and compressed by a second one. For int4 this is
byte for byte what NNCF makes of the unsplit model by default.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import nncf
import openvino as ov

from langchain_pshard.core.bundle import WeightMode
from langchain_pshard.core.errors import UsageError

# Names of torch modules inside StageModule, as the converter carries them into node names.
_EMBEDDING_PREFIX = "__module.embed_tokens/"
_HEAD_PREFIX = "__module.lm_head/"
# Group sizes are halved down to this where the asked one does not divide a channel count; below it a weight becomes int8.
_SMALLEST_GROUP = 32
_LARGEST_ACTIVATION_GROUP = 128  # 256 was measured not to be exact


def embedding_and_head_mode(mode: WeightMode) -> WeightMode:
    """How the embedding and the head are stored: int8 where the layers are int4, else like the layers."""
    return WeightMode.INT8 if mode is WeightMode.INT4 else mode


def activation_group_size(channel_counts: Iterable[int], mode: WeightMode, group_size: int) -> int:
    """Values of an activation that may share a scale at run time, so that groups of activations never straddle groups of weights. Pure.

    The CPU plugin quantizes a product's activations only where the group divides its input; a product left out would be summed in float32,
    whose last bits depend on the number of rows (docs/decisions/0005-fast-numerics.md).

    Args:
        channel_counts: input sizes of all matrices that are compressed.
        mode: mode of the decoder layers.
        group_size: int4 weights per scale, as asked for.

    Returns:
        128, 64 or 32; 0 when nothing is compressed or some matrix takes none of them.
    """
    if mode not in (WeightMode.INT4, WeightMode.INT8):
        return 0
    largest = min(group_size, _LARGEST_ACTIVATION_GROUP) if mode is WeightMode.INT4 else _LARGEST_ACTIVATION_GROUP
    group = math.gcd(largest, *channel_counts)
    return group if group >= _SMALLEST_GROUP else 0


def compress_stage(model: ov.Model, mode: WeightMode, group_size: int) -> ov.Model:
    """Store the weights of a stage in `mode`; fp16 and fp32 are left to `save_stage`.

    Args:
        model: a stage from `make_stateful`.
        mode: mode of the decoder layers; see `embedding_and_head_mode` for the rest.
        group_size: int4 weights that share one scale, where it divides the channel count.
    """
    if mode not in (WeightMode.INT4, WeightMode.INT8):
        return model
    with _quiet_nncf():
        if mode is WeightMode.INT4:
            ends = _embedding_and_head_nodes(model)
            model = nncf.compress_weights(
                model,
                mode=nncf.CompressWeightsMode.INT4_SYM,
                ratio=1.0,
                group_size=group_size,
                all_layers=True,
                ignored_scope=nncf.IgnoredScope(names=ends) if ends else None,
                advanced_parameters=nncf.AdvancedCompressionParameters(
                    group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST, min_adjusted_group_size=min(_SMALLEST_GROUP, group_size)
                ),
            )
            if not ends:
                return model
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)


def save_stage(model: ov.Model, xml: Path, mode: WeightMode) -> None:
    """Write the .xml and .bin of a stage; every mode but fp16 keeps what is not compressed (norms, scales) as it is.

    Raises:
        UsageError: OpenVINO could not write the files.
    """
    try:
        ov.save_model(model, xml, compress_to_fp16=mode is WeightMode.FP16)
    except RuntimeError as error:  # all OpenVINO raises, a full disk included
        raise UsageError(f"cannot write {xml}: {error}; is the disk full?") from error


def _embedding_and_head_nodes(model: ov.Model) -> list[str]:
    """Friendly names of the embedding's Gather and the head's MatMul, those of them this stage has."""
    found = [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if (node.get_type_name() == "Gather" and node.get_friendly_name().startswith(_EMBEDDING_PREFIX))
        or (node.get_type_name() == "MatMul" and node.get_friendly_name().startswith(_HEAD_PREFIX))
    ]
    inputs = model.input(0).get_names()
    outputs = model.output(0).get_names()
    assert len(found) == ("input_ids" in inputs) + ("logits" in outputs), f"embedding and head not found by name: {found}"
    return found


@contextlib.contextmanager
def _quiet_nncf() -> Iterator[None]:
    """NNCF logs tables at INFO and draws its own bars on standard output, with no switch for them; what goes wrong is raised."""
    logger = logging.getLogger("nncf")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
