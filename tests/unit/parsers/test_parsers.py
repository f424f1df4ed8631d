"""What each parser makes of the texts that models really write."""

from __future__ import annotations

import pytest

from dflash_wire.errors import ConfigError
from gateway.chat_deltas import parsed_message
from gateway.parsers.deltas import CallArguments, CallStart, ContentDelta, ReasoningDelta
from gateway.parsers.registry import OutputFormat, ParsePlan, choose_format

pytestmark = pytest.mark.unit

ADD = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>\n{ADD}\n</tool_call>"


def parse(text: str, **plan: object) -> dict[str, object]:
    parser = ParsePlan(**{"tool_names": frozenset({"add"}), **plan}).new_parser()  # type: ignore[arg-type]
    message = parsed_message(parser.push(text) + parser.flush())
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nso\n</think>\n\nYes.", False, "so", "Yes."),
        ("so\n</think>\n\nYes.", True, "so", "Yes."),
        ("<think>\nso</think>Yes.", True, "so", "Yes."),
        ("Yes.", False, None, "Yes."),
        ("  Yes. <think>no</think>", False, None, "  Yes. <think>no</think>"),
        ("<think>\n\n</think>\n\nYes.", False, None, "Yes."),
        ("<think>so it", False, "so it", ""),
        ("so </t", True, "so </t", ""),
        ("<t", False, None, "<t"),
        ("<think>a </b> c</think> d\n", False, "a </b> c", "d\n"),
    ],
)
def test_reasoning(text: str, starts_inside: bool, reasoning: str | None, content: str) -> None:
    found = parse(text, reasoning="think_tags", starts_in_reasoning=starts_inside)
    assert (found.get("reasoning_content"), found["content"]) == (reasoning, content)


HERMES = [
    (CALL, None, [("add", '{"a": 1}')]),
    (f"Let me see.\n{CALL}", "Let me see.", [("add", '{"a": 1}')]),
    (f"{CALL}\n{CALL}", None, [("add", '{"a": 1}')] * 2),
    (f"{CALL}\nDone.", "Done.", [("add", '{"a": 1}')]),
    # What is no call is content, tag and all.
    ("a <tool_call>b", "a <tool_call>b", []),
    ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (f"<tool_call>{CALL}", "<tool_call>", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    ("1 <tool", "1 <tool", []),
    # What models get wrong.
    (f"<tool_call>{ADD}", None, [("add", '{"a": 1}')]),
    (f"<tool_call>{ADD}}}\n</tool_call>ok", "ok", [("add", '{"a": 1}')]),
    (f"<tool_call>{ADD[:-1]}\n</tool_call>ok", "ok", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add"}</tool_call>', None, [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', None, [("add", "{}")]),
    (
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
        None,
        [("add", '{"a": "</tool_call>"}')],
    ),
    ('<tool_call>{"name": "add", "arguments": {"a": ', None, [("add", '{"a": ')]),
    # The tags say what a call is, whatever its name.
    ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', None, [("sub", "{}")]),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', ..., []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    found = parse(text, tools="hermes")
    assert (found["content"], found["tool_calls"]) == (text if content is ... else content, calls)


LLAMA = [
    ('{"name": "add", "parameters": {"a": 1}}', None, [("add", '{"a": 1}')]),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', None, [("add", '{"a": 1}')]),
    ('\n{"type": "function", "name": "add", "parameters": {}}', None, [("add", "{}")]),
    (f"{ADD}; {ADD}", None, [("add", '{"a": 1}')] * 2),
    (f"{ADD}\n", None, [("add", '{"a": 1}')]),
    # JSON that is no call of one of the tools is an answer.
    ('{"name": "Ann", "age": 5}', ..., []),
    ('{"name": "sub", "parameters": {}}', ..., []),
    ('{"result": {"name": "add"}}', ..., []),
    (f"I call {ADD}", ..., []),
    ('{"name": "add', ..., []),
    ("  plain", ..., []),
    ("<|python_tag|>print(1)", ..., []),
    (f"{ADD} is what I mean", "is what I mean", [("add", '{"a": 1}')]),
]


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_llama3(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    found = parse(text, tools="llama3_json")
    assert (found["content"], found["tool_calls"]) == (text if content is ... else content, calls)


def test_reasoning_then_calls() -> None:
    found = parse(f"<think>\nhm {CALL}\n</think>\n\n{CALL}", reasoning="think_tags", tools="hermes")
    assert found["reasoning_content"] == f"hm {CALL}"
    assert (found["content"], found["tool_calls"]) == (None, [("add", '{"a": 1}')])


def test_arguments_stream_while_they_are_written() -> None:
    parser = ParsePlan(None, False, "hermes").new_parser()
    assert parser.push('hi <tool_call>{"name": "add", "argu') == [ContentDelta("hi")]
    start, begun = parser.push('ments": {"text": "lon')
    assert isinstance(start, CallStart) and (start.call, start.name) == (0, "add")
    assert begun == CallArguments(0, '{"text": "lon')
    assert parser.push("g") == [CallArguments(0, "g")]
    assert parser.num_calls == 1


def test_text_streams_at_once_unless_a_tag_may_begin() -> None:
    parser = ParsePlan("think_tags", True, "hermes").new_parser()
    assert parser.push("so") == [ReasoningDelta("so")]
    assert parser.push(" <b") == [ReasoningDelta(" <b")]
    assert parser.push("</think>x") == [ContentDelta("x")]
    assert parser.push(" y<") == [ContentDelta(" y")]
    assert parser.push("z") == [ContentDelta("<z")]


@pytest.mark.parametrize("tools", ["hermes", "llama3_json"])
def test_one_call_may_be_all(tools: str) -> None:
    parser = ParsePlan(None, False, tools, frozenset({"add"}), most_calls=1).new_parser()
    text = CALL if tools == "hermes" else ADD
    end = text.rindex("}")
    parser.push(text[:end])
    assert not parser.has_ended
    parser.push(text[end])
    assert parser.has_ended


QWEN3 = "{% if tools %}<tool_call></tool_call>{% endif %}{{ '<think></think>' if enable_thinking }}"
TEMPLATES = {
    None: OutputFormat(),
    "{{ messages }}": OutputFormat(),
    QWEN3: OutputFormat("think_tags", "hermes"),
    "{% if tools %}<tool_call><function=f></tool_call>{% endif %}": OutputFormat(),
    "{{ tools }}<|start_header_id|>{'name': f, \"parameters\": {}}": OutputFormat(
        None, "llama3_json"
    ),
    "{{ tools }} in some other way": OutputFormat(),
    "{% generation %}{{ tools }}<tool_call>{% endgeneration %}": OutputFormat(None, "hermes"),
    "{{ messages }} <think>": OutputFormat("think_tags", None),
    "<tool_call> without the variable: {{ messages }}": OutputFormat(),
}


@pytest.mark.parametrize(("template", "chosen"), TEMPLATES.items())
def test_the_template_chooses(template: str | None, chosen: OutputFormat) -> None:
    assert choose_format("auto", "auto", template) == chosen


def test_configuration_overrides_the_template() -> None:
    assert choose_format("none", "none", QWEN3) == OutputFormat()
    assert choose_format("think_tags", "llama3_json", None) == OutputFormat(
        "think_tags", "llama3_json"
    )
    with pytest.raises(ConfigError, match="hermes"):
        choose_format("auto", "nope", None)
