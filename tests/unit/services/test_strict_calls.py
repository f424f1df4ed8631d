"""Calls that a model begins by itself: where a tool is strict they follow its schema, and all else is free.

What the gateway asks for, as xgrammar follows it, against the gateway's own parsers: byte by byte, so however
a model's tokens are cut.
"""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from xgrammar import GrammarMatcher

from gateway.chat_deltas import parsed_message
from gateway.grammars import behind_reasoning, grammar_text
from gateway.parsers.registry import OutputFormat, ParsePlan
from gateway.strict_calls import strict_guide
from gateway.tool_schemas import Tool
from verifier.grammars import GrammarPool, vocabulary

END = 256
POOL = GrammarPool(lambda: vocabulary([*(bytes([b]) for b in range(256)), b""], [END]))


def tool(name: str, parameters: dict[str, Any], strict: bool | None = None) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {
    "type": "object",
    "properties": {"a": DIGIT, "b": DIGIT},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    tool("add", SCHEMA, strict=True),
    tool("addend", {"not": {}}, strict=False),  # no grammar could follow it, and none has to
    tool("search", {"type": "object", "properties": {"q": {"type": "string"}}}),
    tool('q."[é]\\n', SCHEMA, strict=True),
]
NAMES = frozenset(one.function.name for one in TOOLS)
STRICT = {one.function.name for one in TOOLS if one.function.strict}
THOUGHTS = {"none": "", "may": "<think>hm</think>", "must": "hm</think>\n\n"}
"""Whether the model thinks: not that the parser knew, if it likes, or the prompt has opened it."""
KEYS = {"hermes": "arguments", "llama3_json": "parameters"}


def fragments(style: str) -> list[str]:
    """What calls are made of, rightly and wrongly, and what is none."""
    key = json.dumps(KEYS[style])
    values = ('{"a": 1}', '{"a": 1, "b": 2}', '{"b": 2}', '{"a": 11}', "5", '{"q": "<"}')
    calls = [
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, {key}: {value}}}'
        for name in (*sorted(NAMES), "other")
        for value in values
    ]
    calls += [f'{{"name":"add",{key}:{{"b":1}}}}', f'{{{key}: {{"b": 1}}, "name": "add"}}']
    calls += [f'{{"na\\u006de": "add", {key}: {{}}}}', '{"type": "function", "name": "add"}']
    calls += ['{"answer": 5}', '{"name": "Bob", "age": 7}', "{}", '{"name": 7}', "{x", "["]
    if style == "hermes":
        calls += [f"<tool_call>\n{call}\n</tool_call>" for call in calls] + ["<tool_call>"] * 8
    tags = ["<think>", *["</think>"] * 4, "<tool_call>", "</tool_call>", "<|python_tag|>"]
    others = ["<", "{", '{"', "}", '"name"', ": ", "; ", ", ", " ", "\n", "so", "Hi. ", "ü"]
    return [*calls, *(tags + others) * 4]


@lru_cache
def grammar(style: str, mode: str) -> str:
    output_format = OutputFormat("think_tags" if mode != "none" else None, style)
    guide = strict_guide(TOOLS, output_format, only_one=False)
    assert guide is not None
    return grammar_text((guide if mode == "none" else behind_reasoning(guide, mode == "must")).form)


def parsed(style: str, mode: str, text: str) -> dict[str, Any]:
    reasoning = None if mode == "none" else "think_tags"
    parser = ParsePlan(reasoning, mode == "must", style, NAMES).new_parser()
    return parsed_message(parser.push(text) + parser.flush())


def legal(matcher: GrammarMatcher) -> set[int]:
    mask = torch.zeros(1, 9, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return {int(i) for i in bits.nonzero()[0]}


def written(style: str, mode: str, rng: random.Random) -> tuple[str, bool]:
    """A text by somebody who tries to write fragments, and whatever is legal where he may not; whether it is
    whole."""
    matcher = GrammarMatcher(POOL.compile(grammar(style, mode)))
    text, choices = bytearray(), fragments(style)
    wish = rng.choice(["", THOUGHTS[mode]]) + rng.choice(choices)
    while True:
        for byte in wish.encode():
            if not matcher.accept_token(byte):
                break
            text.append(byte)
        allowed = legal(matcher)
        is_whole = END in allowed
        if len(text) > 600 or (is_whole and rng.random() < 0.15):
            return text.decode(errors="ignore"), is_whole
        if not (wanted := [i for i in allowed if 32 <= i < 127]):
            wanted = [i for i in allowed if i != END]
        if rng.random() < 0.5 or not is_whole:
            text.append(rng.choice(wanted))
            assert matcher.accept_token(text[-1])
        wish = rng.choice(choices)


def is_accepted(style: str, mode: str, text: str) -> bool:
    matcher = GrammarMatcher(POOL.compile(grammar(style, mode)))
    return all(map(matcher.accept_token, text.encode())) and END in legal(matcher)


@pytest.mark.parametrize("mode", THOUGHTS)
@pytest.mark.parametrize("style", KEYS)
def test_every_call_that_a_parser_finds_is_what_strict_tools_want(style: str, mode: str) -> None:
    rng, num_calls, num_texts = random.Random(0), dict.fromkeys(NAMES, 0), 0
    for _ in range(1000):
        text, is_whole = written(style, mode, rng)
        message = parsed(style, mode, text)
        calls = message.get("tool_calls") or []
        num_texts += bool(message["content"]) and bool(calls)
        for call in calls if is_whole else calls[:-1]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict), text
            if name in STRICT:
                Draft202012Validator(SCHEMA).validate(arguments)
            num_calls[name] += 1
    assert min(num_calls.values()) >= 10, num_calls
    assert num_texts >= 10


