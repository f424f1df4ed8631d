"""Request fields that say what an answer must be: OpenAI's ``response_format``, and vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from gateway.base_schemas import StrictBody, problem

MAX_CHOICES = 1024


def _read_schema(value: object) -> object:
    if value is not None and not isinstance(value, dict | bool | str):
        raise problem("must be a JSON Schema, or one written as a string")
    return value


Schema = Annotated[
    dict[str, Any] | bool | str,
    PlainValidator(_read_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}),
]
"""A JSON Schema; as a string it is JSON itself."""
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(StrictBody):
    """OpenAI's ``json_schema``. Answers follow the schema whether it is called ``strict`` or not."""

    name: str = Field(max_length=256)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(StrictBody):
    """vLLM's ``structured_outputs``: one of the first six."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_additional_properties: bool | None = Field(
        None,
        description="Objects have no other properties in any case, unless their schema says so.",
    )


class GrammarFields(BaseModel):
    """Fields of both generating endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(
        None, description="vLLM's older name; so are the next three."
    )
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
