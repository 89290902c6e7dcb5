"""Constrained decoding on the last stage: what is allowed, the one step rule, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from langchain_pshard.core.errors import GrammarError
from langchain_pshard.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from langchain_pshard.core.messages import ClientId, SliceKind, SliceResult, StreamId
from langchain_pshard.core.sampling import SamplingParams
from tests.support.json_schemas import random_schema
from tests.support.models import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer
from workers.grammar import GrammarCompiler
from workers.head import Head
from workers.runners.runner import RunSlice, StreamKey

KEY = StreamKey(ClientId("c"), StreamId(1))
PROMPT = [40, 41, 42]
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "at": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["name", "ok", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    made = GrammarCompiler(folder / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
    made.wait()
    return made


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def encode(text: str) -> list[int]:
    return [len(SPECIAL_TOKENS) + byte for byte in text.encode()]


def decode(tokens: Sequence[int]) -> str:
    return bytes(token - len(SPECIAL_TOKENS) for token in tokens).decode()


def logits_at(position: int) -> np.ndarray:
    return np.random.default_rng(position).standard_normal(VOCAB_SIZE).astype(np.float32)


def tokens_of(result: SliceResult) -> list[int]:
    return np.frombuffer(result.tokens, "<i4").tolist()


def step(head: Head, start: int, tokens: Sequence[int], kind: SliceKind, num_sampled: int) -> list[int]:
    rows = np.array([logits_at(start + len(tokens) - num_sampled + row) for row in range(num_sampled)]).reshape(num_sampled, VOCAB_SIZE)
    piece = RunSlice(key=KEY, start=start, tokens=np.array(tokens, np.int32), kind=kind, num_sampled=num_sampled)
    [result] = head.sample(rows, [piece])
    return tokens_of(result)


def generate(head: Head, *, drafts: random.Random | None = None, most: int = 400) -> list[int]:
    """A random model's text, with drafts that are right, wrong and forbidden when asked for."""
    step(head, 0, PROMPT[:2], SliceKind.PREFILL, 0)
    tokens = step(head, 2, PROMPT[2:], SliceKind.PREFILL, 1)
    while tokens[-1] != EOS_ID and len(tokens) < most:
        guess: list[int] = []
        if drafts is not None:
            guess = [drafts.choice([drafts.randrange(VOCAB_SIZE), *encode('"{ntfae,: ]}')]) for _ in range(drafts.randrange(4))]
        start = len(PROMPT) + len(tokens) - 1
        sampled = step(head, start, [tokens[-1], *guess], SliceKind.ROWS, 1 + len(guess))
        while guess and guess[0] == sampled[0]:
            tokens.append(sampled.pop(0))
            guess.pop(0)
        tokens.append(sampled[0])
        if EOS_ID in tokens:
            tokens = tokens[: tokens.index(EOS_ID) + 1]
    return tokens


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=2.0, seed=3), SamplingParams(repetition_penalty=1.5)])
def test_drafts_and_chunks_change_nothing_and_the_text_conforms(compiler: GrammarCompiler, params: SamplingParams) -> None:
    def fresh() -> Head:
        head = Head(compiler)
        head.open(KEY, params, grammar=schema(RECORD))
        return head

    plain = generate(fresh())
    assert plain[-1] == EOS_ID
    value = json.loads(decode(plain[:-1]))
    assert list(value) == ["name", "ok", "at"]
    assert len(value["name"]) <= 5
    assert isinstance(value["ok"], bool)
    assert set(value["at"]) <= {1, 2}
    for seed in range(20):
        assert generate(fresh(), drafts=random.Random(seed)) == plain
    replayed = fresh()  # a replay after a lost worker: prompt as prefill, generated tokens as rows, then the last one again
    step(replayed, 0, PROMPT, SliceKind.PREFILL, 0)
    step(replayed, len(PROMPT), plain[:-2], SliceKind.ROWS, 0)
    assert step(replayed, len(PROMPT) + len(plain) - 2, plain[-2:-1], SliceKind.ROWS, 1) == [EOS_ID]


GRAMMARS = [
    *(schema(random_schema(random.Random(seed))) for seed in range(40)),
    Grammar(GrammarKind.REGEX, "name: [a-z]{2}; (?s:.){0,9}; é+日本"),
    Grammar(GrammarKind.LARK, 'start: "x" item+\nitem: "1" | "2" | "three hundred "'),
]


