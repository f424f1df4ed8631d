"""Which schemas are refused, as answers would not follow them; and that answers do follow the others."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from random_texts import random_texts

from dflash_wire.errors import InvalidRequestError
from gateway.errors import UnsupportedParameterError
from gateway.json_schemas import checked_schema

pytestmark = pytest.mark.unit

INTEGER = {"type": "integer"}
UNSUPPORTED: list[dict[str, Any]] = [
    {"type": "integer", "not": {"const": 3}},
    {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}},
    {"type": "array", "items": INTEGER, "uniqueItems": True},
    {"type": "array", "items": INTEGER, "contains": {"const": 7}},
    {"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}},
    {"allOf": [INTEGER, {"type": "integer", "minimum": 3}]},
    {"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]},
    {"$ref": "#/$defs/n", "maximum": 9, "$defs": {"n": INTEGER}},
    {"$ref": "https://example.com/schema"},
    {"$dynamicRef": "#n"},
    {"type": "string", "pattern": "^a*$", "minLength": 2},
    {"type": "string", "enum": ["a", 1]},
    {"type": "integer", "enum": [True]},
    {"minimum": 3},
    {"pattern": "^a+$"},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["z"]},
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
]


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=json.dumps)
def test_what_no_grammar_follows_is_refused_wherever_it_stands(schema: dict[str, Any]) -> None:
    places: list[Any] = [
        schema,
        {"type": "array", "items": schema},
        {"type": "object", "properties": {"enum": schema}},
        {"anyOf": [INTEGER, schema]},
        {"$ref": "#/$defs/not", "$defs": {"not": schema}},
    ]
    for place in places:
        with pytest.raises(UnsupportedParameterError, match="is not supported"):
            checked_schema(place, "guided_json")
    # As data it says nothing.
    assert checked_schema({"enum": [schema], "default": schema}, "guided_json")


def test_sizes_are_bounded() -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    assert checked_schema(deep, "p") is deep
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"p{i}": INTEGER for i in range(600)}}
    for schema in (deep, wide, {"enum": list(range(2000))}, "[" * 100_000):
        with pytest.raises(InvalidRequestError):
            checked_schema(schema, "p")


SUPPORTED: list[Any] = [
    True,
    {"type": ["integer", "null"], "minimum": 3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "maxLength": 4},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "items": False},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    {"enum": ["a", 1, None, {"x": [1, "ü"]}]},
    {"const": {"a": [1, 2]}},
    {"anyOf": [{"type": "integer", "maximum": 50}, {"type": "boolean"}]},
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"$ref": "#/$defs/n"}, "c": {"type": "string"}},
        "required": ["b"],
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}},
    },
    {"type": "object", "patternProperties": {"^[ab]+$": INTEGER}, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", SUPPORTED, ids=json.dumps)
def test_random_texts_of_a_schema_are_valid(schema: Any) -> None:
    """Random walks through what a grammar allows; the model of the demo could write any of them."""
    assert checked_schema(schema, "p") == schema
    texts = random_texts(schema, 25, random.Random(json.dumps(schema)))
    assert len(texts) > 5, "walks come to an end"
    for text in texts:
        Draft202012Validator(schema).validate(json.loads(text))
        assert "\n" not in text
