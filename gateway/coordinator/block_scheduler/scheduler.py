"""The block scheduler: draft width and verify widths of every step.

Each step it weighs, for every draft width, the tokens that the best verify widths are expected to commit
(``survival``) against the time that the step will take (``cost``). Width 1 competes like any other, so
speculation switches itself off where it would lose; probes find the way back. It sees histories and loads,
never a draft token, so it may serve sampling by rejection as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_wire.gauges import SchedulerGauges
from dflash_wire.ports import MAX_TREE_POSITIONS
from gateway.coordinator.block_scheduler.allocation import Option, candidate_sizes
from gateway.coordinator.block_scheduler.choice import Asked, Choice
from gateway.coordinator.block_scheduler.cost import StepCostModel
from gateway.coordinator.block_scheduler.guards import (
    DriftAlarm,
    GuardSettings,
    ProbeBudget,
    WidthGuard,
)
from gateway.coordinator.block_scheduler.records import (
    DEFAULT_TRAFFIC,
    TREES,
    Decision,
    FloatArray,
    IntArray,
    RowOutcome,
    RowState,
    StepLoad,
    StepOutcome,
    TreeShare,
    block_width,
    shape_name,
)
from gateway.coordinator.block_scheduler.survival import SurvivalEstimator
from gateway.coordinator.block_scheduler.table_policy import WidthTable
from gateway.coordinator.block_scheduler.trees import TreeEstimator, blocks_within, most_nodes
from gateway.coordinator.block_scheduler.weighing import Weighing

TABLE, PLAIN, SPECULATE, PROBE, SAFE = "table", "plain", "speculate", "probe", "safe"
STATES = (TABLE, PLAIN, SPECULATE, PROBE, SAFE)

LOGGED_DECISIONS = 512
FEW_ROWS = 8
"""Up to so many rows a choice may be a few steps old, and learning waits: both cost as much for one row."""
KEPT_STEPS = 4
"""A choice stands, and few rows wait to be learned from, for so many steps."""
SURPRISE = 2.0
"""Standard deviations that a probe accepts beyond what was expected, and one of more rows comes soon."""
PLAIN_LOSS_WEIGHT = 2.0
"""What a probe of all rows is thought to lose counts so much more while they decode plainly."""
UNASKED_STEPS = 8
"""Of steps in which nothing was to be decided every so-manieth is learned from."""
SAFE_STEPS = 512
"""How long the table rules after an alarm."""
MOST_SURPRISE = 4.0
"""A step that took more than so many times what was predicted counts as that: one hiccup is no drift."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What operators may change."""

    draft_widths: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    """Blocks the drafter may be asked for; 1 is always among them."""
    target_tpot_ms: float | None = None
    """Time per output token that every row should meet if any width makes it; drafts are chains then."""
    allows_trees: bool = False
    tree_blocks: tuple[int, ...] = (8,)
    """Blocks that trees may come out of, besides the widest."""
    guards: GuardSettings = field(default_factory=GuardSettings)


