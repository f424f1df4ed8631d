"""Short names of a prompt's beginnings, so that a router can tell who has seen one.

A name stands for everything up to a *boundary*, salt included. Boundaries are the same for every prompt, so
prompts that begin alike have the same names as far as they are alike. There is one after each of the first
eight pages, then four per doubling: a prompt of 2,000 tokens has 23 names, one of a million 59, and what a
prompt shares is known to a quarter of its length or better.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

NAME_BYTES = 8
"""Two prompts in 2**64 share a name by chance; then one goes to a group that does not know it."""


def boundaries() -> Iterator[int]:
    """Yield the boundaries in pages, without end: 1, 2, …, 8, 10, 12, 14, 16, 20, …"""
    pages = 1
    while True:
        yield pages
        pages += max(1, 1 << (pages.bit_length() - 3)) if pages > 4 else 1


def prefix_names(token_ids: Sequence[int], salt: str, page_size: int) -> bytes:
    """Return the names of the prompt's beginnings, shortest first, ``NAME_BYTES`` each.

    Args:
        token_ids: the prompt. Its last token never counts: a cached prefix ends before it.
        salt: prompts with different salts have no name in common.
        page_size: tokens per page.
    """
    num_pages = (len(token_ids) - 1) // page_size
    tokens = array("I", token_ids)
    salted = salt.encode()
    # With its length in front, a salt cannot be mistaken for tokens.
    digest = blake2b(len(salted).to_bytes(4, "little") + salted, digest_size=NAME_BYTES)
    names, start = bytearray(), 0
    for boundary in boundaries():
        if boundary > num_pages:
            return bytes(names)
        digest.update(tokens[start * page_size : boundary * page_size])
        names += digest.copy().digest()
        start = boundary
    raise AssertionError("boundaries never end")


def split_names(names: bytes) -> list[bytes]:
    """Return the single names, shortest beginning first. A broken tail is dropped."""
    whole = len(names) - len(names) % NAME_BYTES
    return [names[at : at + NAME_BYTES] for at in range(0, whole, NAME_BYTES)]
