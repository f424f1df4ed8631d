"""Sampling by rejection: texts have the target's exact distribution, whatever drafts and widths."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch
from naive_processors import candidates
from torch import Tensor
from toy_grammars import tag
from xgrammar import CompiledGrammar

from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_wire.errors import FatalError
from dflash_wire.proposals import packed_proposals, unpacked_proposals
from dflash_wire.sampling import SamplingParams
from drafter.proposals import sample_drafts
from verifier.acceptance import accept, chain_parents
from verifier.grammars import GrammarPool, vocabulary
from verifier.matching import GrammarMatch
from verifier.packing import replaced_proposals
from verifier.rejection import choose_by_rejection

pytestmark = pytest.mark.unit

Widths = Callable[[tuple[int, ...]], int]

VOCAB = 4
END = 3
LENGTH = 3
NUM_SEEDS = 2500


@lru_cache
def toy_logits(kind: int, prefix: tuple[int, ...]) -> Tensor:
    """A model over four tokens: ``kind`` 0 is the target, others are drafters, which know no tokens."""
    known = prefix if kind == 0 else (len(prefix),)
    generator = torch.Generator().manual_seed(hash((kind, known)) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 1.5


def cycles(
    all_params: list[SamplingParams],
    prefix: tuple[int, ...],
    width: int,
    drafter: int,
    grammar: CompiledGrammar | None = None,
) -> list[list[int]]:
    """One draft and verify behind ``prefix`` for every request; the position is its length."""
    count, place, num_drafts = len(all_params), len(prefix), width - 1
    drafts: list[list[int]] = [[] for _ in all_params]
    packed = [b""] * count
    if num_drafts:
        slots = torch.stack([toy_logits(drafter, (*prefix, *[0] * i)) for i in range(num_drafts)])
        runs = [
            SamplingRun(i * num_drafts, (i + 1) * num_drafts, place, params)
            for i, params in enumerate(all_params)
        ]
        sampled = sample_drafts(slots.repeat(count, 1), runs)
        drafts, packed = [d.token_ids for d in sampled], [d.proposals for d in sampled]
    removed = torch.zeros(count * width, VOCAB, dtype=torch.bool)
    if grammar is not None:
        for i, ids in enumerate(drafts):
            walk = matched(grammar, prefix).walk(ids, chain_parents(num_drafts), True)
            removed[i * width : (i + 1) * width] = ~walk.legal
            packed[i] = replaced_proposals(packed[i], ids, walk.draft_token_ids)
            drafts[i] = walk.draft_token_ids
    rows = [toy_logits(0, (*prefix, *ids[:i])) for ids in drafts for i in range(width)]
    logits = torch.stack(rows).masked_fill(removed, -torch.inf)
    runs = [
        SamplingRun(i * width, (i + 1) * width, place, params)
        for i, params in enumerate(all_params)
    ]
    chosen = choose_tokens(logits, runs).tolist()
    committed = []
    for run, ids, proposals in zip(runs, drafts, packed, strict=True):
        mine = chosen[run.start : run.end]
        if ids:
            found = choose_by_rejection(logits, run, ids, unpacked_proposals(proposals))
            mine[:num_drafts] = found
        committed.append(accept(ids, mine, chain_parents(len(ids))).token_ids)
    return committed


def adversarial(prefix: tuple[int, ...]) -> int:
    """Widths by what was committed, as wild as history allows."""
    return 1 + (3 * sum(prefix) + len(prefix)) % 4


def fixed(prefix: tuple[int, ...]) -> int:
    return 4


def plain(prefix: tuple[int, ...]) -> int:
    return 1


def matched(grammar: CompiledGrammar, prefix: tuple[int, ...]) -> GrammarMatch:
    match = GrammarMatch(grammar, VOCAB, [END])
    match.advance(prefix)
    return match


def exact(
    params: SamplingParams, grammar: CompiledGrammar | None = None
) -> dict[tuple[int, ...], float]:
    """Probability of every text of the target."""
    chances = {}
    for text in product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token_id in enumerate(text):
            scores = [x / params.temperature for x in toy_logits(0, text[:i]).tolist()]
            if grammar is not None:
                if chance == 0.0:
                    break
                legal = matched(grammar, text[:i]).walk((), ()).legal[0].tolist()
                scores = [x if legal[j] else -math.inf for j, x in enumerate(scores)]
            kept = candidates(scores, params)
            total = sum(math.exp(scores[j]) for j in kept)
            chance *= math.exp(scores[token_id]) / total if token_id in kept else 0.0
        chances[text] = chance
    return chances


def texts(
    params: SamplingParams,
    seeds: Iterable[int],
    widths: Widths,
    drafter: int,
    grammar: CompiledGrammar | None = None,
) -> dict[int, tuple[int, ...]]:
    """The first tokens of every seed's text."""
    found: dict[int, tuple[int, ...]] = {}
    running = {(): list(seeds)}  # by what they have committed
    while running:
        prefix, some = running.popitem()
        mine = [replace(params, seed=seed, rejects=True) for seed in some]
        committed = cycles(mine, prefix, widths(prefix), drafter, grammar)
        for seed, tokens in zip(some, committed, strict=True):
            text = (*prefix, *tokens)
            if len(text) < LENGTH:
                running.setdefault(text, []).append(seed)
            else:
                found[seed] = text[:LENGTH]
    return found


