"""Processors of packed rows against a naive implementation that sees one token at a time."""

from __future__ import annotations

import random

import pytest
import torch
from naive_processors import naive_process
from random_trees import path_of, random_tree

from dflash_wire.errors import FatalError
from dflash_wire.processors import Processors, RowExtras, SlotStart
from dflash_wire.records import Row
from verifier.acceptance import chain_parents, depths
from verifier.processors import ProcessedRow, process
from verifier.slots import SlotPool

pytestmark = pytest.mark.unit

VOCAB = 12
CPU = torch.device("cpu")


def random_processors(rng: random.Random) -> Processors:
    """Every processor is asked for half of the time."""

    def maybe(value: object, nothing: object) -> object:
        return value if rng.random() < 0.5 else nothing

    biased = rng.sample(range(VOCAB), rng.choice([0, 0, 1, 3]))
    words = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(4)]
    values = {
        "repetition_penalty": maybe(rng.choice([0.5, 1.3, 2.0]), 1.0),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "biased_token_ids": biased,
        "biases": [rng.uniform(-5, 5) for _ in biased],
        "bad_words": maybe(words[: rng.randint(1, 4)], []),
        "allowed_token_ids": maybe(rng.sample(range(VOCAB), rng.choice([1, 3, 6])), []),
        "min_tokens": maybe(rng.randint(0, 12), 0),
        "end_token_ids": rng.sample(range(VOCAB), rng.choice([0, 1, 2])),
    }
    return Processors(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(60))
def test_every_node_equals_the_naive_processors(seed: int, is_tree: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pool = SlotPool(VOCAB, CPU)
    rows, wanted = [], []
    num_rows = rng.randint(1, 4)
    sizes = [rng.randint(1, 7) for _ in range(num_rows)]
    logits = torch.randn(sum(sizes) + 3, VOCAB) * 3
    offset = 2  # rows of logits in front and behind belong to others
    for slot, size in enumerate(sizes):
        asked = random_processors(rng)
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
        num_prompt = rng.randint(1, len(tokens))
        # A prefill fills the slot, with some tokens in the row and the others in front of it.
        cut = rng.randrange(len(tokens))
        start = SlotStart(asked, num_prompt, tokens[:cut] if asked.reads_tokens else [])
        prefill = Row(slot, tokens[cut:], cut, [], extras=RowExtras(None, slot, start))
        filled = pool.of(prefill)
        assert filled is not None
        more = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
        filled.advance(more[:1])
        filled.advance(more[1:])
        tokens += more
        row = Row(slot, tokens[-1:], len(tokens) - 1, [], extras=RowExtras(None, slot))
        drafts = [rng.randrange(VOCAB) for _ in range(size - 1)]
        parents = random_tree(rng, size - 1) if is_tree else chain_parents(size - 1)
        found = pool.of(row)
        assert found is filled
        output = tokens[num_prompt:]
        rows.append(ProcessedRow(found, offset, len(output), drafts, parents, depths(parents)))
        for node in range(size):
            before = [*output, *path_of(node, drafts, parents)]
            values = logits[offset + node].tolist()
            wanted.append(naive_process(values, asked, tokens[:num_prompt], before))
        offset += size
    raw = logits.clone()
    got = process(logits, rows)
    assert torch.equal(logits, raw)
    assert torch.equal(got[2:offset], torch.tensor(wanted))
    assert torch.equal(got[:2], raw[:2]) and torch.equal(got[offset:], raw[offset:])


def test_half_precision_is_processed_in_32_bits() -> None:
    pool = SlotPool(VOCAB, CPU)
    asked = Processors(biased_token_ids=[3], biases=[1e-4])
    row = Row(0, [1, 2], 0, [], extras=RowExtras(None, 0, SlotStart(asked, 2, [])))
    slot = pool.of(row)
    assert slot is not None
    got = process(torch.ones(1, VOCAB, dtype=torch.bfloat16), [ProcessedRow(slot, 0, 0)])
    assert got.dtype == torch.float32 and got.argmax() == 3


def test_a_slot_that_missed_tokens_is_found_out() -> None:
    pool = SlotPool(VOCAB, CPU)
    asked = Processors(presence_penalty=1.0)
    plain = Row(7, [5], 4, [])
    assert pool.of(plain) is None
    verify = Row(7, [5], 4, [], extras=RowExtras(None, 1))
    with pytest.raises(FatalError, match="empty slot"):
        pool.of(verify)
    short = RowExtras(None, 1, SlotStart(asked, 2, [1, 2]))
    with pytest.raises(FatalError, match="4 of 5 tokens"):
        pool.of(Row(7, [3, 4], 3, [], extras=short))
    slot = pool.of(Row(7, [3, 4], 2, [], extras=short))
    assert slot is not None
    with pytest.raises(FatalError, match="at 5 tokens, its slot at 4"):
        pool.of(verify)
    slot.advance([5])
    assert pool.of(verify) is slot
