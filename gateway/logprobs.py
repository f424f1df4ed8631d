"""Log-probabilities as OpenAI writes them: a list of tokens in chats, parallel lists in text completions.

Every output token has one entry, the token that ended the answer too, so there are as many as
``completion_tokens``; the tokens of an echoed prompt come before them. They are the model's own, before
penalties, temperature and the like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dflash_wire.processors import TokenLogprobs
from gateway.chat_tokenizer import ChatTokenizer
from gateway.details import TokenEntry

Json = dict[str, Any]

LEAST = -9999.0
"""JSON has no infinity."""


def finite(logprob: float) -> float:
    """Return ``logprob`` as JSON can say it; of logits that are no numbers too."""
    return logprob if logprob > LEAST else LEAST


class LogprobsWriter(Protocol):
    """Writes one choice's log-probabilities, piece by piece. Owner: one choice."""

    def __init__(self, tokenizer: ChatTokenizer) -> None: ...

    def of(self, entries: Sequence[TokenEntry]) -> Json:
        """Return the next entries' ``logprobs``. Mutates."""


class ChatLogprobs:
    """Of chats: every token is an object."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, entries: Sequence[TokenEntry]) -> Json:
        """Return the next entries' ``logprobs``."""
        content = []
        for token_id, said in entries:
            if said is None:
                continue  # no prompt is echoed in chats
            logprob, top_ids, top_logprobs = said
            pairs = zip(top_ids, top_logprobs, strict=True)
            top = [self._token(*pair) for pair in pairs]
            content.append({**self._token(token_id, logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """Of text completions: parallel lists.

    ``text_offset`` counts characters of the tokens' own texts from the beginning of the output on.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(self, entries: Sequence[TokenEntry]) -> Json:
        """Return the next entries' ``logprobs``. Mutates."""
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, said in entries:
            text = self._text(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            logprobs.append(None if said is None else finite(said.logprob))
            tops.append(None if said is None else self._top(text, said))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, text: str, said: TokenLogprobs) -> dict[str, float]:
        # Tokens may read alike: the likeliest of them counts. The chosen one is always there.
        top: dict[str, float] = {}
        for token_id, logprob in zip(said.top_token_ids, said.top_logprobs, strict=True):
            top.setdefault(self._text(token_id), finite(logprob))
        top.setdefault(text, finite(said.logprob))
        return top

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def prompt_logprobs(
    token_ids: Sequence[int], said: Sequence[TokenLogprobs], num_top: int, tokenizer: ChatTokenizer
) -> list[Json | None]:
    """Return ``prompt_logprobs`` as vLLM writes them: by token id; nothing about the first token.

    Args:
        token_ids: the prompt.
        said: of its tokens from the second on.
        num_top: alternatives to show; the token itself is always there, its rank if it is one of them.
    """
    result: list[Json | None] = [None]
    for token_id, (logprob, top_ids, top_logprobs) in zip(token_ids[1:], said, strict=True):
        entry: Json = {}
        for rank, other in enumerate(top_ids[:num_top]):
            entry[str(other)] = _ranked(other, top_logprobs[rank], rank + 1, tokenizer)
        entry.setdefault(str(token_id), _ranked(token_id, logprob, None, tokenizer))
        result.append(entry)
    return result


def _ranked(token_id: int, logprob: float, rank: int | None, tokenizer: ChatTokenizer) -> Json:
    text = tokenizer.token_bytes(token_id).decode(errors="replace")
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
