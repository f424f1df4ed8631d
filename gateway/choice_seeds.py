"""Seeds of the choices of one prompt, so that ``n`` changes nothing but how many there are."""

from __future__ import annotations

from hashlib import blake2b

SEED_RANGE = 2**63


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a prompt's ``choice``-th answer.

    Choice 0 has the request's own seed, so it is what ``n: 1`` gives. Any other has one that depends on
    the request's seed and its place alone: whoever sends it with ``n: 1`` gets that answer again.

    Args:
        seed: of the request, 0 <= seed < 2**63.
        choice: from 0.
    """
    if choice == 0:
        return seed
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEED_RANGE
