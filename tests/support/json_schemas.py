"""Random JSON schemas with short values, and a plain reading of what conforms to one, apart from the library that enforces them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "größe", "数量", "tag line", "a/b~c", 'qu"ote', "emoji👍", "zip", "é", "x")
_WORDS = ("red", "naïve", "東京", "a b", 'say "hi"', "\\", "👩‍👧")


def random_schema(source: random.Random, *, depth: int = 3) -> Schema:
    """An object schema with nested objects, enums, nullable values, bounded arrays, unicode keys and references into nested `$defs`."""
    definitions: Schema = {f"D{index}": _value(source, 1, []) for index in range(source.randrange(3))}
    if definitions and source.random() < 0.3:
        definitions["Inner"] = {"$ref": "#/$defs/D0"}
    schema = _object(source, depth, list(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _object(source: random.Random, depth: int, names: list[str]) -> Schema:
    keys = source.sample(_NAMES, source.randrange(1, 4))
    properties = {key: _value(source, depth - 1, names) for key in keys}
    required = [key for key in keys if source.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(source: random.Random, depth: int, names: list[str]) -> Schema:
    kinds: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "maxLength": source.randrange(1, 6)},
        lambda: {"type": "string", "pattern": source.choice(["^[a-c]{2,4}$", "^[0-9]+-x$"]), "maxLength": 8},
        lambda: {"type": "integer", "minimum": -20, "maximum": source.randrange(0, 3000)},
        lambda: {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": source.sample([*_WORDS, 1, None, True, 2.5], 3)},
        lambda: {"const": source.choice(_WORDS)},
        lambda: {"type": ["boolean", "null"]},
    ]
    if names:
        kinds.append(lambda: {"$ref": f"#/$defs/{source.choice(names)}"})
    if depth > 0:
        kinds += [
            lambda: _object(source, depth, names),
            lambda: {"anyOf": [_value(source, depth - 1, names), {"type": "null"}]},
            lambda: {"type": "array", "items": _value(source, depth - 1, names), "minItems": source.randrange(2), "maxItems": 3},
            lambda: {"type": "array", "prefixItems": [{"type": "boolean"}, _value(source, 0, names)], "items": False, "minItems": 2},
        ]
    return source.choice(kinds)()


def conforms(value: Any, schema: Schema, root: Schema | None = None) -> bool:
    """Whether `value` is what `schema` describes; knows the keywords that `random_schema` uses, and fails on others."""
    root = schema if root is None else root
    return all(_CHECKS[key](value, wanted, schema, root) for key, wanted in schema.items())


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "number": (int, float),
        "null": type(None),
        "object": dict,
        "array": list,
        "boolean": bool,
    }
    return isinstance(value, kinds[name])


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _referenced(path: str, root: Schema) -> Schema:
    found: Any = root
    for part in path.removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)


def _properties(value: Any, wanted: Schema, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, dict) or all(conforms(value[key], wanted[key], root) for key in value.keys() & wanted.keys())


def _items(value: Any, wanted: Any, schema: Schema, root: Schema) -> bool:
    rest = value[len(schema.get("prefixItems", ())) :] if isinstance(value, list) else []
    return not rest if wanted is False else all(conforms(item, wanted, root) for item in rest)


_CHECKS: dict[str, Callable[[Any, Any, Schema, Schema], bool]] = {
    "$defs": lambda value, wanted, schema, root: True,
    "$ref": lambda value, wanted, schema, root: conforms(value, _referenced(wanted, root), root),
    "type": lambda value, wanted, schema, root: any(_is_type(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted)),
    "enum": lambda value, wanted, schema, root: any(_same(value, one) for one in wanted),
    "const": lambda value, wanted, schema, root: _same(value, wanted),
    "anyOf": lambda value, wanted, schema, root: any(conforms(value, one, root) for one in wanted),
    "properties": _properties,
    "required": lambda value, wanted, schema, root: all(key in value for key in wanted),
    "additionalProperties": lambda value, wanted, schema, root: wanted or value.keys() <= schema["properties"].keys(),
    "items": _items,
    "prefixItems": lambda value, wanted, schema, root: all(conforms(item, one, root) for item, one in zip(value, wanted, strict=False)),
    "minItems": lambda value, wanted, schema, root: len(value) >= wanted,
    "maxItems": lambda value, wanted, schema, root: len(value) <= wanted,
    "maxLength": lambda value, wanted, schema, root: len(value) <= wanted,
    "pattern": lambda value, wanted, schema, root: re.search(wanted, value) is not None,
    "minimum": lambda value, wanted, schema, root: value >= wanted,
    "maximum": lambda value, wanted, schema, root: value <= wanted,
    "multipleOf": lambda value, wanted, schema, root: (value / wanted).is_integer(),
}


class RandomDrafter:
    """Guesses bytes that JSON is made of, and tokens that nothing is made of: some are right, most are wrong, many are forbidden."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def begin(self, prompt: Sequence[int]) -> RandomDrafter:
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        """Nothing is learnt."""

    def propose(self, max_tokens: int) -> list[int]:
        count = min(max_tokens, self._source.randrange(4))
        return [8 + self._source.choice(b'"{}[]:, abnullerst01') if self._source.random() < 0.8 else 5 for _ in range(count)]
