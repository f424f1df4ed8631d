"""Log-probabilities as OpenAI writes them: a list of tokens in chats, parallel lists in text completions.

Every output token has one entry, the token that ended the answer too, so there are as many as
``completion_tokens``. They are the model's own, before penalties, temperature and the like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dflash_wire.processors import TokenLogprobs
from gateway.chat_tokenizer import ChatTokenizer

Json = dict[str, Any]

LEAST = -9999.0
"""JSON has no infinity."""


class TokenEntry(NamedTuple):
    """One output token and what is said about it."""

    token_id: int
    logprobs: TokenLogprobs


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: ChatTokenizer) -> Json:
    """Return a chat choice's ``logprobs``."""
    content = []
    for token_id, (logprob, top_ids, top_logprobs) in entries:
        top = [_chat_token(*pair, tokenizer) for pair in zip(top_ids, top_logprobs, strict=True)]
        content.append({**_chat_token(token_id, logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: ChatTokenizer) -> Json:
    data = tokenizer.token_bytes(token_id)
    text = data.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}


class CompletionLogprobs:
    """Builds text completions' ``logprobs`` piece by piece. Owner: one choice.

    ``text_offset`` counts characters of the tokens' own texts from the beginning of the output on.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(self, entries: Sequence[TokenEntry]) -> Json:
        """Return the next entries' ``logprobs``. Mutates."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for token_id, (logprob, top_ids, top_logprobs) in entries:
            text = self._text(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            # Tokens may read alike: the likeliest of them counts. The chosen one is always there.
            top: dict[str, float] = {}
            for other_id, other in zip(top_ids, top_logprobs, strict=True):
                top.setdefault(self._text(other_id), max(other, LEAST))
            top.setdefault(text, max(logprob, LEAST))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprobs.logprob, LEAST) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")
