"""JSON Schemas of what the HTTP API answers, for ``/openapi.json``; what may be missing is not required."""

from __future__ import annotations

from pydantic.json_schema import JsonSchemaValue

Schema = JsonSchemaValue

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object"}


def an_object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Return an object that has all of ``required`` and may have more."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def a_list(item: Schema) -> Schema:
    """Return an array of ``item``."""
    return {"type": "array", "items": item}


def or_null(schema: Schema) -> Schema:
    """Return ``schema`` or null."""
    return {"anyOf": [schema, NULL]}


def constant(value: str) -> Schema:
    """Return the string ``value`` and no other."""
    return {"type": "string", "const": value}


def one_of(*values: str) -> Schema:
    """Return one string of ``values``."""
    return {"type": "string", "enum": list(values)}


def ref(name: str) -> Schema:
    """Return a reference to one of ``COMPONENTS``."""
    return {"$ref": f"#/components/schemas/{name}"}


IDS = a_list(COUNT)
FINISH = or_null(one_of("stop", "length", "tool_calls"))
PROMPT_LOGPROBS = a_list(
    or_null(
        {
            "type": "object",
            "additionalProperties": an_object(
                {"logprob": NUMBER, "rank": or_null(COUNT), "decoded_token": TEXT}
            ),
        }
    )
)
_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": IDS}
_CALL = an_object(
    {
        "id": TEXT,
        "type": constant("function"),
        "function": an_object({"name": TEXT, "arguments": TEXT}),
    }
)
_MESSAGE = an_object(
    {"role": constant("assistant"), "content": or_null(TEXT)},
    {"refusal": NULL, "reasoning_content": TEXT, "tool_calls": a_list(_CALL)},
)
_HEAD: dict[str, Schema] = {
    "id": TEXT,
    "created": WHOLE,
    "model": TEXT,
    "system_fingerprint": TEXT,
}
_USAGE: dict[str, Schema] = {"usage": ref("Usage")}
_COUNTS: dict[str, Schema] = {
    "prompt_tokens": COUNT,
    "completion_tokens": COUNT,
    "total_tokens": COUNT,
}
_MORE: dict[str, Schema] = {
    "dflash": {"anyOf": [ref("Statistics"), a_list(ref("Statistics"))]},
    "prompt_token_ids": IDS,
    "prompt_logprobs": PROMPT_LOGPROBS,
}
_CHAT_LOGPROBS = or_null(
    an_object({"content": a_list(an_object({**_TOKEN, "top_logprobs": a_list(an_object(_TOKEN))}))})
)
_CHAT_CHOICE = an_object(
    {"index": COUNT, "message": _MESSAGE, "finish_reason": FINISH, "logprobs": _CHAT_LOGPROBS},
    {"token_ids": IDS},
)
_DELTA = an_object(
    {},
    {
        "role": constant("assistant"),
        "content": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": a_list(
            an_object(
                {"index": COUNT, "function": an_object({"arguments": TEXT}, {"name": TEXT})},
                {"id": TEXT, "type": constant("function")},
            )
        ),
    },
)
_CHUNK_CHOICE = an_object(
    {"index": COUNT, "delta": _DELTA, "finish_reason": FINISH, "logprobs": _CHAT_LOGPROBS},
    {"token_ids": IDS},
)
_TEXT_CHOICE = an_object(
    {
        "index": COUNT,
        "text": TEXT,
        "finish_reason": FINISH,
        "logprobs": or_null(
            an_object(
                {
                    "tokens": a_list(TEXT),
                    "token_logprobs": a_list(or_null(NUMBER)),
                    "top_logprobs": a_list(
                        or_null({"type": "object", "additionalProperties": NUMBER})
                    ),
                    "text_offset": a_list(COUNT),
                }
            )
        ),
    },
    {"token_ids": IDS, "prompt_token_ids": IDS, "prompt_logprobs": PROMPT_LOGPROBS},
)
_ITEM = an_object(
    {
        "id": TEXT,
        "type": one_of("message", "reasoning", "function_call"),
        "status": one_of("completed", "incomplete"),
    },
    {"content": a_list(an_object({"type": TEXT, "text": TEXT}))},
)

