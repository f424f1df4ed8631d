"""A random target with drafters that know the answers, more or less: every acceptance length occurs."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from local_engines import Collector, run
from tiny_models import save_target
from toy_grammars import toy_pool

from dflash_ops.paging import PagedPool
from dflash_wire.ports import EngineLimits
from dflash_wire.records import DraftResult, GenerationRequest, Row, StepPlan
from dflash_wire.trees import packed_scores
from gateway.coordinator import Coordinator
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from services.local import LocalRing
from verifier.engine import VerifierEngine
from verifier.target import TargetModel

VOCAB = 32
BLOCK = 16
LIMITS = EngineLimits(
    num_pages=11,
    page_size=4,
    max_step_positions=64,
    max_rows=3,
    max_context=48,
    max_draft_block_size=BLOCK,
)


class OracleDrafter:
    """Drafts the known answer, with mistakes.

    Args:
        requests: in the order in which they were submitted.
        answers: their outputs; behind their ends anything is drafted.
        accuracy: probability of each token to be the answer's.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        answers: Sequence[list[int]],
        accuracy: float,
        seed: int,
    ) -> None:
        self._rng = random.Random(seed)
        self._texts = [r.prompt_token_ids + a for r, a in zip(requests, answers, strict=True)]
        self._accuracy = accuracy

    def run(self, plan: StepPlan) -> DraftResult:
        result = DraftResult.nothing(plan)
        for i, row in enumerate(plan.rows):
            if row.width == 1:
                continue
            if row.is_tree:
                result.add_tree(i, *self._tree(row))
            else:
                places = range(row.start_position + 1, row.start_position + row.width)
                result.draft_token_ids[i] = [self._guess(row, place) for place in places]
        return result

    def _guess(self, row: Row, place: int) -> int:
        text = self._texts[row.seq_id]
        if place < len(text) and self._rng.random() < self._accuracy:
            return text[place]
        return self._rng.randrange(VOCAB)

    def _tree(self, row: Row) -> tuple[list[int], list[int], bytes]:
        token_ids: list[int] = []
        parents: list[int] = []
        depths = [0]
        for _ in range(self._rng.randint(1, row.width - 1)):
            open_nodes = [n for n, depth in enumerate(depths) if depth + 1 < row.most_kept]
            parent = max(self._rng.choices(open_nodes, k=2))
            token_ids.append(self._guess(row, row.start_position + depths[parent] + 1))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return token_ids, parents, packed_scores([-1.0 * i for i in range(len(token_ids))])


class RandomWidths(BlockScheduler):
    """Any draft width each step, any verify widths within it."""

    def __init__(self, seed: int) -> None:
        of = build_scheduler(BLOCK)
        super().__init__(of.survival, of.cost, of.table)
        self._rng = random.Random(seed)

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        draft_width = self._rng.randint(1, BLOCK)
        left = load.max_positions - len(rows)
        widths = []
        for row in rows:
            widths.append(self._rng.randint(1, min(draft_width, row.max_width, left + 1)))
            left -= widths[-1] - 1
        return Decision(0, draft_width, widths, 1.0, 1.0, "speculate", "any")


class OraclePair:
    """The target, its engine, and coordinators over them."""

    def __init__(self, path: Path, seed: int = 0, **target_values: Any) -> None:
        torch.set_num_threads(1)
        self.path = path
        values = {"vocab_size": VOCAB, "num_layers": 2, "seed": seed, **target_values}
        self.model: Any = save_target(path, **values)
        target = TargetModel(str(path), torch.float32, torch.device("cpu"))
        features = torch.zeros(2 * LIMITS.max_step_positions, target.hidden_size)
        pool = self.pool_for(target)
        self.verifier = VerifierEngine(target, pool, features, [0], grammars=toy_pool())

    @staticmethod
    def pool_for(target: TargetModel) -> PagedPool:
        """A KV pool of ``LIMITS``."""
        return PagedPool(
            target.num_layers,
            LIMITS.num_pages,
            LIMITS.page_size,
            target.num_kv_heads,
            target.head_dim,
            target.dtype,
            target.device,
        )

    def over(self, verifier: VerifierEngine) -> OraclePair:
        """The same pair with another engine for its target."""
        other = copy.copy(self)
        other.verifier = verifier
        return other

    def answer(
        self,
        requests: Sequence[GenerationRequest],
        policy: str,
        drafter: OracleDrafter | None = None,
        cohorts: int = 1,
        seed: int = 0,
    ) -> tuple[Collector, Coordinator]:
        """Run all requests to their ends."""
        ring = LocalRing([drafter] if drafter else [], self.verifier)  # type: ignore[list-item]
        sink = Collector()
        scheduler = RandomWidths(seed)
        coordinator = Coordinator(
            ring, sink, LIMITS, policy, cohorts=(cohorts,), scheduler=scheduler
        )
        run(coordinator, requests, per_step=2)
        coordinator.close()
        coordinator.step()
        return sink, coordinator
