"""What several tests of the client share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_pshard.pipeline.client import PipelineClient
from tests.support.fake_fleet import FakeFleet, connect


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FakeFleet]:
    with FakeFleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: FakeFleet, tmp_path: Path) -> Iterator[PipelineClient]:
    with connect(fleet, tmp_path) as client:
        yield client
