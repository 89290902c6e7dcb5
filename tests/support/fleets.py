"""Session fixtures: real workers that many tests talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fleet import running_worker
from tests.support.bundles import TinyBundle


@pytest.fixture(scope="session")
def tiny_fleet(tiny_bundle: TinyBundle) -> Iterator[list[str]]:
    """The addresses of two workers with the two stages of a tiny Llama. Tests that kill or overload workers start their own."""
    bundle = tiny_bundle("llama", num_stages=2)
    with running_worker(bundle, 0) as first, running_worker(bundle, 1) as second:
        yield [first.address, second.address]
