"""The deltas of a text, concatenated, do not depend on how it was cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_deltas import delta_object, parsed_message
from gateway.parsers.deltas import Delta
from gateway.parsers.output_parser import OutputParser
from gateway.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ParsePlan

pytestmark = pytest.mark.unit

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NAMES = frozenset({"add", "now"})
FRAGMENTS = [
    *("<think>", "</think>", "<think", "think>", "</", "<", ">"),
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "</tool", "<|python_tag|>", "<|python"),
    *(" ", "\n", "\n\n", "a", "word ", "ü", "😀"),
    *("{", "}", "[", "]", '"', ":", ",", ";", "\\", "null", "1"),
    *('{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}', '{"name": "now"}'),
    *('{"name": "add", "parameters": {"x": "</tool_call>"}}', '{"a": 1}', '{"name": "other"}'),
    *('{"name": 5, ', '"name"', '"arguments"', "true}"),
    *('{"arguments": {"a": 2}, "name": "add"}', '{"name": "add", "arguments": "{\\"a\\": 3}"}'),
    *('{"type": "function", "name": "now", "parameters": {}}', '{"name": "add", "arguments": {'),
    *(CALL, CALL + "\n\n", CALL + "\n\nso", "so\n\n" + CALL, "<think>\n\nso\n\n</think>\n\nso"),
]
PLANS = [
    ParsePlan(reasoning, starts, tools, NAMES)
    for reasoning in (None, *REASONING_PARSERS)
    for starts in ((False, True) if reasoning else (False,))
    for tools in (None, *TOOL_PARSERS)
]


def without_ids(deltas: list[Delta]) -> dict[str, object]:
    message = parsed_message(deltas)
    for call in message.get("tool_calls", []):
        del call["id"]
    return message


def parse(make: Callable[[], OutputParser], pieces: list[str]) -> dict[str, object]:
    parser = make()
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()
    return without_ids(deltas)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12),
    places=st.lists(st.integers(0, 500), max_size=20),
)
def test_cutting_changes_nothing(plan: ParsePlan, fragments: list[str], places: list[int]) -> None:
    text = "".join(fragments)
    whole = parse(plan.new_parser, [text])
    assert parse(plan.new_parser, cut(text, places)) == whole
    assert parse(plan.new_parser, list(text)) == whole


@pytest.mark.parametrize("plan", PLANS, ids=str)
@settings(deadline=None)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12))
def test_stream_deltas_add_up_to_the_whole_message(plan: ParsePlan, fragments: list[str]) -> None:
    parser = plan.new_parser()
    deltas = [delta for piece in fragments for delta in parser.push(piece)] + parser.flush()
    content = reasoning = ""
    arguments: dict[int, str] = {}
    for made in map(delta_object, deltas):
        content += made.get("content", "")
        reasoning += made.get("reasoning_content", "")
        for call in made.get("tool_calls", []):
            arguments[call["index"]] = (
                arguments.get(call["index"], "") + call["function"]["arguments"]
            )
    message = parsed_message(deltas)
    assert (message["content"] or "") == content
    assert message.get("reasoning_content", "") == reasoning
    calls = message.get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == list(arguments.values())
    assert list(arguments) == list(range(len(calls)))


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=4,
)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=50, deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), indent=st.none() | st.just(2))
def test_calls_come_back_as_they_were_written(
    name: str, calls: list[dict[str, object]], indent: int | None
) -> None:
    key = "arguments" if name == "hermes" else "parameters"
    texts = [json.dumps({"name": "add", key: call}, indent=indent) for call in calls]
    if name == "hermes":
        text = "".join(f"\n<tool_call>\n{one}\n</tool_call>" for one in texts)
    else:
        text = "; ".join(texts)
    message = parse(ParsePlan(None, False, name, NAMES).new_parser, list(text))
    assert message["content"] is None
    found = message["tool_calls"]
    assert isinstance(found, list)
    assert [json.loads(call["function"]["arguments"]) for call in found] == calls
