"""Session fixtures: exported bundles, each made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.bundles import demo_bundle as export_demo_once
from langchain_pshard.core.bundle import WeightMode

TinyBundle = Callable[..., Path]
"""`tiny_bundle(architecture, weights=WeightMode.FP32, num_stages=1)`: the folder of the bundle, to be read only.

`architecture` is a key of `tests.support.models.ARCHITECTURES`."""
DemoBundle = Callable[..., Path]
"""`demo_bundle(weights=WeightMode.INT4, layers=(16, 2))`: the same for Gemma 3 270M."""


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    """Bundles of tiny random-weight models, built and exported at first use and shared by the session."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[str, WeightMode, int], Path] = {}

    def get(architecture: str, *, weights: WeightMode = WeightMode.FP32, num_stages: int = 1) -> Path:
        key = (architecture, weights, num_stages)
        if key not in made:
            from export_tools.export import export_bundle
            from tests.support.models import build_tiny

            model = folder / f"{architecture}-model"
            if not model.exists():
                build_tiny(architecture, model)
            bundle = folder / f"{architecture}-{weights.value}-{num_stages}"
            export_bundle(str(model), bundle, num_stages=num_stages, weights=weights, verify_shards=False)
            made[key] = bundle
        return made[key]

    return get


@pytest.fixture(scope="session")
def demo_bundle() -> DemoBundle:
    """Gemma 3 270M, exported once per machine; mark the test with `real_model`."""

    def get(*, weights: WeightMode = WeightMode.INT4, layers: Sequence[int] = (16, 2)) -> Path:
        return export_demo_once(weights=weights, layers=layers)

    return get
