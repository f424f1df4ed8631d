"""How models write tool calls, as forms of a grammar: the counterpart of ``gateway.parsers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from gateway.grammars import Json, json_form
from gateway.json_schemas import checked_schema
from gateway.tool_schemas import Tool


class CallStyle(NamedTuple):
    """What stands around a call's name and arguments."""

    begin: str
    middle: str
    end: str
    separator: str


STYLES = {
    "hermes": CallStyle('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": CallStyle('{"name": ', ', "parameters": ', "}", "; "),
}
"""By the name of the parser that reads them."""
SAYS_WHAT = ("type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keys of a schema that say, or may say, which type a value has."""


def call_form(tools: Sequence[Tool], style: str, only_one: bool, name: str | None = None) -> Json:
    """Return the form of an answer that calls tools and says nothing else.

    Args:
        tools: those that may be called, not empty; arguments follow their schemas.
        style: name of the parser.
        only_one: end behind the first call.
        name: of the only tool that may be called; None: all may.

    Raises:
        UnsupportedParameterError: a schema says what cannot be forced.
    """
    tags = [
        call_tag(style, tool, arguments_schema(index, tool))
        for index, tool in enumerate(tools)
        if name is None or tool.function.name == name
    ]
    return calls_in_a_row(tags, style, only_one)


def calls_in_a_row(tags: list[Json], style: str, only_one: bool) -> Json:
    """Return the form of one call or more, with nothing but the style's separator between them.

    Args:
        tags: forms by ``call_tag``, any of which a call may have.
        style: name of the parser.
        only_one: end behind the first call.
    """
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": STYLES[style].separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }


def call_tag(style: str, tool: Tool, schema: Json | bool) -> Json:
    """Return the form of a call of ``tool`` whose arguments follow ``schema``."""
    begin, middle, end, _ = STYLES[style]
    return {
        "type": "tag",
        "begin": begin + json.dumps(tool.function.name, ensure_ascii=False) + middle,
        "content": json_form(schema),
        "end": end,
    }


def arguments_schema(index: int, tool: Tool) -> Json | bool:
    """Return the schema of a tool's arguments, which are an object.

    Args:
        index: of the tool in the request.

    Raises:
        InvalidRequestError: it is too large.
        UnsupportedParameterError: it says what cannot be forced.
    """
    schema = tool.function.parameters
    if not schema:
        return {"type": "object", "properties": {}}
    checked = checked_schema(schema, f"tools[{index}].function.parameters")
    if isinstance(checked, bool) or any(key in checked for key in SAYS_WHAT):
        return checked
    return {"type": "object", **checked}
