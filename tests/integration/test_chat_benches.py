"""The benchmarks of the chat model in small: they measure what they say, on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks import call_latency, constrained, import_time
from langchain_pshard import ChatPShard, PipelineClient
from langchain_pshard.core.sampling import SamplingParams

PROMPTS = ["Tell me about ships.", "Tell me about snow."]


@pytest.mark.parametrize("sampling", constrained.SAMPLINGS.values(), ids=constrained.SAMPLINGS)
@pytest.mark.parametrize(("schema", "least", "most"), [(constrained.PROSE, 0.0, 0.1), (constrained.RECORD, 0.8, 1.0)])
def test_bound_and_free_texts_are_equally_long(
    tiny_fleet: list[str], schema: dict[str, object], least: float, most: float, sampling: SamplingParams
) -> None:
    turns = []
    with PipelineClient.connect(tiny_fleet) as client:
        found = constrained.compare(
            client, PROMPTS, constrained.bound_by(schema, sampling=sampling), repetitions=2, advance=lambda: turns.append(1)
        )
    assert len(found.free) == len(found.bound) == len(turns) == 2
    assert least <= found.forced_share <= most
    assert found.num_tokens > 200
    assert found.ratio > 0


def test_latency_ends_when_the_stream_is_opened(tiny_fleet: list[str]) -> None:
    with call_latency.timed_hubs() as hubs, ChatPShard(workers=tiny_fleet, max_tokens=1) as model:
        found = call_latency.latencies_ms(model, hubs, 2)
    assert list(found) == ["plain", "3 tools", "3 tools, forced"]
    assert all(len(values) == 2 and 0 < min(values) <= max(values) < 10_000 for values in found.values())


def test_import_times_are_of_fresh_interpreters() -> None:
    found = import_time.import_times_s(1)
    assert list(found) == list(import_time.PARTS)
    assert all(0 < value < 60 for [value] in found.values())
