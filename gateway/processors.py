"""From a body's fields to what the engine is asked to change about the model's logits."""

from __future__ import annotations

from dflash_wire.errors import InvalidRequestError
from dflash_wire.processors import Processors
from gateway.schemas import GenerationBody
from gateway.state import GatewaySettings


def check_processors(body: GenerationBody, settings: GatewaySettings) -> None:
    """Check what depends on the model, and how fields fit together.

    Raises:
        InvalidRequestError: a token id is outside the vocabulary, a word is empty, or no token may come.
    """
    for param in ("logit_bias", "allowed_token_ids"):
        token_ids = getattr(body, param) or ()
        if any(not 0 <= token_id < settings.vocab_size for token_id in token_ids):
            raise InvalidRequestError(
                f"{param}: token ids must be from 0 to {settings.vocab_size - 1}.", param
            )
    if any(not word.strip() for word in body.bad_words or ()):
        raise InvalidRequestError("bad_words: a word must not be empty.", "bad_words")


def check_min_tokens(body: GenerationBody, max_tokens: int) -> None:
    """Raise ``InvalidRequestError`` if more tokens are demanded than there may be."""
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {body.min_tokens}, but the output may have {max_tokens} tokens at most.",
            "min_tokens",
        )


def request_processors(
    body: GenerationBody, stop_token_ids: list[int], settings: GatewaySettings
) -> Processors | None:
    """Return what the body asks for, without bad words; None if that is nothing."""
    repetition_penalty = body.repetition_penalty
    if repetition_penalty is None:
        repetition_penalty = settings.sampling.repetition_penalty
    min_tokens = (body.min_tokens or 0) if stop_token_ids else 0
    biases = {t: bias for t, bias in (body.logit_bias or {}).items() if bias}
    asked = Processors(
        repetition_penalty=repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        biased_token_ids=list(biases),
        biases=list(biases.values()),
        allowed_token_ids=sorted(set(body.allowed_token_ids or ())),
        min_tokens=min_tokens,
        end_token_ids=stop_token_ids if min_tokens else [],
    )
    return None if asked == Processors() else asked
