"""Bodies of ``/tokenize`` and ``/detokenize``, with vLLM's names."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gateway.base_schemas import StrictBody, problem
from gateway.schemas import ChatMessage, ChatTemplateOptions
from gateway.tool_schemas import Tool


class TokenizeBody(StrictBody):
    """Text or a conversation to encode as the generating endpoints would."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Around a prompt; true unless said otherwise. A template writes its own."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's turn; true unless said otherwise."
    )
    chat_template_kwargs: ChatTemplateOptions | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise problem("Send either prompt or messages")
        return self


class DetokenizeBody(StrictBody):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[int]
