"""What every drafter is to the rest of the system: it ingests, it drafts, and it keeps nothing but its pool.

A drafter is a stage of the ring. A plan tells it what was committed (``Ingest``) and which rows want drafts;
all it keeps of a sequence lies in a pool of its own under the page ids of the plan, so shared prefixes,
preemption and replaced executors need nothing from it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from dflash_wire.records import DraftResult, Ingest, Row, StepPlan
from drafter.node_budget import add_trees
from drafter.proposals import SampledDraft
from drafter.tree import DraftTree

Moved = TypeVar("Moved", Row, Ingest)
Draft = list[int] | DraftTree | SampledDraft


class Drafter(ABC):
    """Takes in what was committed, then drafts.

    One drafter serves one or several *lanes*: coordinators with a verifier each, which know nothing of each
    other. Lane i has pages ``[i * lane_pages, (i + 1) * lane_pages)`` of the pool, which its plans number
    from 0.

    Owner of its pool; nobody else writes it. After ``run`` the pool covers the committed inputs of every
    sequence in the plan that this drafter drafts for, that is ``[0, anchor_position)``. It never holds
    anything of drafts.

    Args:
        index: which rows and ingests are this drafter's.
        lane_pages: pages of one lane.
    """

    def __init__(self, index: int, lane_pages: int) -> None:
        self.index = index
        self._lane_pages = lane_pages

    def run(self, plan: StepPlan) -> DraftResult:
        """Ingest what earlier steps committed, then draft. Mutates the pool.

        Returns:
            at most ``width - 1`` draft tokens for every verify row of this drafter that is wider than 1, or
            a tree of at most so many; nothing for the others.
        """
        (result,) = self.run_together([(0, plan)])
        return result

    @torch.inference_mode()
    def run_together(self, steps: Sequence[tuple[int, StepPlan]]) -> list[DraftResult]:
        """Run steps of one or several lanes in one pass. Mutates the pool.

        Args:
            steps: lane and plan; no sequence is in two of them.

        Returns:
            what ``run`` returns, for every step; each reports the time of the whole pass.
        """
        began = time.perf_counter()
        self._ingest([self._ingests_of(lane, plan) for lane, plan in steps])
        results = [DraftResult.nothing(plan) for _, plan in steps]
        rows: list[Row] = []
        places: list[tuple[int, int]] = []
        for step, (lane, plan) in enumerate(steps):
            for i, row in enumerate(plan.rows):
                if row.width > 1 and row.drafter == self.index:
                    rows.append(self._moved(row, lane))
                    places.append((step, i))
        if rows:
            trees: list[dict[int, DraftTree]] = [{} for _ in steps]
            for (step, i), draft in zip(places, self._draft(rows), strict=True):
                if isinstance(draft, DraftTree):
                    trees[step][i] = draft
                elif isinstance(draft, SampledDraft):
                    results[step].add_sampled(i, *draft)
                else:
                    results[step].draft_token_ids[i] = draft
            for (_, plan), result, mine in zip(steps, results, trees, strict=True):
                add_trees(result, mine, plan.node_budget)
        draft_ms = (time.perf_counter() - began) * 1e3
        for result in results:
            result.draft_ms, result.began_s = draft_ms, began
        return results

    @abstractmethod
    def _ingest(self, lanes: list[tuple[int, list[Ingest]]]) -> None:
        """Take in what was committed, in order; lanes beside their ingests. Mutates the pool."""

    @abstractmethod
    def _draft(self, rows: list[Row]) -> list[Draft]:
        """Draft for rows wider than 1, at least one; changes nothing that outlasts the call.

        Returns:
            per row at most ``width - 1`` tokens; of a row that rejects at a temperature, with what they were
            sampled from; of a tree row, a tree of paths shorter than ``drafted_width``.
        """

    def _ingests_of(self, lane: int, plan: StepPlan) -> tuple[int, list[Ingest]]:
        ingests = [i for i in plan.ingests if i.drafter == self.index]
        return lane, [self._moved(i, lane) for i in ingests]

    def _moved(self, item: Moved, lane: int) -> Moved:
        """The same row or ingest with the page ids that the lane's pages have in the pool."""
        if lane == 0:
            return item
        first = lane * self._lane_pages
        return replace(item, page_ids=[first + page_id for page_id in item.page_ids])
