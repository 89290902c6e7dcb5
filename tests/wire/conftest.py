"""What several tests of the client share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.transport.memory import MemoryNetwork
from tests.support.fake_fleet import FakeFleet, connect


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FakeFleet]:
    with FakeFleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: FakeFleet, tmp_path: Path) -> Iterator[PipelineClient]:
    with connect(fleet, tmp_path) as client:
        yield client


@pytest.fixture
def network() -> MemoryNetwork:
    """A network that loses, doubles and holds what its rule says."""
    return MemoryNetwork()


@pytest.fixture
def memory_fleet(tmp_path: Path, network: MemoryNetwork) -> Iterator[FakeFleet]:
    """Two workers on it."""
    with FakeFleet(tmp_path, hub=network.hub) as fleet:
        yield fleet
