"""Text from byte-level tokens: a table and an incremental UTF-8 decoder, one step for a whole chunk.

Qwen, Llama 3 and most newer models have such tokenizers. Every token stands for fixed bytes there, whatever
is around it, so a chunk needs no decoder of the tokenizer's.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it stands for; ids that the tokenizer does not know stand for none."""

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise OverflowError(f"token id {token_id} is negative")
        return b""


def token_bytes(tokenizer: Tokenizer, special_ids: Collection[int]) -> TokenBytes | None:
    """Return the table of a byte-level tokenizer; None for any other kind.

    Args:
        special_ids: tokens without text.
    """
    if not isinstance(tokenizer.decoder, ByteLevel):
        return None
    byte_of = _bytes_by_character()
    table = TokenBytes()
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes(byte_of[character] for character in token)
        except KeyError:
            table[token_id] = token.encode()  # an added token is written as it reads
    table.update(dict.fromkeys(special_ids, b""))
    return table


def _bytes_by_character() -> dict[str, int]:
    """Return how byte-level vocabularies write bytes: printable ones as they are, others from 256 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


class ByteDetokenizer:
    """Incremental decoding of one sequence of byte-level tokens. Owner: one sequence.

    What has come out after a token depends on the tokens alone, not on how they were grouped. A character
    whose bytes are spread over several tokens comes out with the last of them.
    """

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._held = b""
        """The beginning of a character."""

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, which may be empty."""
        return self.push_all((token_id,))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        data = self._held + b"".join(map(self._table.__getitem__, token_ids))
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text

    def flush(self) -> str:
        """Return incomplete bytes as replacement characters and start afresh."""
        text = self._held.decode(errors="replace")
        self._held = b""
        return text
