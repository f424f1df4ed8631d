"""Prompt lookup: which place is found, and what is drafted from it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from drafter_helpers import PAGE_SIZE, page_tables, verify_row

from dflash_wire.errors import FatalError
from dflash_wire.records import Ingest, StepPlan
from drafter.ngram import NgramDrafter, NgramSettings, look_up

pytestmark = pytest.mark.unit


def drafts(text: list[int], count: int = 4, least: int = 2, most: int = 8) -> tuple[list[int], int]:
    return tuple(look_up(np.array(text, dtype=np.int32), count, NgramSettings(least, most)))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5], ([], 0)),
        ([1, 2, 3, 4], ([], 0)),
        ([1, 2, 9, 2], ([], 0)),  # one token alone is no match
        ([1, 2, 3, 4, 5, 1, 2], ([3, 4, 5, 1], 2)),
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], ([4, 9, 1, 2], 2)),  # the later of two
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], ([3, 8, 1, 2], 3)),  # the longer before the later
        ([4, 4], ([], 0)),
        ([4, 4, 4], ([4, 4, 4, 4], 2)),  # repeats itself as far as is asked
        ([1, 2, 1, 2, 1], ([2, 1, 2, 1], 3)),
    ],
)
def test_known_texts(text: list[int], expected: tuple[list[int], int]) -> None:
    assert drafts(text) == expected


def test_bounds_of_a_match() -> None:
    text = [1, 2, 9, 2]
    assert drafts(text, least=1) == ([9, 2, 9, 2], 1)
    # Both places are alike in two tokens, which is as good as it gets: the later counts.
    text = [7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert drafts(text, most=2) == ([4, 7, 1, 2], 2)
    assert drafts(text, least=3) == ([3, 8, 1, 2], 3)
    assert drafts(text, least=4) == ([], 0)


def slow_look_up(text: list[int], count: int, least: int, most: int) -> list[int]:
    """The same, place by place."""
    best, where = 0, -1
    last = len(text) - 1
    for end in range(last):
        length = 0
        while length <= end and length < most and text[end - length] == text[last - length]:
            length += 1
        if length >= max(best, least):
            best, where = length, end
    if where < 0:
        return []
    longer = list(text)
    for i in range(count):
        longer.append(longer[where + 1 + i])
    return longer[len(text) :]


def test_texts_at_random() -> None:
    rng = random.Random(1)
    num_found = 0
    for _ in range(3000):
        text = [rng.randrange(rng.choice((2, 3, 8))) for _ in range(rng.randint(1, 40))]
        least = rng.randint(1, 4)
        most = rng.randint(least, 6)
        count = rng.randint(1, 9)
        found, _ = drafts(text, count, least, most)
        assert found == slow_look_up(text, count, least, most)
        num_found += bool(found)
    assert num_found > 1000


def test_history_lies_in_pages_that_plans_name() -> None:
    drafter = NgramDrafter(NgramSettings(), 32, PAGE_SIZE)
    first, second = page_tables(2)
    text = [1, 2, 3, 4, 5, 6, 7, 1]
    drafter.run(StepPlan(0, [], [Ingest(0, 5, 0, first, token_ids=text[:5])]))
    drafter.run(StepPlan(1, [], [Ingest(9, 3, 5, first, token_ids=text[5:])]))
    slots = [first[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(8)]
    assert drafter.history.reshape(-1)[slots].tolist() == text
    assert drafter.run(StepPlan(2, [verify_row(2, 8, first, 4)])).draft_token_ids == [[3, 4, 5]]
    assert drafter.run(StepPlan(2, [verify_row(2, 8, second, 4)])).draft_token_ids == [[]]


def test_an_ingest_must_tell_its_tokens() -> None:
    drafter = NgramDrafter(NgramSettings(), 32, PAGE_SIZE)
    for token_ids in (None, [1, 2]):
        with pytest.raises(FatalError, match="position 4 does not tell its tokens"):
            drafter.run(StepPlan(0, [], [Ingest(0, 3, 4, [0, 1], token_ids=token_ids)]))