def may_be_refused(style: str, text: str) -> object:
    """Whether content is what nobody but a call begins with, though it has become none."""
    if style == "hermes":
        return "<tool_call>" in text
    text = re.sub(r"^[ \t\r\n]*(<\|python_tag\|>[ \t\r\n]*)?", "", text)
    key = re.match(r'\{[ \t\r\n]*("[^"]*"?)?', text)
    if key is None:
        return text.startswith(("<|", "<think>")) or (text and "<think>".startswith(text))
    name = re.match(r'\{\s*"name"\s*:\s*("[^"\\]*"|[^"\s])', text)
    is_free = key[1] is not None and key[1] not in {
        f'"{k}"' for k in ("type", "parameters", "arguments")
    }
    is_free = is_free and key[1].endswith('"') and len(key[1]) > 1 and "\\" not in key[1]
    if key[1] == '"name"':
        is_free = name is not None and name[1].strip('"') not in NAMES
    return not is_free and not re.match(r'\{[ \t\r\n]*[^" \t\r\n]', text)


@pytest.mark.parametrize("mode", THOUGHTS)
@pytest.mark.parametrize("style", KEYS)
def test_whatever_has_no_call_is_free(style: str, mode: str) -> None:
    rng, num_free = random.Random(1), 0
    choices = fragments(style)
    for _ in range(600):
        text = "".join(rng.choice(choices) for _ in range(rng.randint(0, 4)))
        message = parsed(style, mode, text)
        content = text if mode == "none" else message["content"] or ""
        if message.get("tool_calls") or may_be_refused(style, content):
            continue
        assert is_accepted(style, mode, text), text
        num_free += 1
    assert num_free > 150, num_free


def test_what_a_model_would_have_got_wrong() -> None:
    """By hand, so that nobody has to believe the generators."""
    begun = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"'
    matcher = GrammarMatcher(POOL.compile(grammar("hermes", "none")))
    assert all(map(matcher.accept_token, begun.encode()))
    assert legal(matcher) == {ord("a")}, "b alone is not enough"
    good = begun + 'a": 1}}\n</tool_call>'
    assert is_accepted("hermes", "none", good)
    assert is_accepted("hermes", "none", good + "\n" + good + " Done.")
    assert not is_accepted("hermes", "none", begun + 'a": 11}}\n</tool_call>')
    free = '<tool_call>\n{"name": "search", "arguments": {"x": [1, {}]}}\n</tool_call>'
    assert is_accepted("hermes", "none", free + good)
    assert not is_accepted("hermes", "none", good[:-3]), "a call that has begun is completed"
    llama = '{"name": "add", "parameters": {"a": 1}}'
    for text in (llama, f"<|python_tag|>{llama}; {llama}", llama + "\nDone.", '{"answer": 5}'):
        assert is_accepted("llama3_json", "none", text), text
    for text in ('{"name": "add", "parameters": {}}', '{"name":"add","parameters":{"a":1}}'):
        assert not is_accepted("llama3_json", "none", text), text
    assert not is_accepted(
        "llama3_json", "may", '<think>hm</think>{"name": "add", "parameters": {}}'
    )
    assert is_accepted("hermes", "must", 'hm <tool_call> {"name" hm'), "thoughts are free"
    assert not is_accepted("hermes", "must", "hm</think><tool_call>hm")


def test_only_one_call_and_no_strict_tool() -> None:
    guide = strict_guide(TOOLS, OutputFormat(None, "hermes"), only_one=True)
    assert guide is not None and guide.param == "tools[0].function.strict"
    matcher = GrammarMatcher(POOL.compile(grammar_text(guide.form)))
    call = 'Hm <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert all(map(matcher.accept_token, call.encode()))
    assert legal(matcher) == {END}
    assert strict_guide(TOOLS[1:3], OutputFormat(None, "hermes"), only_one=False) is None