def test_the_highest_allowed_token_is_that_of_the_whole_mask(compiler: GrammarCompiler) -> None:
    """A greedy row checks the model's own choice first and forced text without a mask; the mask has the last word on both."""
    draws = np.random.default_rng(5)
    num_own = num_ends = 0
    for grammar in GRAMMARS:
        matcher = compiler.compile(grammar)
        piece = RunSlice(key=KEY, start=0, tokens=np.array(PROMPT, np.int32), kind=SliceKind.PREFILL, num_sampled=1)
        for position in range(3, 150):
            matcher.advance(piece)
            row = draws.standard_normal(VOCAB_SIZE).astype(np.float32)
            row[encode('", :}]01aet')] += 3
            row[EOS_ID] += 3
            highest = int(row.argmax())
            expected = int(matcher.masked(row).argmax())
            assert matcher.highest_allowed(row, highest) == expected, (grammar.text, position)
            num_own += highest == expected
            if expected == EOS_ID:
                num_ends += 1
                break
            piece = RunSlice(key=KEY, start=position, tokens=np.array([expected], np.int32), kind=SliceKind.ROWS, num_sampled=1)
    assert num_own > 100
    assert num_ends > 30


def test_what_is_forced_is_suggested_and_what_follows_accepts_it(compiler: GrammarCompiler) -> None:
    head = Head(compiler)
    head.open(KEY, SamplingParams(), grammar=Grammar(GrammarKind.REGEX, "ab(c|d)efg"))

    def result(start: int, tokens: Sequence[int], kind: SliceKind, num_sampled: int) -> tuple[str, str]:
        rows = np.array([logits_at(start + row) for row in range(num_sampled)])
        piece = RunSlice(key=KEY, start=start, tokens=np.array(tokens, np.int32), kind=kind, num_sampled=num_sampled)
        [found] = head.sample(rows, [piece])
        return decode(tokens_of(found)), decode(np.frombuffer(found.forced, "<i4").tolist())

    assert result(0, PROMPT, SliceKind.PREFILL, 1) == ("a", "b")
    sampled, forced = result(3, encode("ab"), SliceKind.ROWS, 2)
    assert (sampled[0], forced) == ("b", "efg")
    choice = sampled[1]
    other = "c" if choice == "d" else "d"
    assert result(3, encode("ab" + other), SliceKind.ROWS, 3)[1] == "efg"  # a wrong draft: what follows the sampled token
    rest = head.sample(
        np.array([logits_at(position) for position in range(4)]),
        [RunSlice(key=KEY, start=5, tokens=np.array(encode(choice + "efg"), np.int32), kind=SliceKind.ROWS, num_sampled=4)],
    )[0]
    assert tokens_of(rest) == [*encode("efg"), EOS_ID]
    assert rest.forced == b""


def test_regular_expressions_and_lark(compiler: GrammarCompiler) -> None:
    for grammar, text in (
        (Grammar(GrammarKind.REGEX, "a(b|c)d"), "a"),
        (Grammar(GrammarKind.LARK, 'start: "x" item+\nitem: "1" | "2"'), "x"),
    ):
        head = Head(compiler)
        head.open(KEY, SamplingParams(), grammar=grammar)
        assert decode(step(head, 0, PROMPT, SliceKind.PREFILL, 1)) == text


def test_log_probabilities_are_of_what_may_come(compiler: GrammarCompiler) -> None:
    head = Head(compiler)
    head.open(KEY, SamplingParams(top_logprobs=20), grammar=Grammar(GrammarKind.REGEX, "a|b"))
    piece = RunSlice(key=KEY, start=0, tokens=np.array(PROMPT, np.int32), kind=SliceKind.PREFILL, num_sampled=1)
    [result] = head.sample(logits_at(2)[None], [piece])
    assert result.logprobs is not None
    [logprobs] = result.logprobs
    assert {token for token, _ in logprobs.top} == set(encode("ab"))
    assert sum(np.exp(value) for _, value in logprobs.top) == pytest.approx(1.0)


