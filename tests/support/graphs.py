"""What stands in the graphs of a bundle, told by its constants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import openvino as ov

from langchain_pshard.core.bundle import MODEL_XML, load_manifest, stage_dir

_MARKS = ("/fq_weights", "/scale", "/zero_point", "weight", "_proj")  # merged experts are called after their projection


class StoredConstant(NamedTuple):
    """Weights, scales or zero points of one node."""

    element_type: ov.Type
    shape: tuple[int, ...]
    digest: str
    """sha256 of its bytes."""


def weight_constants(models: Iterable[ov.Model]) -> dict[str, StoredConstant]:
    """Weights, scales and zero points by node name."""
    found = {}
    for model in models:
        for node in model.get_ops():
            name = node.get_friendly_name()
            if node.get_type_name() == "Constant" and any(mark in name for mark in _MARKS):
                digest = hashlib.sha256(node.get_data().tobytes()).hexdigest()
                found[name] = StoredConstant(node.get_element_type(), tuple(node.get_output_shape(0)), digest)
    return found


def stage_models(bundle: Path) -> list[ov.Model]:
    """The graphs of a bundle, by stage."""
    return [ov.Core().read_model(bundle / stage_dir(idx) / MODEL_XML) for idx in range(load_manifest(bundle).num_stages)]
