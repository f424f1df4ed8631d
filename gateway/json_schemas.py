"""JSON Schemas that clients send: whether a grammar can say what they say.

xgrammar passes over what it cannot express, in silence. So what it cannot is refused here; keywords that
nobody knows say nothing, as in JSON Schema itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from dflash_wire.errors import InvalidRequestError
from gateway.errors import UnsupportedParameterError

Json = dict[str, Any]
MAX_DEPTH = 64
"""Of objects and lists in a schema."""
MAX_VALUES = 1024
"""Values of all enumerations together."""
MAX_PROPERTIES = 512
"""Properties of all objects together."""

NEVER = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that no grammar follows."""
COMBINERS = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
"""What stands beside one of them is passed over."""
LENGTHS = frozenset({"minLength", "maxLength"})
CONSTRAINTS = (
    COMBINERS
    | LENGTHS
    | {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("pattern", "format", "enum", "const"),
    }
)
TYPED = CONSTRAINTS - COMBINERS - {"enum", "const", "properties", "required"}
"""Keywords that are passed over where no type is given; objects are known by their properties."""
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
DATA = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are no schemas."""
NAMED = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords whose values are objects of schemas, by names that are no keywords."""


def checked_schema(schema: Json | bool | str, param: str) -> Json | bool:
    """Return a schema, read if it is a text.

    Raises:
        InvalidRequestError: it is no JSON, or too large.
        UnsupportedParameterError: it says what no grammar can.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not JSON.", param) from error
        if not isinstance(schema, dict | bool):
            raise InvalidRequestError(f"{param} must be an object or a boolean.", param)
    num_values = num_properties = 0
    for one in _schemas_of(schema, param):
        problem = unsupported(one)
        if problem is not None:
            raise UnsupportedParameterError(f"{param}: {problem} is not supported.", param)
        num_values += _size(one.get("enum"))
        num_properties += _size(one.get("properties"))
        if num_values > MAX_VALUES:
            _refuse(f"it enumerates more than {MAX_VALUES} values", param)
        if num_properties > MAX_PROPERTIES:
            _refuse(f"it has more than {MAX_PROPERTIES} properties", param)
    return schema


def unsupported(schema: Json) -> str | None:
    """Return what in one schema, those within it left out, no grammar follows; None if there is nothing."""
    for key in sorted(NEVER & schema.keys()):
        return repr(key)
    if schema.get("uniqueItems"):
        return "'uniqueItems'"
    if _size(schema.get("allOf")) > 1:
        return "'allOf' of several schemas"
    combiners = sorted(COMBINERS & schema.keys())
    beside = sorted((CONSTRAINTS & schema.keys()) - set(combiners[:1]))
    if combiners and beside:
        return f"{combiners[0]!r} beside {beside[0]!r}"
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return "'$ref' to elsewhere"
    if "type" not in schema and "properties" not in schema:
        for key in sorted(TYPED & schema.keys()):
            return f"{key!r} without a 'type'"
    return _in_objects(schema) or _in_values(schema)


def _in_objects(schema: Json) -> str | None:
    names, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(names, list) and isinstance(properties, dict):
        for name in names:
            if isinstance(name, str) and name not in properties:
                return f"'required' of {name[:64]!r}, which is no property,"
    is_open = schema.get("additionalProperties") or "patternProperties" in schema
    if is_open and schema.get("minProperties", 0) not in (0, 1):
        return "'minProperties' above 1 where names are free"
    return None


def _in_values(schema: Json) -> str | None:
    kind, values = schema.get("type"), schema.get("enum")
    expected = TYPES.get(kind) if isinstance(kind, str) else None
    if expected is not None and isinstance(values, list):
        is_flag = expected is bool
        if any(not isinstance(v, expected) or isinstance(v, bool) != is_flag for v in values):
            return "'enum' with values of another type"
    if "pattern" in schema and LENGTHS & schema.keys():
        return "'pattern' beside a length"
    return None


def _schemas_of(schema: object, param: str) -> Iterator[Json]:
    """Yield a schema and all within it."""
    waiting: list[tuple[object, int]] = [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            _refuse(f"it is nested deeper than {MAX_DEPTH}", param)
        if isinstance(value, list):
            waiting += [(one, depth + 1) for one in value]
        if not isinstance(value, dict):
            continue
        yield value
        for key, inner in value.items():
            if key in NAMED and isinstance(inner, dict):
                waiting += [(one, depth + 1) for one in inner.values()]
            elif key not in DATA:
                waiting.append((inner, depth + 1))


def _size(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _refuse(reason: str, param: str) -> NoReturn:
    raise InvalidRequestError(f"{param}: {reason}.", param)
