"""Known parameters that are not implemented: a 400 that names them, never silence.

A value that asks for nothing (``best_of: 1``, ``typical_p: 1``, ``null``) is accepted. Fields that
nobody knows are accepted too, and reported in the ``X-DFlash-Ignored-Fields`` header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from gateway.errors import UnsupportedParameterError
from gateway.schemas import ChatCompletionBody, GenerationBody

IGNORED_FIELDS_HEADER = "X-DFlash-Ignored-Fields"
MAX_LISTED_FIELDS = 20
MAX_FIELD_CHARS = 64

Neutral = tuple[Any, ...]
"""Values of a parameter that ask for nothing; ``None`` always does, and is not listed."""

_BOTH: dict[str, Neutral] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "suffix": ("",),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "logits_processors": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": ("",),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "lora_path": (),
    "lora_name": (),
    "lora_request": (),
    "adapter_id": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_CHAT: dict[str, Neutral] = {
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (False,),
}
_COMPLETION: dict[str, Neutral] = {"add_special_tokens": (True,), "top_logprobs": (0,)}
_MESSAGE: dict[str, Neutral] = {
    "function_call": (),
    "audio": (),
    "refusal": ("",),
}
_STRUCTURED_OUTPUTS: dict[str, Neutral] = {
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "whitespace_pattern": (),
}
_STREAM_OPTIONS: dict[str, Neutral] = {
    "include_obfuscation": (False,),
}


def check_parameters(body: GenerationBody) -> list[str]:
    """Refuse what is known but not implemented; return the fields that are ignored.

    Raises:
        UnsupportedParameterError: a known parameter has a value that asks for something.
    """
    ignored: list[str] = []
    for prefix, extras, known in _places(body):
        for name, value in extras.items():
            if name not in known:
                ignored.append(prefix + name)
            elif not is_neutral(value, known[name]):
                place = prefix + name[:MAX_FIELD_CHARS]  # options of templates have any name
                raise UnsupportedParameterError(refusal(place, known[name]), place)
    return list(dict.fromkeys(ignored))


def _places(
    body: GenerationBody,
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Neutral]]]:
    """Yield every object of the body with the name before its fields and what is known there."""
    is_chat = isinstance(body, ChatCompletionBody)
    yield "", body.extras, _BOTH | (_CHAT if is_chat else _COMPLETION)
    if body.stream_options is not None:
        yield "stream_options.", body.stream_options.extras, _STREAM_OPTIONS
    if body.structured_outputs is not None:
        yield "structured_outputs.", body.structured_outputs.extras, _STRUCTURED_OUTPUTS
    if body.response_format is not None:
        yield "response_format.", body.response_format.extras, {}
    if isinstance(body, ChatCompletionBody):
        if body.chat_template_kwargs is not None:
            options = body.chat_template_kwargs.extras
            yield "chat_template_kwargs.", options, dict.fromkeys(options, ())
        for index, message in enumerate(body.messages):
            yield f"messages[{index}].", message.extras, _MESSAGE
        for index, tool in enumerate(body.tools or []):
            yield f"tools[{index}].", tool.extras, {}
            yield f"tools[{index}].function.", tool.function.extras, {}


def is_neutral(value: object, neutral: Neutral) -> bool:
    """Whether ``value`` asks for nothing."""
    if value is None:
        return True
    # True == 1 in Python, but ``n: true`` and ``logprobs: 0`` are not what was meant.
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def refusal(name: str, neutral: Neutral) -> str:
    """Say that a parameter is not supported, and which values are."""
    if not neutral:
        return f"{name} is not supported by this server; leave it out."
    allowed = " or ".join(repr(item) for item in neutral)
    return f"{name} is not supported by this server; leave it out or send {allowed}."


def ignored_fields_header(ignored: list[str]) -> dict[str, str]:
    """Return the header that lists ``ignored``, escaped and bounded, or nothing."""
    if not ignored:
        return {}
    listed = [quote(name[:MAX_FIELD_CHARS], safe="[]") for name in ignored[:MAX_LISTED_FIELDS]]
    if len(ignored) > MAX_LISTED_FIELDS:
        listed.append(f"+{len(ignored) - MAX_LISTED_FIELDS}")
    return {IGNORED_FIELDS_HEADER: ", ".join(listed)}
