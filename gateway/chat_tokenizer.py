"""The model's tokenizer as the gateway needs it: chat template, encoding, detokenizers.

Encoding uses the Rust tokenizer directly: it is not changed after construction, so calls from
several threads cannot disturb each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_wire.errors import ConfigError, ContextLengthError, InvalidRequestError
from gateway.byte_detokenize import ByteDetokenizer, TokenBytes, token_bytes
from gateway.detokenize import Detokenizer, StreamDetokenizer

INLINE_CHARS = 4096
"""Longest text that is encoded on the event loop (about a millisecond); longer goes to a thread."""

Result = TypeVar("Result")
Json = dict[str, Any]
Message = dict[str, Any]
"""What a chat template reads of a turn."""


class ChatTokenizer:
    """Text to token ids and back.

    Args:
        tokenizer: a ``transformers`` tokenizer with a Rust backend.

    Raises:
        ConfigError: the tokenizer has no Rust backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"{type(tokenizer).__name__} has no tokenizer.json behind it; convert the model's "
                "tokenizer to the fast format."
            )
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        # A token's name is as long as the text it stands for, or longer (bytes of one character).
        self._longest_token = max(map(len, backend.get_vocab()))
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._token_bytes = token_bytes(backend, self._special_ids)
        self._shown_bytes: dict[frozenset[str], TokenBytes] = {}

    @classmethod
    def load(cls, path: str | Path) -> ChatTokenizer:
        """Load ``tokenizer.json`` and its configuration from a model folder; never the network.

        Raises:
            ConfigError: the folder holds no tokenizer that can be loaded.
        """
        try:
            # NOTE: AutoTokenizer would import torch, which costs a gateway seconds and hundreds of
            # megabytes, and some model classes rebuild what tokenizer.json already says.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Cannot load a tokenizer from {path}: {error}") from error
        return cls(tokenizer)

    def check_length(self, num_chars: int, max_tokens: int, param: str) -> None:
        """Refuse text that is too long whatever its tokens are, before it costs time.

        Raises:
            ContextLengthError: ``num_chars`` characters cannot be ``max_tokens`` tokens or fewer.
        """
        if num_chars > max_tokens * self._longest_token:
            raise ContextLengthError(
                f"The prompt has {num_chars} characters, more than this model's context of "
                f"{max_tokens} tokens can hold; shorten it.",
                param,
            )

    async def encode_chat(
        self,
        messages: Sequence[Message],
        enables_thinking: bool | None = None,
        tools: Sequence[Json] = (),
        begins_answer: bool = True,
    ) -> list[int]:
        """Render the chat template and encode it.

        Args:
            messages: the conversation.
            enables_thinking: the template's ``enable_thinking``; None leaves it undefined.
            tools: the template's ``tools``.
            begins_answer: end ready for the assistant's turn.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        num_chars = sum(
            len(message["content"]) + len(message.get("reasoning_content", ""))
            for message in messages
        )
        if tools or any("tool_calls" in message for message in messages):
            num_chars = INLINE_CHARS + 1  # of any length; a thread costs less than to find out
        return await _run(
            num_chars,
            lambda: self._encode_chat(messages, enables_thinking, tools, begins_answer),
        )

    async def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encode plain prompts, with the special tokens that the model expects around them."""
        num_chars = sum(len(text) for text in texts)
        return await _run(num_chars, lambda: self._encode(texts, add_special_tokens))

    def encode_plain(self, text: str) -> list[int]:
        """Encode a short text as it stands, without special tokens around it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for, taken by itself; special tokens as they are written."""
        if self._token_bytes is not None and token_id not in self._special_ids:
            return self._token_bytes[token_id]
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, special tokens included."""
        ids = list(token_ids)
        return await _run(
            len(ids), lambda: str(self._backend.decode(ids, skip_special_tokens=False))
        )

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary writes each token; empty for ids that it does not have."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def new_detokenizer(self, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """Return a detokenizer for one sequence.

        Args:
            shown: special tokens that come out as text; others stand for none.
        """
        if self._token_bytes is not None:
            return ByteDetokenizer(self._shown_table(self._token_bytes, shown))
        texts = {token_id: text for text, token_id in self._special_ones(shown)}
        return StreamDetokenizer(self._backend, self._special_ids, texts)

    def ends_with(self, token_ids: Sequence[int], marker: str) -> bool:
        """Whether a prompt's last text, white space aside, is ``marker``."""
        # No token is shorter than a byte, so these are enough.
        tail = self._backend.decode(list(token_ids[-2 * len(marker) :]), skip_special_tokens=False)
        return bool(tail.rstrip().endswith(marker))

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, all of them if it has several; None if it has none."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            return "\n".join(template.values())
        return template or None

    def _special_ones(self, shown: Iterable[str]) -> list[tuple[str, int]]:
        found = ((text, self._backend.token_to_id(text)) for text in shown)
        return [(text, token_id) for text, token_id in found if token_id in self._special_ids]

    def _shown_table(self, table: TokenBytes, shown: frozenset[str]) -> TokenBytes:
        if not shown:
            return table
        made = self._shown_bytes.get(shown)
        if made is None:
            special = self._special_ones(shown)
            made = table
            if special:
                made = TokenBytes(table)
                made.update({token_id: text.encode() for text, token_id in special})
            self._shown_bytes[shown] = made
        return made

    def render(
        self,
        messages: Sequence[Message],
        enables_thinking: bool | None = None,
        tools: Sequence[Json] = (),
        begins_answer: bool = True,
    ) -> str:
        """Return the prompt text of ``messages``; see ``encode_chat``."""
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        if enables_thinking is not None:
            options["enable_thinking"] = enables_thinking
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.", "messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=begins_answer, **options
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error
        return str(text)

    def _encode_chat(
        self,
        messages: Sequence[Message],
        enables_thinking: bool | None = None,
        tools: Sequence[Json] = (),
        begins_answer: bool = True,
    ) -> list[int]:
        # The template has written the special tokens already.
        text = self.render(messages, enables_thinking, tools, begins_answer)
        (token_ids,) = self._encode([text], add_special_tokens=False)
        return token_ids

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The batch form lets go of the interpreter while it works; the single one freezes the event loop.
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]


async def _run(num_chars: int, work: Callable[[], Result]) -> Result:
    if num_chars <= INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)
