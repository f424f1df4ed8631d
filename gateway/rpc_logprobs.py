"""Log-probabilities in gRPC's messages: the same numbers as over HTTP, by token id."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from dflash_wire.processors import TokenLogprobs
from dflash_wire.v1 import generation_pb2 as pb
from gateway.chat_tokenizer import ChatTokenizer
from gateway.details import TokenEntry
from gateway.generation import TextPieces
from gateway.logprobs import finite
from gateway.preparation import Prepared


def entry_messages(
    entries: Sequence[TokenEntry], tokenizer: ChatTokenizer
) -> list[pb.TokenLogprob]:
    """Return what is told of output tokens."""
    return [_message(*entry, tokenizer) for entry in entries]


def prompt_messages(
    prepared: Prepared, said: Sequence[TokenLogprobs], tokenizer: ChatTokenizer
) -> list[pb.TokenLogprob]:
    """Return what is told of the prompt; ``said`` is about its tokens from the second on."""
    request = prepared.plans[0].request
    most = request.num_prompt_logprobs or 0
    told = [
        TokenLogprobs(logprob, top_ids[:most], top_logprobs[:most])
        for logprob, top_ids, top_logprobs in said
    ]
    pairs = zip(request.prompt_token_ids, [None, *told], strict=True)
    return [_message(*pair, tokenizer) for pair in pairs]


def _message(
    token_id: int, said: TokenLogprobs | None, tokenizer: ChatTokenizer
) -> pb.TokenLogprob:
    message = pb.TokenLogprob(token_id=token_id, token=tokenizer.token_bytes(token_id))
    if said is not None:
        message.logprob = finite(said.logprob)
        for other, logprob in zip(said.top_token_ids, said.top_logprobs, strict=True):
            token = tokenizer.token_bytes(other)
            message.top.add(token_id=other, token=token, logprob=finite(logprob))
    return message


class ToldLogprobs:
    """What a whole answer's pieces say about tokens, kept while they pass. Owner: one call."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._entries: list[list[TokenEntry]] = [[] for _ in prepared.plans]
        self._prompt: Sequence[TokenLogprobs] | None = None

    async def passing(self, pieces: TextPieces) -> TextPieces:
        """Yield ``pieces`` as they are. Mutates."""
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.detail is not None:
                    self._entries[piece.choice_index] += piece.detail.logprobs
                    if piece.choice_index == 0 and piece.detail.prompt_logprobs is not None:
                        self._prompt = piece.detail.prompt_logprobs
                yield piece

    def add_to(self, response: pb.GenerateResponse, tokenizer: ChatTokenizer) -> None:
        """Write all of it into ``response``. Mutates that."""
        for choice, entries in zip(response.choices, self._entries, strict=True):
            choice.logprobs.extend(entry_messages(entries, tokenizer))
        if self._prompt is not None:
            told = prompt_messages(self._prepared, self._prompt, tokenizer)
            response.prompt_logprobs.extend(told)
        first = self._prepared.plans[0]
        if first.returns_token_ids:
            response.prompt_token_ids.extend(first.request.prompt_token_ids)
