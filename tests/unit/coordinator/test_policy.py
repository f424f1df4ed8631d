"""Block policies and width clipping."""

from __future__ import annotations

import pytest

from dflash_wire.errors import InvalidRequestError
from dflash_wire.records import GenerationStats
from gateway.coordinator import parse_policy
from gateway.coordinator.policy import cycle_width


@pytest.mark.parametrize(
    ("text", "width"), [("off", 1), ("static:2", 2), ("static:8", 8), ("static:16", 16)]
)
def test_known_policies(text: str, width: int) -> None:
    policy = parse_policy(text, 16)
    assert policy.name == text
    assert policy.width(GenerationStats(), 3) == width
    assert policy.may_draft == (width > 1)


@pytest.mark.parametrize(
    ("text", "width"), [("static-tree:2", 2), ("static-tree:16", 16), ("static-tree:64", 64)]
)
def test_trees(text: str, width: int) -> None:
    policy = parse_policy(text, 16)
    assert (policy.name, policy.is_tree, policy.may_draft) == (text, True, True)
    assert policy.width(GenerationStats(), 3) == width
    assert not parse_policy("static:4", 16).is_tree


@pytest.mark.parametrize(
    "text",
    ["static-tree:1", "static-tree:65", "static-tree:0", "static-tree:", "static-tree", "tree:8"],
)
def test_no_trees(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="'static-tree:<n>' with n from 2 to 64"):
        parse_policy(text, 16)


def test_a_tree_fits_a_step_and_needs_a_draft_block() -> None:
    assert parse_policy("static-tree:20", 16, 20).name == "static-tree:20"
    with pytest.raises(InvalidRequestError, match="n from 2 to 20"):
        parse_policy("static-tree:21", 16, 20)
    with pytest.raises(InvalidRequestError):
        parse_policy("static-tree:4", 1)


@pytest.mark.parametrize(
    "text",
    [
        *("static:1", "static:17", "static:0", "static:-4", "static:99999999999999999999"),
        *("static:", "static:4 ", "static:٤", "static", "OFF", "", "Adaptive"),
    ],
)
def test_unknown_policies(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="from 2 to 16") as caught:
        parse_policy(text, 16)
    assert caught.value.param == "dflash.policy"


@pytest.mark.parametrize(
    ("policy_width", "num_remaining", "width"),
    [
        *((1, 1, 1), (1, 9, 1), (2, 1, 1), (2, 2, 2), (8, 1, 1), (8, 2, 3)),
        *((8, 6, 7), (8, 7, 8), (8, 8, 8), (8, 100, 8)),
    ],
)
def test_width_near_the_end(policy_width: int, num_remaining: int, width: int) -> None:
    assert cycle_width(policy_width, num_remaining) == width