COMPONENTS: dict[str, Schema] = {
    "Error": an_object(
        {
            "error": an_object(
                {
                    "message": TEXT,
                    "type": one_of(
                        "invalid_request_error",
                        "authentication_error",
                        "not_found_error",
                        "rate_limit_error",
                        "server_error",
                    ),
                    "param": or_null(TEXT),
                    "code": TEXT,
                }
            )
        }
    ),
    "Usage": an_object(
        {**_COUNTS, "prompt_tokens_details": an_object({"cached_tokens": COUNT})},
        {"completion_tokens_details": an_object({"reasoning_tokens": COUNT})},
    ),
    "Statistics": an_object(
        {
            "policy": TEXT,
            "drafter": TEXT,
            "seed": COUNT,
            "num_cycles": COUNT,
            "num_draft_tokens": COUNT,
            "num_accepted_drafts": COUNT,
            "acceptance_length": or_null(NUMBER),
            "committed_per_cycle": IDS,
            "draft_ms": NUMBER,
            "verify_ms": NUMBER,
            "overhead_ms": NUMBER,
        },
        {"sampling": constant("rejection")},
    ),
    "ChatCompletion": an_object(
        {
            **_HEAD,
            **_USAGE,
            "object": constant("chat.completion"),
            "choices": a_list(_CHAT_CHOICE),
        },
        _MORE,
    ),
    "ChatCompletionChunk": an_object(
        {**_HEAD, "object": constant("chat.completion.chunk"), "choices": a_list(_CHUNK_CHOICE)},
        {**_MORE, "usage": or_null(an_object(_COUNTS))},
    ),
    "Completion": an_object(
        {
            **_HEAD,
            **_USAGE,
            "object": constant("text_completion"),
            "choices": a_list(_TEXT_CHOICE),
        },
        _MORE,
    ),
    "CompletionChunk": an_object(
        {**_HEAD, "object": constant("text_completion"), "choices": a_list(_TEXT_CHOICE)},
        {**_MORE, "usage": or_null(an_object(_COUNTS))},
    ),
    "ResponseChunk": an_object({"type": TEXT}, {"sequence_number": COUNT}),
    "Response": an_object(
        {
            "id": TEXT,
            "object": constant("response"),
            "created_at": WHOLE,
            "status": one_of("completed", "incomplete"),
            "incomplete_details": or_null(an_object({"reason": TEXT})),
            "model": TEXT,
            "output": a_list(_ITEM),
            "usage": an_object(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": an_object({"cached_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": an_object({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            ),
        },
        {"dflash": ref("Statistics")},
    ),
    "Model": an_object(
        {
            "id": TEXT,
            "object": constant("model"),
            "created": WHOLE,
            "owned_by": TEXT,
            "max_model_len": COUNT,
        }
    ),
    "Models": an_object({"object": constant("list"), "data": a_list(ref("Model"))}),
    "Tokens": an_object(
        {"count": COUNT, "max_model_len": COUNT, "tokens": IDS}, {"token_strs": a_list(TEXT)}
    ),
    "Text": an_object({"prompt": TEXT}),
    "Load": an_object(
        {
            "server_load": COUNT,
            "engine_groups": a_list(
                an_object(
                    {
                        "group": TEXT,
                        "num_running": COUNT,
                        "num_waiting": COUNT,
                        "num_outstanding_tokens": COUNT,
                    }
                )
            ),
        }
    ),
    "Status": an_object({"status": one_of("ok", "ready")}),
    "Version": an_object({"version": TEXT}),
    "Trace": an_object({"traceEvents": a_list(ANY_OBJECT)}),
    "Decisions": {"type": "object", "additionalProperties": a_list(TEXT)},
    "Policy": an_object({"policy": TEXT, "engine_groups": COUNT}),
}
