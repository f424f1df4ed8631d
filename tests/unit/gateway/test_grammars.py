"""What answers must be: from the fields of a body to the engine's grammar, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from gateway_fakes import Served, last
from tool_models import ADD, HERMES, LLAMA3, served_by, tool_tokenizer
from transformers import PreTrainedTokenizerFast

from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_FORM = {"type": "json_schema", "json_schema": SCHEMA}
OBJECT = {
    "type": "json_schema",
    "json_schema": {"type": "object", "additionalProperties": True},
}
NAMED = {"type": "function", "function": {"name": "add"}}
OTHER = {"type": "function", "function": {"name": 'm"ul'}}


class Checks:
    """A check that keeps what it was asked, and refuses what it is told to."""

    def __init__(self, reason: str | None = None) -> None:
        self.texts: list[str] = []
        self.reason = reason

    async def __call__(self, text: str) -> str | None:
        self.texts.append(text)
        return self.reason


@pytest.fixture(scope="module")
def hermes() -> PreTrainedTokenizerFast:
    return tool_tokenizer(HERMES)


@pytest.fixture
def served(hermes: PreTrainedTokenizerFast, settings: GatewaySettings) -> Served:
    return served_by(hermes, settings, lambda _: [last([])], Checks())


def form_of(served: Served) -> Any:
    """The form that the engine got, which is the one that was checked."""
    (request,) = served.engine.requests
    assert request.processors is not None
    served.engine.requests.clear()
    tag = json.loads(request.processors.grammar)
    assert tag["type"] == "structural_tag"
    return tag["format"]


def without_reasoning(form: Any) -> Any:
    """The form of an answer that the model gives at once."""
    assert form["type"] == "or"
    direct, thought = form["elements"]
    assert thought["elements"][0] == {"type": "const_string", "value": "<think>"}
    assert thought["elements"][-1]["elements"][-1] == direct
    return direct


CASES: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        JSON_FORM,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_FORM),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON_FORM),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, {"type": "regex", "pattern": "a+"}),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"type": "grammar", "grammar": 'root ::= "a"'},
    ),
    (
        {"structured_outputs": {"choice": ["a", "b", "a"]}},
        {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "const_string", "value": "b"},
            ],
        },
    ),
    (
        {"structured_outputs": {"structural_tag": '{"format": {"type": "regex", "pattern": "b"}}'}},
        {"type": "regex", "pattern": "b"},
    ),
    ({"guided_json": SCHEMA}, JSON_FORM),
    ({"guided_regex": "a+"}, {"type": "regex", "pattern": "a+"}),
    ({"guided_grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
    (
        {"guided_choice": ["a"]},
        {"type": "or", "elements": [{"type": "const_string", "value": "a"}]},
    ),
]


@pytest.mark.parametrize(("fields", "form"), CASES, ids=[next(iter(case[0])) for case in CASES])
async def test_every_field_becomes_a_form(
    fields: dict[str, Any], form: Any, served: Served
) -> None:
    assert (await served.complete(**fields)).status_code == 200
    assert form_of(served) == form
    response = await served.chat(**fields)
    assert response.status_code == 200
    assert "x-dflash-ignored-fields" not in response.headers
    assert without_reasoning(form_of(served)) == form


async def test_nothing_is_asked_of_others(served: Served) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        await served.chat(**fields)
        assert served.engine.requests.pop().processors is None


async def test_the_responses_api_says_it_in_its_own_way(served: Served) -> None:
    form = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    body = {"model": "demo/model", "input": "hi", "text": {"format": form}}
    response = await served.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["text"] == {"format": form}
    assert without_reasoning(form_of(served)) == JSON_FORM
    body["text"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    error = (await served.http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "text.format"


def called(*tools: Any, only_one: bool) -> Any:
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "}\n</tool_call>",
        }
        for name, schema in tools
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": only_one,
    }


ADDED = ("add", ADD["function"]["parameters"])  # type: ignore[index]
OTHERS = ('m"ul', {"type": "object", "properties": {}})


async def test_calls_that_are_demanded_are_forced(served: Served) -> None:
    await served.chat(tools=[ADD, OTHER], tool_choice="required")
    assert without_reasoning(form_of(served)) == called(ADDED, OTHERS, only_one=False)
    await served.chat(tools=[ADD, OTHER], tool_choice="required", parallel_tool_calls=False)
    assert without_reasoning(form_of(served)) == called(ADDED, OTHERS, only_one=True)
    await served.chat(
        tools=[OTHER, ADD], tool_choice=NAMED, response_format={"type": "json_object"}
    )
    assert without_reasoning(form_of(served)) == called(ADDED, only_one=True)


async def test_an_answer_of_a_form_may_be_a_call_instead(served: Served) -> None:
    await served.chat(tools=[ADD], response_format={"type": "json_object"})
    form = without_reasoning(form_of(served))
    assert form == {"type": "or", "elements": [OBJECT, called(ADDED, only_one=False)]}
    await served.chat(tools=[ADD], tool_choice="none", response_format={"type": "json_object"})
    assert without_reasoning(form_of(served)) == OBJECT


def strict(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**tool["function"], "strict": True, **more}}


async def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(served: Served) -> None:
    await served.chat(tools=[OTHER, strict(ADD)], tool_choice="auto")
    form = form_of(served)
    answer, thinking = form["elements"]
    assert answer == {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": called(('m"ul', OBJECT["json_schema"]), ADDED, only_one=False)["tags"],
        "at_least_one": False,
        "stop_after_first": False,
    }
    assert thinking["elements"][-1]["elements"][1]["elements"][-1] == answer
    await served.chat(tools=[strict(ADD)], parallel_tool_calls=False)
    assert form_of(served)["elements"][0]["stop_after_first"]
    for fields in ({"tool_choice": "none"}, {"tools": [ADD, OTHER]}):
        await served.chat(**{"tools": [strict(ADD)], **fields})
        assert served.engine.requests.pop().processors is None
    tool = {"type": "function", "strict": True, **ADD["function"]}  # type: ignore[dict-item]
    body = {"model": "demo/model", "input": "hi", "tools": [tool]}
    assert (await served.http.post("/v1/responses", json=body)).status_code == 200
    assert form_of(served)["elements"][0]["tags"] == called(ADDED, only_one=False)["tags"]


async def test_strict_tools_that_cannot_be_forced_are_refused(
    hermes: PreTrainedTokenizerFast, settings: GatewaySettings
) -> None:
    unfit = strict(ADD, parameters={"type": "object", "properties": {"a": {"not": {}}}})
    checked = served_by(hermes, settings, [], Checks("it is too large"))
    unguided = served_by(hermes, settings, [])
    for served, tool, code, param in (
        (checked, unfit, "unsupported_parameter", "tools[1].function.parameters"),
        (checked, strict(ADD), "invalid_value", "tools[1].function.strict"),
        (unguided, strict(ADD), "unsupported_parameter", "tools[1].function.strict"),
    ):
        error = (await served.chat(tools=[OTHER, tool])).json()["error"]
        assert (error["code"], error["param"]) == (code, param)
    error = (await checked.chat(tools=[ADD, strict(ADD)])).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "tools[1].function.name")


async def test_llama_has_another_style(settings: GatewaySettings) -> None:
    served = served_by(tool_tokenizer(LLAMA3), settings, lambda _: [last([])], Checks())
    await served.chat(tools=[ADD], tool_choice=NAMED)
    form = form_of(served)
    assert (form["separator"], form["stop_after_first"]) == ("; ", True)
    (tag,) = form["tags"]
    assert (tag["begin"], tag["end"]) == ('{"name": "add", "parameters": ', "}")


async def test_a_forced_call_is_answered_as_one(
    hermes: PreTrainedTokenizerFast, settings: GatewaySettings
) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tokens = hermes.encode(text, add_special_tokens=False)
    served = served_by(hermes, settings, lambda _: [last(tokens)], Checks())
    choice = (await served.chat(tools=[ADD], tool_choice=NAMED)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


async def test_the_form_begins_behind_the_reasoning(served: Served) -> None:
    fields = {"response_format": {"type": "json_object"}}
    await served.chat(**fields, chat_template_kwargs={"enable_thinking": True})
    form = form_of(served)  # the prompt has opened it: no answer without
    assert form["type"] == "sequence"
    kinds = [element["type"] for element in form["elements"]]
    assert kinds == ["any_text", "const_string", "regex", "json_schema"]
    assert form["elements"][0]["excludes"] == ["</think>"]
    await served.chat(**fields)
    without_reasoning(form_of(served))  # it may think, or answer at once


async def test_a_prompt_that_has_closed_the_reasoning_leaves_none(
    settings: GatewaySettings,
) -> None:
    closed = HERMES.replace("<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
    served = served_by(tool_tokenizer(closed), settings, lambda _: [last([])], Checks())
    fields = {"response_format": {"type": "json_object"}}
    await served.chat(**fields, chat_template_kwargs={"enable_thinking": True})
    assert form_of(served) == OBJECT


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "invalid_value",
            "response_format.json_schema",
        ),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "invalid_value",
            "structured_outputs.choice",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "invalid_value", "guided_choice"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_choice": ["a", ""]}, "invalid_value", "guided_choice"),
        ({"guided_json": "{"}, "invalid_value", "guided_json"),
        ({"guided_json": "5"}, "invalid_value", "guided_json"),
        ({"structured_outputs": {"json": 5}}, "invalid_value", "structured_outputs.json"),
        ({"guided_choice": [1]}, "invalid_value", "guided_choice[0]"),
        ({"response_format": "json"}, "invalid_value", "response_format"),
        (
            {"structured_outputs": {"structural_tag": "[]"}},
            "invalid_value",
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "unsupported_parameter",
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_json": {"not": {}}}, "unsupported_parameter", "guided_json"),
        ({"guided_regex": "a" * 140_000}, "invalid_value", "guided_regex"),
    ],
)
async def test_refusals(
    fields: dict[str, Any],
    code: str,
    param: str,
    hermes: PreTrainedTokenizerFast,
    settings: GatewaySettings,
) -> None:
    served = served_by(hermes, settings, [], Checks(), max_body_bytes=200_000)
    for response in (await served.chat(**fields), await served.complete(**fields)):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, param)
    assert served.engine.requests == []


async def test_what_cannot_be_compiled_is_refused_before_the_first_byte(
    hermes: PreTrainedTokenizerFast, settings: GatewaySettings
) -> None:
    served = served_by(hermes, settings, [], Checks("The parenthesis is not closed."))
    with pytest.raises(openai.BadRequestError) as refusal:
        await served.openai.completions.create(
            model="demo/model", prompt="hi", stream=True, extra_body={"guided_regex": "(a"}
        )
    assert refusal.value.param == "guided_regex"
    assert "guided_regex: The parenthesis is not closed." in refusal.value.message
    response = await served.chat(tools=[ADD], tool_choice="required")
    assert response.json()["error"]["param"] == "tool_choice"


async def test_without_a_check_or_an_end_there_are_no_grammars(
    hermes: PreTrainedTokenizerFast, settings: GatewaySettings
) -> None:
    endless = replace(settings, eos_token_ids=())
    for served in (
        served_by(hermes, settings, []),
        served_by(hermes, endless, [], Checks()),
    ):
        response = await served.chat(response_format={"type": "json_object"})
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "response_format")