def chi_square_limit(freedom: int) -> float:
    """The 99.9 % quantile (Wilson-Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


PARTLY_FORCED = 'root ::= "a" "b" [abc] | "b" [abc] "c" | "c" [ab] "a" | "ca" "c"'
"""Texts of three letters."""


def three_letters() -> CompiledGrammar:
    pool = GrammarPool(lambda: vocabulary([b"a", b"b", b"c", b""], [END]))
    return pool.compile(tag({"type": "grammar", "grammar": PARTLY_FORCED}))


@pytest.mark.parametrize("is_guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("widths", [fixed, adversarial, plain])
@pytest.mark.parametrize(
    ("params", "drafter"),
    [
        (SamplingParams(1.0), 1),
        (SamplingParams(0.7, 0.9), 2),
        (SamplingParams(1.3, 1.0, 3, min_p=0.05), 1),
    ],
    ids=["hot", "top-p", "top-k"],
)
def test_texts_have_the_targets_distribution(
    params: SamplingParams, drafter: int, widths: Widths, is_guided: bool
) -> None:
    grammar = three_letters() if is_guided else None
    seen = Counter(texts(params, range(NUM_SEEDS), widths, drafter, grammar).values())
    expected = exact(params, grammar)
    assert {text for text, chance in expected.items() if chance == 0}.isdisjoint(seen)
    frequent = [text for text, chance in expected.items() if chance * NUM_SEEDS >= 5]
    statistic = sum(
        (seen[t] - NUM_SEEDS * expected[t]) ** 2 / (NUM_SEEDS * expected[t]) for t in frequent
    )
    rest = 1 - sum(expected[t] for t in frequent)
    if rest * NUM_SEEDS >= 5:
        others = NUM_SEEDS - sum(seen[t] for t in frequent)
        statistic += (others - NUM_SEEDS * rest) ** 2 / (NUM_SEEDS * rest)
    assert statistic < chi_square_limit(len(frequent))


@pytest.mark.parametrize("widths", [fixed, adversarial])
def test_p_values_are_uniform(widths: Widths) -> None:
    """200 groups of requests, a chi-square of the last tokens of each; Kolmogorov-Smirnov distance."""
    params, size = SamplingParams(1.0), 50
    drawn = texts(params, range(200 * size), widths, 1)
    marginal = [0.0] * VOCAB
    for text, chance in exact(params).items():
        marginal[text[-1]] += chance
    p_values = []
    for group in range(200):
        last = Counter(drawn[seed][-1] for seed in range(group * size, (group + 1) * size))
        x = sum((last[t] - size * p) ** 2 / (size * p) for t, p in enumerate(marginal))
        # The upper tail of chi-square with three degrees of freedom.
        tail = math.erfc(math.sqrt(x / 2)) + math.sqrt(2 * x / math.pi) * math.exp(-x / 2)
        p_values.append(tail)
    p_values.sort()
    distance = max(abs((i + 0.5) / 200 - p) + 0.5 / 200 for i, p in enumerate(p_values))
    assert distance < 1.95 / math.sqrt(200)  # 0.1 %


def test_more_is_accepted_than_by_equality() -> None:
    """The point of it: min(1, p/q) of independent draws, where equality of such draws is far rarer."""
    torch.manual_seed(2)
    target = torch.randn(1, 50)
    drafted = target + 0.2 * torch.randn(1, 50)
    num_kept = num_equal = 0
    for seed in range(400):
        params = SamplingParams(1.0, seed=seed, rejects=True)
        run = SamplingRun(0, 1, 9, params)
        (draft,) = sample_drafts(drafted, [run])
        proposals = unpacked_proposals(draft.proposals)
        (chosen,) = choose_by_rejection(target, run, draft.token_ids, proposals)
        num_kept += chosen == draft.token_ids[0]
        num_equal += int(choose_tokens(target, [run])[0]) == draft.token_ids[0]
    overlap = torch.minimum(target.softmax(-1), drafted.softmax(-1)).sum().item()
    assert num_kept / 400 == pytest.approx(overlap, abs=0.05)
    assert num_equal < 0.3 * num_kept


def test_drafts_come_from_the_likeliest_tokens_and_proposals_add_up() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 500)
    runs = [
        SamplingRun(0, 2, 5, SamplingParams(1.0, seed=1)),
        SamplingRun(2, 3, 9, SamplingParams(0.5, 0.5, 10)),
    ]
    drafts = sample_drafts(logits, runs)
    sizes = []
    for draft, run in zip(drafts, runs, strict=True):
        proposals = unpacked_proposals(draft.proposals)
        assert len(proposals) == len(draft.token_ids) == run.end - run.start
        for row, (token_id, proposal) in enumerate(zip(draft.token_ids, proposals, strict=True)):
            sizes.append(len(proposal.token_ids))
            assert token_id in proposal.token_ids
            assert sum(proposal.probabilities) == pytest.approx(1, abs=1e-6)
            top = logits[run.start + row].topk(len(proposal.token_ids)).indices.tolist()
            assert sorted(proposal.token_ids) == sorted(top)
        assert packed_proposals(proposals) == draft.proposals
    assert sizes[:2] == [64, 64] and 1 <= sizes[2] <= 10
    assert unpacked_proposals(b"") == []


def test_drafts_without_proposals_are_an_error() -> None:
    run = SamplingRun(0, 2, 5, SamplingParams(1.0))
    with pytest.raises(FatalError, match="0 proposals for 1 drafts"):
        choose_by_rejection(torch.zeros(2, 4), run, [1], [])


def test_drafts_of_a_drafter_without_any_token_do_not_count() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    chosen = []
    for seed in range(400):
        params = SamplingParams(1.0, 0.9, seed=seed, rejects=True)
        run = SamplingRun(0, 1, 3, params)
        (draft,) = sample_drafts(torch.full((1, 4), -torch.inf), [run])
        proposals = unpacked_proposals(draft.proposals)
        assert proposals[0].token_ids == []
        chosen += choose_by_rejection(logits, run, draft.token_ids, proposals)
        assert chosen[-1] == int(choose_tokens(logits, [run])[0])
    assert len(set(chosen)) > 1


def test_a_draft_of_no_chance_is_replaced_by_another_token() -> None:
    rng = random.Random(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    for seed in range(50):
        run = SamplingRun(0, 2, rng.randrange(99), SamplingParams(1.0, seed=seed))
        proposals = unpacked_proposals(packed_proposals([([3], [1.0])]))  # type: ignore[list-item]
        assert choose_by_rejection(logits, run, [3], proposals)[0] != 3
