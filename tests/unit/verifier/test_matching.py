"""Where a sequence stands in its grammar: along chains and trees, at its end, and back again."""

from __future__ import annotations

import random

import pytest
from random_trees import path_of
from toy_grammars import (
    END,
    GRAMMARS,
    TOKENS,
    follows,
    legal_tokens,
    spelled,
    tag,
    toy_pool,
)

from dflash_wire.errors import FatalError, InvalidRequestError
from verifier import matching
from verifier.grammars import GrammarPool
from verifier.matching import GrammarMatch, depth_first

pytestmark = pytest.mark.unit

VOCAB = len(TOKENS)


@pytest.fixture(scope="module")
def pool() -> GrammarPool:
    return toy_pool()


def match(pool: GrammarPool, grammar: str) -> GrammarMatch:
    return GrammarMatch(pool.compile(grammar), VOCAB, pool.end_token_ids)


def drafts_of(rng: random.Random, grammar: str, output: list[int], parents: list[int]) -> list[int]:
    """Drafts of which most are legal where they stand."""
    drafts: list[int] = []
    for parent in parents:
        legal = legal_tokens(grammar, output + path_of(parent, drafts, parents))
        drafts.append(rng.choice([*sorted(legal), *sorted(legal), rng.randrange(VOCAB)]))
    return drafts


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_node_has_what_its_own_path_allows(
    name: str, is_tree: bool, pool: GrammarPool
) -> None:
    grammar, rng = GRAMMARS[name], random.Random(name)
    for _ in range(5):
        matched, output = match(pool, grammar), list[int]()
        for _ in range(3):
            parents = [rng.randint(0, j) if is_tree else j for j in range(rng.randint(0, 7))]
            drafts = drafts_of(rng, grammar, output, parents)
            walk = matched.walk(drafts, parents)
            for node in range(len(parents) + 1):
                path = path_of(node, walk.draft_token_ids, parents)
                steps = [legal_tokens(grammar, output + path[:i]) for i in range(len(path) + 1)]
                if any(token not in legal for token, legal in zip(path, steps, strict=False)):
                    continue  # cannot be accepted
                assert set(walk.legal[node].nonzero()[:, 0].tolist()) == steps[-1]
                assert (node in walk.forced) == (len(steps[-1]) == 1)
            for j, pair in enumerate(zip(drafts, walk.draft_token_ids, strict=True)):
                assert (j + 1 in walk.written) == (pair[0] != pair[1])
                path = output + path_of(parents[j], walk.draft_token_ids, parents)
                if j + 1 in walk.written and follows(grammar, path):
                    assert pair[1] in legal_tokens(grammar, path), "what is written is legal"
            committed = [rng.choice(sorted(legal_tokens(grammar, output)))]
            matched.advance(committed)
            output += committed


def test_forced_tokens_replace_drafts_as_far_as_they_go(pool: GrammarPool) -> None:
    matched = match(pool, tag({"type": "regex", "pattern": '(ab|ba)c"x'}))
    walk = matched.walk([0, 9, 9, 9, 9], [0, 1, 2, 3, 4])
    c, quote, x = TOKENS.index(b"c"), TOKENS.index(b'"'), TOKENS.index(b"x")
    assert walk.draft_token_ids == [0, TOKENS.index(b"b"), c, quote, x]
    assert walk.forced == {1, 2, 3, 4, 5}
    assert walk.written == {2, 3, 4, 5}


def test_an_illegal_draft_gives_way_to_the_only_text(pool: GrammarPool) -> None:
    """A text of several spellings: its tokens are not forced, but they are a good guess."""
    matched = match(pool, GRAMMARS["forced"])
    x = TOKENS.index(b"x")
    walk = matched.walk([x, x, x, x], [0, 1, 2, 3])
    assert b"".join(TOKENS[t] for t in walk.draft_token_ids) == b"abbabaab"[:8]
    assert walk.written == {1, 2, 3, 4}
    assert walk.forced == frozenset()
    # A legal draft stays, and what it spells goes on.
    walk = matched.walk([TOKENS.index(b"a"), x, x], [0, 1, 2])
    assert walk.written == {2, 3}
    assert spelled(walk.draft_token_ids).startswith("ab")
    # In a tree every node goes its own way.
    walk = matched.walk([TOKENS.index(b"a"), x, x], [0, 0, 1])
    assert walk.written == {2, 3}


def test_a_token_against_the_grammar_is_our_mistake(pool: GrammarPool) -> None:
    with pytest.raises(FatalError, match="against its grammar"):
        match(pool, GRAMMARS["letters"]).advance([TOKENS.index(b"x")])


def test_behind_the_end_only_ends_follow(pool: GrammarPool) -> None:
    matched = match(pool, GRAMMARS["choice"])
    matched.advance([TOKENS.index(b"c"), END])
    assert matched.is_over
    matched.advance([END])
    walk = matched.walk([END, 0], [0, 1])
    assert walk.legal.nonzero().tolist() == [[0, END], [1, END], [2, END]]
    assert walk.draft_token_ids == [END, END]


def test_a_walk_that_takes_too_long_is_the_last(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = match(pool, GRAMMARS["letters"])
    monkeypatch.setattr(matching, "MOST_WALK_S", -1.0)
    assert matched.walk([], []).legal.sum() > 1
    matched.advance([TOKENS.index(b"b")])
    assert matched.walk([], []).legal.nonzero().tolist() == [[0, END]]


def test_only_the_latest_grammars_are_kept() -> None:
    pool = GrammarPool(toy_pool()._load, most_bytes=1)
    first = pool.compile(GRAMMARS["letters"])
    assert pool.compile(GRAMMARS["letters"]) is first, "the latest is kept whatever it takes"
    pool.compile(GRAMMARS["record"])
    pool.compile(GRAMMARS["letters"])
    assert pool.num_compiled == 3


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "regex", "pattern": "(a"}, "parenthesis"),
        ({"type": "grammar", "grammar": "root ::= x"}, '"x" is not defined'),
        ({"type": "nonsense"}, "nonsense"),
    ],
)
def test_what_is_no_grammar_is_refused(
    form: dict[str, object], reason: str, pool: GrammarPool
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        pool.compile(tag(form))
    assert ".cc" not in refusal.value.message


def test_a_tree_is_walked_subtree_by_subtree() -> None:
    assert depth_first([0, 0, 1, 3, 2, 1]) == [0, 1, 3, 4, 6, 2, 5]
    assert depth_first([0, 1, 2]) == [0, 1, 2, 3]
