"""Puts a block scheduler together."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.coordinator.block_scheduler.cost import StepCostModel
from gateway.coordinator.block_scheduler.cost_table import CostTable
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler, SchedulerSettings
from gateway.coordinator.block_scheduler.survival import SurvivalEstimator
from gateway.coordinator.block_scheduler.table_policy import DEFAULT_TABLE, WidthTable


def build_scheduler(
    max_draft_width: int,
    costs: CostTable | None = None,
    table: Sequence[tuple[int, int]] = DEFAULT_TABLE,
    settings: SchedulerSettings | None = None,
) -> BlockScheduler:
    """Return a scheduler that has seen nothing yet.

    Args:
        max_draft_width: the widest block of any drafter, anchor included.
        costs: of a sweep; without them the table decides.
        table: ``(most rows, width)`` (see ``WidthTable``).
        settings: what operators may change.
    """
    return BlockScheduler(
        SurvivalEstimator(max_draft_width),
        None if costs is None else StepCostModel(costs),
        WidthTable(table, max_draft_width),
        settings,
    )