def test_draws_are_as_likely_as_among_the_allowed_tokens_alone(compiler: GrammarCompiler) -> None:
    logits = logits_at(2)[None]
    logits[0, encode("abcd")] = [3.0, 2.5, 2.0, 1.0]
    logits[0, encode("z")] = 4.0  # the likeliest of all, and forbidden
    params = SamplingParams(temperature=0.8)
    grammar = Grammar(GrammarKind.REGEX, "[a-d]")
    piece = RunSlice(key=KEY, start=0, tokens=np.array(PROMPT, np.int32), kind=SliceKind.PREFILL, num_sampled=1)
    counts = dict.fromkeys(encode("abcd"), 0)
    num_draws = 4_000
    head = Head(compiler)
    for seed in range(num_draws):
        head.open(KEY, msgspec.structs.replace(params, seed=seed), grammar=grammar)
        [token] = tokens_of(head.sample(logits, [piece])[0])
        assert tokens_of(head.sample(logits, [piece])[0]) == [token]  # the same however often it is asked
        counts[token] += 1
    weights = np.exp(logits[0, encode("abcd")] / params.temperature)
    expected = num_draws * weights / weights.sum()
    # Chi-squared of three degrees of freedom: beyond 16.3 once in a thousand.
    assert float(((np.array([*counts.values()]) - expected) ** 2 / expected).sum()) < 16.3


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}, {"top_logprobs": 1}])
def test_draws_that_something_narrows_are_narrowed_among_the_allowed(compiler: GrammarCompiler, options: dict[str, Any]) -> None:
    """What is kept is counted from the best allowed token on, not from the best of all, which is forbidden here."""
    logits = np.full((1, VOCAB_SIZE), -9.0, np.float32)
    logits[0, encode("abcdz")] = [3.0, 2.9, 0.0, -1.0, 9.0]
    piece = RunSlice(key=KEY, start=0, tokens=np.array(PROMPT, np.int32), kind=SliceKind.PREFILL, num_sampled=1)
    found = set()
    for seed in range(60):
        head = Head(compiler)
        head.open(KEY, SamplingParams(temperature=0.5, seed=seed, **options), grammar=Grammar(GrammarKind.REGEX, "[a-d]"))
        found |= set(tokens_of(head.sample(logits, [piece])[0]))
    assert found == set(encode("ab"))


def test_whoever_goes_on_from_what_is_forbidden_gets_an_end(compiler: GrammarCompiler) -> None:
    head = Head(compiler)
    head.open(KEY, SamplingParams(), grammar=Grammar(GrammarKind.REGEX, "abc"))
    step(head, 0, PROMPT, SliceKind.PREFILL, 1)
    assert step(head, 3, encode("ax"), SliceKind.ROWS, 2) == [*encode("b"), EOS_ID]
    assert step(head, 5, encode("y"), SliceKind.ROWS, 1) == [EOS_ID]
    assert step(head, 4, encode("b"), SliceKind.ROWS, 1) == encode("c")
    assert step(head, 5, encode("c"), SliceKind.ROWS, 1) == [EOS_ID]
    assert step(head, 6, [EOS_ID], SliceKind.ROWS, 1) == [EOS_ID]


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        (schema({"properties": {"a": {"not": {"type": "string"}}}}), r"\"not\".*at #/properties/a/not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems.*#/uniqueItems"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"$ref": "#/$defs/x"}), "/\\$defs/x"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[1]"), "not a JSON object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not a JSON object"),
        (Grammar(GrammarKind.REGEX, "a(b"), "unclosed group"),
        (Grammar(GrammarKind.LARK, 'start: "a" b'), "unknown name"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_part(compiler: GrammarCompiler, grammar: Grammar, part: str) -> None:
    head = Head(compiler)
    with pytest.raises(GrammarError, match=part):
        head.open(KEY, SamplingParams(), grammar=grammar)
    head.open(KEY, SamplingParams())  # nothing is left of it


def test_a_tokenizer_that_cannot_be_used_is_told_to_whoever_asks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    broken = GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=10, eos_token_ids=(2,))
    broken.wait()
    endless = GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=10, eos_token_ids=())
    for compiler, reason in ((broken, "tokenizer"), (endless, "no end token")):
        with pytest.raises(GrammarError, match=reason):
            compiler.compile(schema({}))
    assert "no constrained decoding" in caplog.text
    with pytest.raises(GrammarError, match="enforces no grammars"):
        Head().open(KEY, SamplingParams(), grammar=schema({}))


@pytest.mark.parametrize("text", ["", "x" * (MAX_GRAMMAR_BYTES + 1)])
def test_grammars_are_bounded(text: str) -> None:
    with pytest.raises(GrammarError, match="bytes; valid"):
        Grammar(GrammarKind.REGEX, text)


@pytest.mark.parametrize("kind", list(GrammarKind))
def test_half_a_character_is_refused_before_it_is_sent(kind: GrammarKind) -> None:
    with pytest.raises(GrammarError, match="half a character"):
        Grammar(kind, "a\ud800")
