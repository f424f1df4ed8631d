"""From a body's fields to a grammar: one of xgrammar's structural tags, as JSON.

A *form* is the ``format`` of such a tag.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dflash_wire.errors import InvalidRequestError
from dflash_wire.processors import Processors
from gateway.errors import UnsupportedParameterError
from gateway.grammar_fields import Schema
from gateway.json_schemas import checked_schema
from gateway.parsers.think_tags import END_THINK, THINK
from gateway.schemas import GenerationBody
from gateway.state import GatewayState
from gateway.validation import SequencePlan

Json = dict[str, Any]
MAX_GRAMMAR_CHARS = 128 * 1024


class Guide(NamedTuple):
    """What an answer must be, and the field that says so."""

    form: Json
    param: str
    is_free: bool = False
    """Nothing is demanded: an answer may end anywhere, but inside of what it has begun."""


def answer_guide(body: GenerationBody) -> Guide | None:
    """Return what the answer itself must be; None if it may be anything.

    Raises:
        InvalidRequestError: a field is wrong, or there are several.
        UnsupportedParameterError: a schema says what cannot be forced.
    """
    found = [guide for guide in _asked(body) if guide is not None]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequestError(
            f"{second} and {first} both say what the answer is; send one.", second
        )
    return found[0] if found else None


def _asked(body: GenerationBody) -> list[Guide | None]:
    guided = (
        _schema_guide(body.guided_json, "guided_json"),
        _regex_guide(body.guided_regex, "guided_regex"),
        _choice_guide(body.guided_choice, "guided_choice"),
        _ebnf_guide(body.guided_grammar, "guided_grammar"),
    )
    return [_of_response_format(body), *_of_structured_outputs(body), *guided]


def _of_response_format(body: GenerationBody) -> Guide | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Guide(json_form(ANY_OBJECT), "response_format")
    param = "response_format.json_schema"
    if asked.json_schema is None:
        raise InvalidRequestError(f"{param} is required with this type.", param)
    schema = asked.json_schema.json_schema
    return _schema_guide(ANY_OBJECT if schema is None else schema, f"{param}.schema")


def _of_structured_outputs(body: GenerationBody) -> list[Guide | None]:
    asked, place = body.structured_outputs, "structured_outputs"
    if asked is None:
        return []
    found = [
        _schema_guide(asked.json_schema, f"{place}.json"),
        _regex_guide(asked.regex, f"{place}.regex"),
        _choice_guide(asked.choice, f"{place}.choice"),
        _ebnf_guide(asked.grammar, f"{place}.grammar"),
        _tag_guide(asked.structural_tag, f"{place}.structural_tag"),
        Guide(json_form(ANY_OBJECT), f"{place}.json_object") if asked.json_object else None,
    ]
    if not any(found):
        raise InvalidRequestError(
            "structured_outputs needs one of json, regex, choice, grammar, json_object and structural_tag.",
            place,
        )
    return found


ANY_OBJECT: Json = {"type": "object", "additionalProperties": True}
ANY_TEXT: Json = {"type": "any_text"}
SPACES = "[ \\t\\r\\n]*"
"""What parsers pass over, as a regular expression."""


def json_form(schema: Json | bool) -> Json:
    """Return the form of JSON texts that follow a schema."""
    return {"type": "json_schema", "json_schema": schema}


def _schema_guide(schema: Schema | None, param: str) -> Guide | None:
    if schema is None:
        return None
    return Guide(json_form(checked_schema(schema, param)), param)


def _regex_guide(pattern: str | None, param: str) -> Guide | None:
    return None if pattern is None else Guide(regex_form(pattern), param)


def _ebnf_guide(grammar: str | None, param: str) -> Guide | None:
    return None if grammar is None else Guide({"type": "grammar", "grammar": grammar}, param)


def _choice_guide(choices: Sequence[str] | None, param: str) -> Guide | None:
    if choices is None:
        return None
    if "" in choices:
        raise InvalidRequestError(f"{param}: a choice must not be empty.", param)
    values = [{"type": "const_string", "value": choice} for choice in dict.fromkeys(choices)]
    return Guide({"type": "or", "elements": values}, param)


def _tag_guide(text: str | None, param: str) -> Guide | None:
    if text is None:
        return None
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not JSON.", param) from error
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise InvalidRequestError(f"{param} must be an object with a 'format'.", param)
    return Guide(tag["format"], param)


def regex_form(pattern: str) -> Json:
    """Return the form of texts that match a regular expression."""
    return {"type": "regex", "pattern": pattern}


def sequence_of(*forms: Json) -> Json:
    """Return the form of texts that are made of these parts."""
    return {"type": "sequence", "elements": list(forms)}


def behind_reasoning(guide: Guide, must_reason: bool) -> Guide:
    """Return a guide of outputs whose beginning is what the model thinks.

    Args:
        guide: of the answer behind it.
        must_reason: the prompt has opened the reasoning; else the model may, or may answer at once.
    """
    answer = guide.form
    thought: Json = {**ANY_TEXT, "excludes": [END_THINK]}
    newlines = regex_form("\\n{0,2}")  # as models write it; they belong to neither part
    form = sequence_of(thought, {"type": "const_string", "value": END_THINK}, newlines, answer)
    if guide.is_free:
        form = {"type": "or", "elements": [thought, form]}
    if not must_reason:
        # Where the answer is free, so is what the parser of reasoning passes over.
        space = [regex_form(SPACES)] if guide.is_free else []
        opened = sequence_of(*space, {"type": "const_string", "value": THINK}, form)
        form = {"type": "or", "elements": [answer, opened]}
    return guide._replace(form=form)


def grammar_text(form: Json) -> str:
    """Return a form as ``Processors.grammar`` has it.

    Raises:
        ValueError: it cannot be written as JSON.
    """
    try:
        return json.dumps({"type": "structural_tag", "format": form}, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


async def guided(
    state: GatewayState, plans: list[SequencePlan], guide: Guide
) -> list[SequencePlan]:
    """Return the plans of a request whose answers must be what ``guide`` says.

    Raises:
        InvalidRequestError: it is no grammar, or one that would take too long.
        UnsupportedParameterError: this server has no guided decoding.
    """
    form, param = guide.form, guide.param
    if state.grammar_check is None or not state.settings.eos_token_ids:
        raise UnsupportedParameterError(
            f"{param}: this server has no guided decoding for its model.", param
        )
    try:
        text = grammar_text(form)
    except ValueError as error:
        raise InvalidRequestError(f"{param} cannot be written as JSON.", param) from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param} has {len(text)} characters as a grammar; at most {MAX_GRAMMAR_CHARS} are possible.",
            param,
        )
    reason = await state.grammar_check(text)
    if reason is not None:
        raise InvalidRequestError(f"{param}: {reason.rstrip('.')}.", param)
    return [_with_grammar(plan, text) for plan in plans]


def _with_grammar(plan: SequencePlan, text: str) -> SequencePlan:
    processors = replace(plan.request.processors or Processors(), grammar=text)
    return replace(plan, request=replace(plan.request, processors=processors))
