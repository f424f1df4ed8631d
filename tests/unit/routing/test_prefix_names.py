"""Names of a prompt's beginnings."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefix_names import NAME_BYTES, boundaries, prefix_names, split_names
from gateway.routing.recent_names import MAX_NAMES, RecentNames

pytestmark = pytest.mark.unit

PAGE = 4
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def names(token_ids: list[int], salt: str = "") -> list[bytes]:
    return split_names(prefix_names(token_ids, salt, PAGE))


def test_boundaries_are_dense_first_and_then_four_per_doubling() -> None:
    assert list(islice(boundaries(), 20)) == [
        *range(1, 9),
        *(10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    ]


@pytest.mark.parametrize(("num_tokens", "num_names"), [(0, 0), (4, 0), (5, 1), (33, 8), (41, 9)])
def test_a_name_for_each_boundary_before_the_last_token(num_tokens: int, num_names: int) -> None:
    assert len(names(list(range(num_tokens)))) == num_names


@given(TOKENS, TOKENS, TOKENS)
def test_names_are_shared_as_far_as_tokens_are(
    head: list[int], tail: list[int], other: list[int]
) -> None:
    mine, theirs = names(head + tail), names(head + other)
    num_alike = next(
        (i for i, (a, b) in enumerate(zip(head + tail, head + other, strict=False)) if a != b),
        min(len(head + tail), len(head + other)),
    )
    num_pages = min(num_alike, len(head + tail) - 1, len(head + other) - 1) // PAGE
    num_shared = sum(1 for b in islice(boundaries(), 50) if b <= num_pages)
    assert mine[:num_shared] == theirs[:num_shared]
    assert not set(mine[num_shared:]) & set(theirs[num_shared:])


def test_salts_share_nothing() -> None:
    prompt = list(range(100))
    salted = [set(names(prompt, salt)) for salt in ("", "a", "b", "a\x00")]
    assert sum(map(len, salted)) == len(set.union(*salted))


def test_a_broken_tail_is_dropped() -> None:
    whole = prefix_names(list(range(50)), "", PAGE)
    assert split_names(whole + b"xyz") == split_names(whole)


def test_recent_names_keep_the_latest_of_each() -> None:
    recent = RecentNames()
    recent.add(prefix_names(list(range(50)), "", PAGE))
    first = recent.packed()
    for salt in range(200):
        recent.add(prefix_names(list(range(50)), str(salt), PAGE))
        recent.add(first)
    assert len(recent.packed()) == MAX_NAMES * NAME_BYTES
    assert recent.packed().endswith(first)
