"""Drives a ``VerifierEngine`` the way the coordinator does, with books kept for the tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_ops.context_attention import ContextAttention
from dflash_ops.paging import PagedPool, PoolLayout
from dflash_ops.static_rows import BucketSizes
from dflash_wire.records import DraftResult, Row, StepPlan, StepResult
from dflash_wire.sampling import SamplingParams
from verifier.engine import VerifierEngine
from verifier.target import TargetModel

PAGE_SIZE = 4
FEATURE_BASE = 3


@dataclass
class Lane:
    """One sequence under test: committed tokens, pages, and the features written for it."""

    token_ids: list[int]
    page_ids: list[int]
    sampling: SamplingParams
    num_cached: int = 0
    features: list[Tensor] = field(default_factory=list)

    def prefill_row(self, num_tokens: int) -> Row:
        chunk = self.token_ids[self.num_cached : self.num_cached + num_tokens]
        samples = self.num_cached + len(chunk) == len(self.token_ids)
        return Row(
            0,
            chunk,
            self.num_cached,
            self.page_ids,
            is_prefill=True,
            samples=samples,
            sampling=self.sampling,
        )

    def verify_row(self, width: int) -> Row:
        assert self.num_cached == len(self.token_ids) - 1
        anchor = self.token_ids[-1:]
        return Row(0, anchor, self.num_cached, self.page_ids, width, sampling=self.sampling)

    def tree_row(self, width: int, draft_width: int) -> Row:
        return replace(self.verify_row(width), draft_width=draft_width, is_tree=True)


class Harness:
    """An engine whose pools start full of noise, so that a wrong read or write shows."""

    def __init__(
        self,
        path: Path,
        taps: list[int],
        num_pages: int = 40,
        seed: int = 0,
        form: ContextAttention | None = None,
        sizes: BucketSizes | None = None,
    ) -> None:
        torch.manual_seed(seed)
        cpu = torch.device("cpu")
        target = TargetModel(str(path), torch.float32, cpu)
        pool = PagedPool(
            target.num_layers,
            num_pages,
            PAGE_SIZE,
            target.num_kv_heads,
            target.head_dim,
            torch.float32,
            cpu,
            PoolLayout.BY_HEAD if form is None else PoolLayout.BY_PAGE,
        )
        pool.data.copy_(torch.randn(pool.data.shape) * 5.0)
        self.initial = pool.data.clone()
        features = torch.randn(96, len(taps) * target.hidden_size)
        self.engine = VerifierEngine(target, pool, features, taps, form=form)
        if sizes is not None:
            self.engine.use_static_passes(sizes, 0)
        self.step_id = 0
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    @property
    def pool(self) -> PagedPool:
        return self.engine.pool

    def lane(
        self, prompt: list[int], capacity: int = 64, sampling: SamplingParams | None = None
    ) -> Lane:
        pages = [self._free.pop() for _ in range(-(-capacity // PAGE_SIZE))]
        return Lane(list(prompt), pages, sampling or SamplingParams())

    def slots(self, lane: Lane) -> Tensor:
        """Slots of everything the pool must hold for the lane."""
        return self.pool.slots(lane.page_ids, 0, lane.num_cached)

    def step(
        self,
        entries: list[tuple[Lane, Row]],
        drafts: list[list[int]] | None = None,
        parents: list[list[int]] | None = None,
        scores: list[bytes] | None = None,
    ) -> StepResult:
        """Run one step, commit it to the lanes, and check that the features' other rows stay."""
        self.step_id += 1
        plan = StepPlan(self.step_id, [row for _, row in entries], [], FEATURE_BASE)
        ids = drafts if drafts is not None else [[] for _ in entries]
        before = self.engine.feature_pool.clone()
        drafts_of_step = DraftResult(self.step_id, ids, 1.5, parents, scores=scores)
        result = self.engine.run(plan, drafts_of_step)
        assert (result.step_id, result.draft_ms, result.error) == (self.step_id, 1.5, None)
        offset, written = FEATURE_BASE, []
        for (lane, row), tokens in zip(entries, result.committed_token_ids, strict=True):
            count = row.num_positions if row.is_prefill else len(tokens)
            places = list(range(offset, offset + count))
            lane.features += list(self.engine.feature_pool[places].clone())
            written += places
            lane.num_cached += count
            lane.token_ids += tokens
            offset += row.most_kept
        others = [i for i in range(before.shape[0]) if i not in written]
        assert torch.equal(self.engine.feature_pool[others], before[others])
        return result

    def prefill(self, lane: Lane, chunk: int = 1000) -> None:
        """Read the whole prompt in chunks; the last one commits a token."""
        target_length = len(lane.token_ids)
        while lane.num_cached < target_length:
            self.step([(lane, lane.prefill_row(chunk))])

    def decode(self, lane: Lane, count: int) -> None:
        """Plain decoding."""
        for _ in range(count):
            self.step([(lane, lane.verify_row(1))])

    def check_untouched(self, lanes: list[Lane]) -> None:
        """Bit for bit: nothing but committed positions has ever been written."""
        used = {slot for lane in lanes for slot in self.slots(lane).tolist()}
        assert len(used) == sum(lane.num_cached for lane in lanes)
        others = [slot for slot in range(self.pool.num_slots) if slot not in used]
        assert torch.equal(self.pool.data[:, others], self.initial[:, others])
        changed = (self.pool.data != self.initial).flatten(2).any(dim=2).all(dim=0)
        assert set(changed.nonzero()[:, 0].tolist()) == used
