"""Request bodies: types and ranges that hold for any model.

What depends on the served model (context, vocabulary, policies) is checked in ``validation``; known
parameters that are not implemented are found among the extra fields by ``parameters``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from gateway.base_schemas import StrictBody, problem
from gateway.grammar_fields import GrammarFields
from gateway.processor_fields import ProcessorFields
from gateway.tool_schemas import Json, Tool, ToolCall, ToolChoice

MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20

Prompts = list[str] | list[list[int]]


def _join_parts(value: object) -> object:
    """Return message content as one string; parts are joined with newlines, as vLLM does."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise problem("must be a string or a list of text parts")
        return value
    return "\n".join(_part_text(index, part) for index, part in enumerate(value))


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise problem(f"part {index} must be an object with a 'type'")
    if part["type"] != "text":
        raise problem(
            f"part {index} has type '{part['type'][:40]}', but only 'text' parts are supported"
        )
    if not isinstance(part.get("text"), str):
        raise problem(f"part {index} must have a string 'text'")
    return str(part["text"])


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _list_prompts(value: object) -> object:
    """Return the four forms of ``prompt`` as a list of texts or a list of token id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _is_token_ids(value):
            return [value]
        if all(_is_token_ids(item) for item in value):
            return value
    raise problem(
        "must be a string, a list of strings, a list of token ids or of such lists, and not empty"
    )


def _list_stops(value: object) -> object:
    """Return ``stop`` as a tuple of at most four non-empty strings."""
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise problem("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise problem(f"at most {MAX_STOP_STRINGS} stop strings are possible, not {len(stops)}")
    if "" in stops:
        raise problem("a stop string must not be empty")
    return tuple(stops)


_STRINGS = {"type": "array", "items": {"type": "string"}}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}}

Content = Annotated[
    str,
    BeforeValidator(_join_parts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]
Prompt = Annotated[
    Prompts,
    PlainValidator(_list_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _STRINGS,
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS},
            ]
        }
    ),
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_list_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, {**_STRINGS, "maxItems": MAX_STOP_STRINGS}]}),
]


class StreamOptions(StrictBody):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk says what has been used so far."
    )


class DFlashOptions(BaseModel):
    """The ``dflash`` extension; unknown keys are errors here, since nobody else defines any."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    policy: str | None = Field(
        None,
        description="'adaptive', 'adaptive-chain', 'table', 'off', 'static:<w>' or 'static-tree:<n>', anchor "
        "included.",
    )
    drafter: str | None = Field(None, description="Name of the drafter, where there are several.")
    stats: bool | None = Field(None, description="Report what the request cost.")
    sampling: Literal["coupled", "rejection"] | None = Field(
        None,
        description="How drafts are accepted at a temperature; 'coupled' repeats with the seed.",
    )


class GenerationBody(ProcessorFields, GrammarFields, StrictBody):
    """What both generating endpoints accept. ``null`` means the same as leaving a field out."""

    model: str
    n: int | None = Field(
        None, ge=1, lt=2**31, description="Choices per prompt; the first is what n=1 would give."
    )
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="-1 or 0 keeps the whole vocabulary.")
    seed: int | None = None
    stop: Stops = ()
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = Field(
        None, description="Add prompt_token_ids, and token_ids to every choice and chunk."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted, and not used; so are the next three.")
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Smaller goes first when requests have to wait."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Share cached prefixes only with requests that send the same.",
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    dflash: DFlashOptions | None = None

    @property
    def enables_thinking(self) -> bool | None:
        """Chats can switch thinking on or off; None says that nobody did."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token's log-probability; None reports nothing."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def wants_stats(self) -> bool:
        """Whether the response carries the ``dflash`` object."""
        return self.dflash is not None and bool(self.dflash.stats)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        options = self.stream_options
        return (
            options is not None and self.wants_usage_chunk and bool(options.continuous_usage_stats)
        )


class ChatMessage(StrictBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        None, description="What the assistant thought; templates may show it to the model."
    )

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, fields: object) -> object:
        if isinstance(fields, dict) and fields.get("tool_calls") and fields.get("content") is None:
            return {**fields, "content": ""}
        return fields

    def for_template(self) -> Json:
        """Return what chat templates read; ``developer`` is the newer name of ``system``."""
        message: Json = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ChatTemplateOptions(StrictBody):
    """What the chat template is given beside the messages."""

    enable_thinking: bool | None = Field(
        None, description="For templates that know thinking; it may also choose the drafter."
    )


class ChatCompletionBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: ChatTemplateOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: the answer ends with its first complete call."
    )

    @property
    def enables_thinking(self) -> bool | None:
        """Whether thinking is switched on or off; None: the request leaves it to the template."""
        options = self.chat_template_kwargs
        return None if options is None else options.enable_thinking

    @property
    def num_logprobs(self) -> int | None:
        """``top_logprobs``, if ``logprobs`` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """As asked for."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As asked for, or as many as an echoed prompt has to have."""
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs
