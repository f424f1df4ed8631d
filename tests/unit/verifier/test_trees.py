"""Trees through the verifier: whatever the drafter sends, the output is that of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import save_target
from verifier_harness import Harness, Lane

from dflash_wire.errors import FatalError
from dflash_wire.records import DraftResult, Row, StepPlan
from dflash_wire.sampling import SamplingParams
from dflash_wire.trees import TreeOutcome, packed_scores
from verifier.acceptance import depths

pytestmark = pytest.mark.unit

TAPS = [1, 0]
VOCAB = 64
PROMPT = [7, 3, 60, 21, 21, 0, 44, 13, 9, 30, 2]
NUM_NEW = 30
SAMPLINGS = (SamplingParams(), SamplingParams(0.9, 0.95, 20, seed=12))

Tree = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, vocab_size=VOCAB)
    return folder


class Truths(dict[SamplingParams, Lane]):
    """Plain decoding of every kind, with the features that it left."""

    def __repr__(self) -> str:
        return "truths"  # hypothesis prints what a test was given


@pytest.fixture(scope="module")
def truths(path: Path) -> Truths:
    lanes = Truths()
    for sampling in SAMPLINGS:
        plain = Harness(path, TAPS)
        lane = plain.lane(PROMPT, sampling=sampling)
        plain.prefill(lane)
        plain.decode(lane, NUM_NEW)
        lanes[sampling] = lane
    return lanes


@st.composite
def hostile_trees(draw: st.DrawFn, most_nodes: int, most_depth: int) -> list[tuple[int, Any]]:
    """Parents in any shape, and for each node the truth of its depth, a wrong token, or its twin's."""
    levels, nodes = [0], []
    for j in range(draw(st.integers(0, most_nodes))):
        shallow = [node for node in range(j + 1) if levels[node] < most_depth]
        parent = draw(st.sampled_from([shallow[-1], *shallow]))
        levels.append(levels[parent] + 1)
        token = draw(st.sampled_from(["right", "right", "twin"]) | st.integers(0, VOCAB - 1))
        nodes.append((parent, token))
    return nodes


def filled_in(nodes: list[tuple[int, Any]], truth: list[int]) -> Tree:
    parents = [parent for parent, _ in nodes]
    levels, token_ids = depths(parents), []
    for j, (parent, token) in enumerate(nodes):
        if token == "twin":  # the same token as the sibling before it, if there is one
            twins = [t for p, t in zip(parents, token_ids, strict=False) if p == parent]
            token = twins[-1] if twins else "right"
        token_ids.append(truth[levels[j + 1] - 1] if token == "right" else token)
    return token_ids, parents


def right_path(tree: Tree, truth: list[int]) -> int:
    """How far the truth can be followed; of equal siblings the first one counts."""
    nodes = list(zip(tree[1], tree[0], strict=True))
    node = level = 0
    while (node, truth[level]) in nodes:
        node = nodes.index((node, truth[level])) + 1
        level += 1
    return level


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SAMPLINGS),
    st.integers(3, 9),
    st.lists(hostile_trees(13, 2), min_size=4, max_size=4),
    st.integers(0, 99),
)
def test_any_tree_gives_the_output_of_plain_decoding(
    path: Path,
    truths: Truths,
    sampling: SamplingParams,
    chunk: int,
    trees: list[list[tuple[int, Any]]],
    seed: int,
) -> None:
    """Beside other rows; features and pools are as if nothing had been drafted."""
    reference = truths[sampling]
    truth = reference.token_ids
    harness = Harness(path, TAPS, seed=seed)
    lane = harness.lane(PROMPT, sampling=sampling)
    other = harness.lane(PROMPT[::-1] * 4, sampling=sampling)
    harness.prefill(lane)
    for step, nodes in enumerate(trees):
        ahead = truth[len(lane.token_ids) :]
        tree = filled_in(nodes, ahead)
        entries = [(lane, lane.tree_row(14, 3))]
        drafts, parents = [tree[0]], [tree[1]]
        if other.num_cached < len(other.token_ids) - chunk:
            place = (seed + step) % 2
            entries.insert(place, (other, other.prefill_row(chunk)))
            drafts.insert(place, [])
            parents.insert(place, [])
        result = harness.step(entries, drafts, parents)
        mine = [entry[0] for entry in entries].index(lane)
        num_right = right_path(tree, ahead)
        assert result.committed_token_ids[mine] == ahead[: num_right + 1]
        assert result.trees is not None
        outcome = result.trees[mine]
        assert outcome is not None and outcome.num_nodes == len(nodes)
        assert [tree[0][node] for node in outcome.accepted_nodes] == ahead[:num_right]
        assert all(t is None for i, t in enumerate(result.trees) if i != mine)
    assert lane.token_ids == truth[: len(lane.token_ids)]
    for got, expected in zip(lane.features, reference.features, strict=False):
        assert (got - expected).abs().max() < 2e-5
    harness.check_untouched([lane, other])


def prefilled(path: Path) -> tuple[Harness, Lane]:
    harness = Harness(path, TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane)
    return harness, lane


@pytest.mark.parametrize(
    ("name", "parents", "marks", "num_accepted"),
    [
        ("nothing", [], "", 0),
        ("one node", [0], "r", 1),
        ("one long chain", [0, 1, 2, 3, 4], "rrrrr", 5),
        ("dead branches", [0, 0, 0, 2, 2], "wwrww", 1),
        ("right grandchild of a wrong child", [0, 1, 2], "wrr", 0),
        ("all alike", [0] * 6, "rrrrrr", 1),
        ("the truth behind a twin without children", [0, 0, 2], "rrr", 1),
        ("two whole branches, the second one right", [0, 0, 1, 2, 3, 4], "wrrrrr", 3),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_shapes(
    path: Path,
    truths: Truths,
    name: str,
    parents: list[int],
    marks: str,
    num_accepted: int,
) -> None:
    harness, lane = prefilled(path)
    truth = truths[SAMPLINGS[0]].token_ids
    ahead = truth[len(lane.token_ids) :]
    levels = depths(parents)[1:]
    drafts = [
        (ahead[level - 1] + (mark == "w")) % VOCAB
        for level, mark in zip(levels, marks, strict=True)
    ]
    scores = packed_scores([-0.5 * level for level in levels])
    result = harness.step([(lane, lane.tree_row(9, 6))], [drafts], [parents], [scores])
    assert result.committed_token_ids == [ahead[: num_accepted + 1]]
    (outcome,) = result.trees or [None]
    assert isinstance(outcome, TreeOutcome)
    assert (outcome.num_nodes, outcome.scores) == (len(parents), scores)
    assert len(outcome.accepted_nodes) == num_accepted
    harness.decode(lane, 6)
    assert lane.token_ids == truth[: len(lane.token_ids)]
    harness.check_untouched([lane])


def test_chains_and_trees_share_a_step(path: Path, truths: Truths) -> None:
    """Rows behind a tree that is smaller than planned: their tokens, pages and features are their own."""
    harness = Harness(path, TAPS, num_pages=80)
    lanes = [harness.lane(PROMPT, sampling=sampling) for sampling in SAMPLINGS[::-1] * 2]
    for lane in lanes:
        harness.prefill(lane)
    prompt = harness.lane([*range(20)])
    for _ in range(5):
        ahead = [truths[lane.sampling].token_ids[len(lane.token_ids) :] for lane in lanes]
        rows = [lanes[0].tree_row(20, 4), lanes[1].verify_row(4), lanes[2].tree_row(3, 8)]
        rows.append(lanes[3].verify_row(1))
        drafts = [
            [99 % VOCAB, ahead[0][0], ahead[0][1], ahead[0][2]],
            [*ahead[1][:2], ahead[1][2] ^ 1],
            ahead[2][:1],
            [],
        ]
        drafts[0][0] = ahead[0][0] ^ 1
        parents = [[0, 0, 2, 3], [], [0], []]
        entries = list(zip(lanes, rows, strict=True))
        if prompt.num_cached < 15:
            entries.insert(1, (prompt, prompt.prefill_row(3)))
            drafts.insert(1, [])
            parents.insert(1, [])
        committed = harness.step(entries, drafts, parents).committed_token_ids
        assert [len(committed[i]) for i in (0, -3, -2, -1)] == [4, 3, 2, 1]
    for lane in lanes:
        reference = truths[lane.sampling]
        assert lane.token_ids == reference.token_ids[: len(lane.token_ids)]
        for got, expected in zip(lane.features, reference.features, strict=False):
            assert (got - expected).abs().max() < 2e-5
    harness.check_untouched([*lanes, prompt])


@pytest.mark.parametrize(
    ("drafts", "parents"),
    [
        ([1, 2, 3, 4], [0, 1, 2, 3]),  # a path behind the last page
        ([1, 2, 3, 4], []),  # the same, as a chain
        ([1] * 9, [0] * 9),  # more nodes than planned
        ([1, 2], [0, 2]),  # its own parent
        ([1, 2], [0, -1]),
        ([1, 2], [0]),
    ],
)
def test_what_is_no_planned_tree_is_refused(
    path: Path, drafts: list[int], parents: list[int]
) -> None:
    harness, lane = prefilled(path)
    plan = StepPlan(9, [lane.tree_row(9, 4)])
    before = harness.pool.data.clone()
    with pytest.raises(FatalError):
        harness.engine.run(plan, DraftResult(9, [drafts], parents=[parents]))
    assert (harness.pool.data == before).all()
    harness.engine.run(plan, DraftResult(9, [drafts[:3]], parents=[[0, 1, 2][: len(drafts)]]))


def test_a_row_without_drafts_needs_no_tree() -> None:
    """Of one planned position is nothing to verify, so a last token is a plain row."""
    row = Row(0, [5], 8, [0, 1, 2], width=1, draft_width=16)
    assert (row.drafted_width, row.most_kept, row.num_positions) == (1, 1, 1)
