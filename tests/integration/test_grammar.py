"""Constrained decoding through real workers, over the pipeline client."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence

import pytest

from langchain_pshard.core.errors import GrammarError
from langchain_pshard.core.grammar import Grammar, GrammarKind
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import FinishReason, GenerationParams
from tests.support.json_schemas import RandomDrafter, conforms, random_schema

PROMPT = "Tell me about ships."


@pytest.fixture
def client(tiny_fleet: list[str]) -> Iterator[PipelineClient]:
    with PipelineClient.connect(tiny_fleet) as client:
        yield client


def of_regex(pattern: str, *, max_tokens: int = 200) -> GenerationParams:
    return GenerationParams(max_tokens=max_tokens, grammar=Grammar(GrammarKind.REGEX, pattern))


def test_a_regular_expression_is_the_whole_text(client: PipelineClient) -> None:
    pattern = r"(yes|no), [0-9]{4}-[0-9]{2}"
    whole = client.complete(PROMPT, of_regex(pattern))
    assert re.fullmatch(pattern, whole.text)
    assert whole.finish_reason is FinishReason.STOP
    for seed in range(5):
        drawn = client.complete(
            PROMPT, GenerationParams(grammar=Grammar(GrammarKind.REGEX, pattern), sampling=SamplingParams(temperature=1.5, seed=seed))
        )
        assert re.fullmatch(pattern, drawn.text)


def test_forced_text_costs_hardly_any_steps(client: PipelineClient) -> None:
    record = 'name: "[a-z]{2}"; kind: fixed; unit: millimetres; count: [0-9]{2}; end of this record'
    whole = client.complete(PROMPT, of_regex(record))
    assert re.fullmatch(record, whole.text)
    assert whole.stats.num_generated_tokens == len(whole.text) + 1
    assert whole.stats.num_accepted_tokens > 0.75 * len(whole.text)
    assert whole.stats.num_steps < 0.25 * len(whole.text)


def test_free_streams_beside_it_are_what_they_are_alone(client: PipelineClient) -> None:
    free = GenerationParams(max_tokens=40)
    alone = client.complete(PROMPT, free)
    with client.generate(PROMPT, of_regex("[ab]{60}")) as bound, client.generate(PROMPT, free) as beside:
        assert "".join(chunk.text for chunk in beside) == alone.text
        assert re.fullmatch("[ab]{60}", "".join(chunk.text for chunk in bound))


def test_a_broken_grammar_is_refused_before_any_work_and_frees_everything(client: PipelineClient) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        client.complete(PROMPT, of_regex("a(b"))
    with pytest.raises(GrammarError, match="#/not"):
        client.complete(PROMPT, GenerationParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')))
    assert all(stage.kv_used_tokens == 0 for worker in client.status().workers if worker.status for stage in worker.status.stages)


def test_a_length_limit_says_so(client: PipelineClient) -> None:
    cut = client.complete(PROMPT, of_regex("[ab]{60}", max_tokens=10))
    assert (len(cut.text), cut.finish_reason) == (10, FinishReason.LENGTH)


SCHEMAS = [random_schema(random.Random(seed)) for seed in range(200)]


def run(client: PipelineClient, schemas: Sequence[dict[str, object]], *, with_drafts: bool) -> list[str]:
    """All at once: the fleet serves them in shared steps."""
    streams = [
        client.generate(
            PROMPT,
            # A fixed number: left to itself the client soon sends none of such drafts.
            GenerationParams(max_tokens=1500, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), draft=None, draft_tokens=3),
            drafter=RandomDrafter(index) if with_drafts else None,
        )
        for index, schema in enumerate(schemas)
    ]
    return ["".join(chunk.text for chunk in stream) for stream in streams]


@pytest.mark.timeout(300)
def test_two_hundred_random_schemas_are_met_and_drafts_change_nothing(client: PipelineClient) -> None:
    texts = run(client, SCHEMAS, with_drafts=False)
    for schema, text in zip(SCHEMAS, texts, strict=True):
        assert conforms(json.loads(text), schema), (schema, text)
    assert run(client, SCHEMAS, with_drafts=True) == texts