class BlockScheduler:
    """Chooses widths and learns from what they gave.

    Owner: the coordinator's driver thread; other threads may copy ``log`` and read numbers.

    Args:
        survival: knows how drafts fare.
        cost: knows what steps take; None until something has been measured: the table decides then.
        table: for that time, for alarms, and for the policy ``table``.
        settings: what operators may change.
    """

    def __init__(
        self,
        survival: SurvivalEstimator,
        cost: StepCostModel | None,
        table: WidthTable,
        settings: SchedulerSettings | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self.survival = survival
        self.cost = cost
        self.log: deque[Decision] = deque(maxlen=LOGGED_DECISIONS)
        self.table = table
        most = survival.num_positions + 1
        self._draft_widths = sorted({1, *(w for w in self.settings.draft_widths if w <= most)})
        self.trees = TreeEstimator()
        widths = blocks_within(self.settings.tree_blocks, most)
        self._tree_widths = [TREES + width for width in widths]
        self._guard = WidthGuard(self.settings.guards)
        self._probes = ProbeBudget(self.settings.guards)
        self._asked: Asked | None = None
        self._choice: Choice | None = None
        self._unlearned: list[RowOutcome] = []
        self._num_unlearned = self._num_unasked = 0
        self._num_decisions = 0
        self._token_alarm, self._time_alarm = DriftAlarm(), DriftAlarm()
        self._rows_by_width = np.zeros(max(most, MAX_TREE_POSITIONS) + 1, dtype=np.int64)
        self._safe_until = 0

    def gauges(self) -> SchedulerGauges:
        """Return what metrics show; any thread may ask."""
        most = self.survival.num_positions + 1
        return SchedulerGauges(
            state=self.log[-1].state if self.log else TABLE,
            num_switches=self._guard.num_switches,
            token_ratio=self._token_alarm.ratio,
            time_ratio=self._time_alarm.ratio,
            brier_score=self.survival.brier_score,
            survival=self.survival.class_survival(DEFAULT_TRAFFIC, most).tolist(),
            rows_by_width=self._rows_by_width.tolist(),
            predicted_tokens=self._token_alarm.all_predicted,
            observed_tokens=self._token_alarm.all_observed,
        )

    def explain(self, most: int) -> list[str]:
        """Return the latest decisions in words, newest last; any thread may ask."""
        # One call into C, so the driver cannot add one meanwhile.
        return [f"{d.decision_id} {d.state}: {d.reason}" for d in list(self.log)[-most:]]

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        """Choose the widths of one step; at least one row. Mutates."""
        self._num_decisions += 1
        if self.cost is None:
            decision = self._by_table(rows, load, TABLE, "no cost has been measured yet")
        elif self._num_decisions < self._safe_until:
            decision = self._by_table(rows, load, SAFE, "predictions failed; the table decides")
        else:
            decision = self._by_value(rows, load)
        self.log.append(decision)
        if decision.tree is None:  # of trees, it is known when they come back
            self._rows_by_width += np.bincount(decision.widths, minlength=len(self._rows_by_width))
        return decision

    def prepare(self) -> None:
        """Choose for the next step ahead, as if it had the rows of the latest one, unless a choice stands and
        nothing was learned since. Mutates.

        For whoever has time between two steps: ``decide`` is a look then, unless a row came or went.
        """
        asked, step = self._asked, self._num_decisions + 1
        self._asked = None
        # Of two steps in flight, the next one has other rows than the latest.
        is_same = asked is not None and asked.load.num_cohorts == 1
        if asked and is_same and self.cost is not None and step >= self._safe_until:
            old = self._choice
            if old is None or self._num_unlearned == 0 or not old.fits(asked, step):
                self._choice = self._chosen(asked, step)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a landed step. Mutates."""
        decision = outcome.decision
        if decision is None:
            self._num_unasked += 1
            if self._num_unasked % UNASKED_STEPS:
                return
        is_probe = decision is not None and decision.state == PROBE and decision.tree is None
        # A probe that drafts for a few rows only is of no cell of the cost model.
        is_partial = is_probe and decision is not None and min(decision.widths) == 1
        self.trees.observe(outcome.trees, self.survival.class_survival)
        for tree in outcome.trees:
            self._rows_by_width[tree.num_nodes + 1] += 1
        self._unlearned += [*outcome.rows, *(tree.as_chain for tree in outcome.trees)]
        self._num_unlearned += 1
        is_enough = len(self._unlearned) > FEW_ROWS or self._num_unlearned >= KEPT_STEPS
        # Out of plain decoding there is nothing else to learn from.
        is_lookout = is_probe and self._guard.draft_width == 1
        if is_lookout or is_enough:
            surprise = self._learn()
            if is_lookout:
                self._probes.found(surprise > SURPRISE)
        if self.cost is not None and not is_partial:
            ratio = self.cost.observe(outcome)
            if ratio is not None and self._time_alarm.add(1.0, min(ratio, MOST_SURPRISE)):
                self._sound_alarm()
        num_rows = len(outcome.rows) + len(outcome.trees)
        is_whole = decision is not None and num_rows == len(decision.widths)
        if decision is not None and decision.state == SPECULATE and is_whole:
            observed = sum(row.num_verified or 1 + row.num_accepted for row in outcome.rows)
            observed += sum(tree.num_verified for tree in outcome.trees)
            if decision.tree is not None:
                num_nodes = sum(tree.num_nodes for tree in outcome.trees)
                self.trees.observe_gain(decision.tree, num_nodes, observed)
            if self._token_alarm.add(decision.predicted_tokens, observed):
                self._sound_alarm()

    def forget(self, seq_id: int) -> None:
        """A request has ended. Mutates."""
        self._learn()  # nothing of it may come later
        self.survival.forget(seq_id)
        self.trees.forget(seq_id)

    def _learn(self) -> float:
        """Learn from the rows that waited; return by how much they surprise. Mutates."""
        waiting, num_steps = self._unlearned, self._num_unlearned
        self._unlearned, self._num_unlearned = [], 0
        return self.survival.observe(waiting, num_steps) if waiting else 0.0

    def _sound_alarm(self) -> None:
        self._safe_until = self._num_decisions + SAFE_STEPS

    def _by_table(self, rows: Sequence[RowState], load: StepLoad, state: str, why: str) -> Decision:
        width = self.table.width(len(rows) + load.num_fixed_rows)
        widths = _fitted(np.array([min(width, r.max_width) for r in rows]), load.max_positions)
        reason = f"{len(rows)} rows: width {width}; {why}"
        draft_width = int(widths.max())
        return Decision(
            self._num_decisions, draft_width, widths.tolist(), float(len(rows)), 0.0, state, reason
        )

    def _by_value(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        asked, step, choice = Asked(rows, load), self._num_decisions, self._choice
        self._asked = asked
        if choice is None or not choice.fits(asked, step):
            choice = self._chosen(asked, step)
            self._choice = choice if len(rows) <= FEW_ROWS else None
        if choice.state == PROBE:
            self._probes.spend(step, choice.option.draft_width, choice.price)
        option, widths = choice.option, choice.widths
        return Decision(
            step,
            block_width(option.draft_width) if int(widths.max()) > 1 else 1,
            widths.tolist(),
            option.tokens,
            option.step_ms,
            choice.state,
            choice.reason,
            choice.tree if int(widths.max()) > 1 else None,
        )

    def _chosen(self, asked: Asked, step: int) -> Choice:
        """What a step should do. Mutates guard and probes."""
        rows, load = asked
        weighed = self._weigh(rows, load)
        num_rows = len(rows) + load.num_fixed_rows
        option, why = self._guard.choose(weighed.options, num_rows, step)
        probe = self._probe(asked, weighed, option, step)
        if probe is not None:
            return probe
        fitted, widths = weighed.fitted(option.draft_width)
        reason = (
            f"{len(rows)} rows: {shape_name(fitted.draft_width)}, {fitted.num_positions} positions for "
            f"{fitted.tokens:.2f} tokens in {fitted.step_ms:.2f} ms; {why}"
        )
        state = SPECULATE if fitted.draft_width > 1 else PLAIN
        until = step + KEPT_STEPS - 1
        tree = self._tree_share(asked, weighed, fitted)
        return Choice(asked, fitted, widths, state, reason, until, tree)

    def _tree_share(self, asked: Asked, weighed: Weighing, option: Option) -> TreeShare | None:
        """What the drafter must know to share nodes out; None for chains."""
        if option.draft_width < TREES:
            return None
        sizes, step_ms = weighed.prices(option.draft_width)
        step_ms = step_ms / self.trees.gain.time
        return self.trees.share(asked.rows, option, sizes - len(asked.rows), step_ms)

    def _weigh(self, rows: Sequence[RowState], load: StepLoad) -> Weighing:
        """Weigh the best step of every draft width."""
        assert self.cost is not None
        num_rows, widths, target = len(rows), self._draft_widths, self.settings.target_tpot_ms
        has_trees = self.settings.allows_trees and load.allows_trees and target is None
        most_width = self._draft_widths[-1]
        if has_trees and self._tree_widths:
            widths = widths + self._tree_widths
            most_width = max(most_width, 1 + most_nodes(num_rows))
        most = min(num_rows * most_width, max(num_rows, load.max_positions))
        captured = self.cost.table.captured_sizes
        sizes = candidate_sizes(num_rows, most, captured, load.num_fixed_positions)
        step_ms = self.cost.step_ms(
            [max(width, load.fixed_draft_width) for width in widths],
            num_rows + load.num_fixed_rows,
            sizes + load.num_fixed_positions,
            load.fixed_context + sum(row.context for row in rows),
            load.num_prefill_positions,
            load.num_cohorts,
        )
        survival = self.survival.survival(rows, self._draft_widths)
        max_widths = np.array([row.max_width for row in rows])
        if widths is self._draft_widths:
            return Weighing(widths, survival, max_widths, sizes, step_ms, target)
        step_ms[len(survival) :] *= self.trees.gain.time
        planes = self._with_trees(survival, rows, most_width - 1)
        return Weighing(widths, planes, max_widths, sizes, step_ms, target)

    def _with_trees(
        self, survival: FloatArray, rows: Sequence[RowState], num_nodes: int
    ) -> FloatArray:
        """Survival of chains, and behind them the acceptance of the best nodes of trees."""
        num_chains, widths = len(survival), self._tree_widths
        planes = np.zeros((num_chains + len(widths), len(rows), num_nodes))
        planes[:num_chains, :, : survival.shape[2]] = survival
        for index, width in enumerate(widths):
            drafted = block_width(width)
            expected = self.trees.expected(rows, drafted, self.survival.class_survival)
            gained = expected[:, :num_nodes] * self.trees.gain.tokens
            planes[num_chains + index] = np.minimum(1.0, gained)
        return planes

    def _probe(self, asked: Asked, weighed: Weighing, kept: Option, step: int) -> Choice | None:
        """One step with another draft width for all rows, or with a few rows out of plain decoding."""
        num_rows, worth, options = len(asked.rows), kept.tokens_per_ms, weighed.options
        # A few rows tell nearly as much; out of plain decoding, all of them learn about costs alone.
        weight = 1.0 if kept.draft_width > 1 else PLAIN_LOSS_WEIGHT
        losses = {
            width: weight * (1.0 - option.tokens_per_ms / worth)
            for width, option in options.items()
            if width not in (1, kept.draft_width) and option.num_positions > num_rows
        }
        width = self._probes.due(step, losses)
        if width is not None:
            fitted, widths = weighed.fitted(width)
            reason = f"{num_rows} rows: {shape_name(fitted.draft_width)} for one step, to learn"
            tree = self._tree_share(asked, weighed, fitted)
            price = self._probes.price(losses[width])
            return Choice(asked, fitted, widths, PROBE, reason, step, tree, price)
        if kept.draft_width > 1:
            return None
        narrowest = self._narrowest()
        cost = options[narrowest].step_ms / kept.step_ms - 1.0
        if not self._probes.is_free_for_few(step, cost):
            return None
        return self._probe_few(asked, options[narrowest], step)

    def _narrowest(self) -> int:
        """The narrowest draft width that says something of wider ones."""
        return next((w for w in self._draft_widths if w >= 4), self._draft_widths[-1])

    def _probe_few(self, asked: Asked, option: Option, step: int) -> Choice | None:
        """Some rows draft out of plain decoding."""
        width, num_rows = option.draft_width, len(asked.rows)
        most = self._probes.few(num_rows)
        is_probed = (np.arange(num_rows) - step % num_rows) % num_rows < most
        limits = np.array([min(width, row.max_width) for row in asked.rows])
        widths = _fitted(np.where(is_probed, limits, 1), asked.load.max_positions)
        if int(widths.max()) == 1:
            return None
        reason = f"{num_rows} rows: draft width {width} for {most} of them for one step, to learn"
        return Choice(asked, option, widths, PROBE, reason, step)


def _fitted(widths: IntArray, most: int) -> IntArray:
    """Narrow the widest rows to a common width until all fit; at least one position each stays."""
    if int(widths.sum()) <= most:
        return widths
    limits = range(int(widths.max()), 0, -1)
    limit = next((n for n in limits if int(np.minimum(widths, n).sum()) <= most), 1)
    return np.minimum(widths, limit)
