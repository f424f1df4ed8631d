"""Request fields that change the model's logits: OpenAI's, and vLLM's where OpenAI has none."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from gateway.base_schemas import problem

MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BIAS = 100.0


def _biases(value: object) -> dict[int, float] | None:
    """Return ``logit_bias`` with numbers as keys."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise problem("must be an object of token ids and numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise problem(f"at most {MAX_BIASED_TOKENS} tokens are possible, not {len(value)}")
    return {_token_id(key): _bias(bias) for key, bias in value.items()}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise problem(f"{key[:20]!r} is no token id")
    return int(key)


def _bias(bias: object) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:  # type: ignore[operator]
        raise problem(f"a bias must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return float(bias)  # type: ignore[arg-type]


LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


class ProcessorFields(BaseModel):
    """Fields of both generating endpoints."""

    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: LogitBias = None
    bad_words: list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_BIASED_TOKENS)
    min_tokens: int | None = Field(None, ge=0)
