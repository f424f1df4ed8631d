"""What keeps the choice of a draft width from flapping, and what makes it look around.

The draft width changes when the regret of keeping it has added up: with many rows a change that promises 4 %
comes after some eight steps, one that promises 1 % after fifty, one that promises a half never. With few rows
it takes longer, for their luck lasts; and the sooner after the last change, the more it takes. Each load has
a width of its own, so one that has just grown is not held up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.coordinator.block_scheduler.allocation import Option
from gateway.coordinator.block_scheduler.records import load_of, shape_name

LUCK = 3.0
"""Standard errors by which sums may differ by chance."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How much regret is enough, and how often to look around."""

    dwell_steps: int = 8
    """A draft width is kept for at least so many steps of its load."""
    regret: float = 0.3
    """Added-up relative gains that make a change, in steps' worth, with many rows;"""
    few_rows: float = 6.0
    """with so many rows it takes twice as much, and adds up twice as long: few rows are in or out of luck for
    many steps on end."""
    calm_ms: float = 8000.0
    """So long after a change the next one needs as much; the sooner, the more, in inverse proportion."""
    changes_per_s: float = 0.75
    """Of changes, so many are allowed per second of steps, whatever they promise,"""
    saved_changes: float = 2.0
    """and after a quiet time so many in a row."""
    away_steps: int = 64
    """A load that has not been there for longer is chosen for anew."""
    regret_decay: float = 0.98
    plain_margin: float = 0.01
    """Speculation must promise so much more than plain decoding."""
    probe_rate: float = 0.0003
    """What is saved up per step, in steps' worth, to try each other draft width for a step."""
    first_savings: float = 0.03
    least_loss: float = 0.01
    """A probe costs so much at least, however well its draft width is thought of."""
    probe_gap: int = 8
    """Steps between probes."""
    plain_probe_share: float = 0.004
    """Share of the time that may go into steps in which a few rows draft out of plain decoding."""
    plain_probe_gaps: tuple[int, int] = (32, 90)
    """Steps of plain decoding between those at least and at most, whatever they cost."""
    rows_per_probe: int = 32
    """One row in so many is drafted then,"""
    least_probe_rows: int = 4
    """but so many if there are: one row may be out of luck, and the next probe is far away."""
    found_factor: int = 4
    """Times as many rows are drafted after a probe that did better than expected."""


@dataclass(slots=True)
class Keeping:
    """What is kept at one load. Owner: the guard."""

    draft_width: int
    ms_kept: float
    last_step: int
    regret: float = 0.0
    steps_kept: int = 0


class WidthGuard:
    """The draft width in use at each load (power of two of rows), and the regret of keeping it.

    Owner: the block scheduler. A load comes back to what it had, unless it has been away for long: a change
    of load is no change of mind, and needs no patience.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._loads: dict[int, Keeping] = {}
        self._allowed = settings.saved_changes
        self._last_step = 0
        self.draft_width = 0
        """0 before the first choice."""
        self.num_switches = 0

    def choose(self, options: Mapping[int, Option], num_rows: int, step: int) -> tuple[Option, str]:
        """Return the option to take, by draft width, and why. Mutates.

        Args:
            options: the best step of each draft width, 1 among them.
            num_rows: verify rows of the step.
            step: never falls; those in between kept the last choice, and a step may be asked for twice.
        """
        best = max(options.values(), key=self._value)
        self._allow((step - self._last_step) * best.step_ms)
        self._last_step = step
        bucket = load_of(num_rows)
        known = self._loads.get(bucket)
        # What was kept may not be on offer any more: not every step may have trees.
        if (
            known is None
            or known.draft_width not in options
            or step - known.last_step > self._settings.away_steps
        ):
            self._loads[bucket] = Keeping(best.draft_width, self._settings.calm_ms, step)
            return self._use(best), f"first choice at {num_rows} rows"
        kept = options[known.draft_width]
        elapsed, known.last_step = step - known.last_step, step
        known.ms_kept += elapsed * kept.step_ms
        known.steps_kept += elapsed
        gain = self._value(best) / self._value(kept) - 1
        luck = 1.0 + self._settings.few_rows / num_rows
        decay = self._settings.regret_decay ** (elapsed / luck)
        known.regret = known.regret * decay + elapsed * gain
        if best is kept:
            return self._use(kept), "still best"
        why = f"{shape_name(best.draft_width)} promises {gain:+.1%}"
        if known.steps_kept < self._settings.dwell_steps:
            return self._use(kept), f"kept for {known.steps_kept} steps, {why}"
        haste = max(1.0, self._settings.calm_ms / known.ms_kept)
        if known.regret < self._settings.regret * haste * luck:
            return self._use(kept), f"{why}, which must add up to more"
        if self._allowed < 1.0:
            return self._use(kept), f"{why}, after too many changes of late"
        self._allowed -= 1.0
        # Plain decoding knows little of widths: what follows it is a first choice, and needs no patience.
        ms_kept = self._settings.calm_ms if kept.draft_width == 1 else 0.0
        self._loads[bucket] = Keeping(best.draft_width, ms_kept, step)
        return self._use(best), f"changed: {gain:+.1%} over {shape_name(kept.draft_width)}"

    def _allow(self, elapsed_ms: float) -> None:
        settings = self._settings
        more = 1e-3 * settings.changes_per_s * elapsed_ms
        self._allowed = min(settings.saved_changes, self._allowed + more)

    def _value(self, option: Option) -> float:
        margin = 1 + self._settings.plain_margin if option.draft_width == 1 else 1.0
        return option.tokens_per_ms * margin

    def _use(self, option: Option) -> Option:
        self.num_switches += self.draft_width not in (0, option.draft_width)
        self.draft_width = option.draft_width
        return option


class ProbeBudget:
    """When to try which other draft width for one step. Owner: the block scheduler.

    Each saves up for a probe of its own, so a width that is thought nearly as good as the one in use is tried
    often, and a bad one seldom; what all probes lose is bounded by what is saved.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._saved: dict[int, float] = {}
        self._last_step = self._last_probe = 0
        self._num_finds = 0

    def due(self, step: int, losses: Mapping[int, float]) -> int | None:
        """Return the draft width to try in this step, if any; it is paid for when it is tried (``spend``).
        Mutates what is saved.

        Args:
            step: ascending.
            losses: by draft width, the share of a step's worth that trying it is expected to lose.
        """
        settings = self._settings
        more = settings.probe_rate * (step - self._last_step)
        self._last_step = step
        best, most = None, 1.0
        for width, loss in losses.items():
            cost = max(settings.least_loss, loss)
            saved = min(1.0, self._saved.get(width, settings.first_savings) + more)
            self._saved[width] = saved
            if saved >= most * cost:
                best, most = width, saved / cost
        if best is None or not self.is_free(step, settings.probe_gap):
            return None
        return best

    def price(self, loss: float) -> float:
        """What a probe costs that is expected to lose so much."""
        return max(self._settings.least_loss, loss)

    def spend(self, step: int, width: int, price: float) -> None:
        """A probe is made: take its price, 0 for one of a few rows, from what was saved. Mutates."""
        if price:
            self._saved[width] -= price
        self._last_probe = step

    def is_free(self, step: int, gap: int) -> bool:
        """Whether the last probe is so many steps ago."""
        return step - self._last_probe >= gap

    def is_free_for_few(self, step: int, cost: float) -> bool:
        """Whether a few rows may draft out of plain decoding.

        Args:
            step: ascending.
            cost: what that takes beyond a plain step, over a plain step.
        """
        least, most = self._settings.plain_probe_gaps
        return self.is_free(
            step, min(most, max(least, int(cost / self._settings.plain_probe_share)))
        )

    def few(self, num_rows: int) -> int:
        """Return how many of so many rows draft in the next probe out of plain decoding."""
        settings = self._settings
        few = max(settings.least_probe_rows, num_rows // settings.rows_per_probe)
        factor: int = settings.found_factor**self._num_finds
        return min(num_rows, few * factor)

    def found(self, is_better: bool) -> None:
        """Tell whether the last probe out of plain decoding did better than expected: then more rows draft
        again soon, for a few are soon outvoted by what was learned before. Mutates.
        """
        self._num_finds = self._num_finds + 1 if is_better else 0
        if is_better:
            self._last_probe -= self._settings.plain_probe_gaps[1]


class DriftAlarm:
    """Whether predictions and observations have parted. Owner: the block scheduler.

    A deviation counts if luck does not explain it. Where drafts are right all or not at all, as those of
    prompt lookup are, 256 steps of one row are too few to tell: their sum is often off by a fifth although
    predictions are right on average. Such a window goes on for another one. A text that repeats itself does
    so for a while, so scatter is that of sums over stretches and not over steps.

    Args:
        window: steps after which sums are compared; whole stretches.
        tolerance: relative deviation of the sums that is too much.
        stretch: neighbouring steps.
    """

    def __init__(self, window: int = 256, tolerance: float = 0.2, stretch: int = 32) -> None:
        if window % stretch or window < 2 * stretch:
            raise ValueError(f"a window of {window} steps is not several stretches of {stretch}")
        self._window, self._tolerance, self._stretch = window, tolerance, stretch
        self._num_steps = 0
        self._predicted = self._observed = 0.0
        self._difference = self._squares = 0.0  # of the present stretch; of those before it
        self.ratio = 1.0
        """Observed / predicted when sums were last compared."""
        self.all_predicted = self.all_observed = 0.0
        """Sums over all steps."""

    def add(self, predicted: float, observed: float) -> bool:
        """Add one step; return whether a window has just ended that deviates too much. Mutates."""
        self._num_steps += 1
        self._predicted += predicted
        self._observed += observed
        self._difference += observed - predicted
        self.all_predicted += predicted
        self.all_observed += observed
        if self._num_steps % self._stretch:
            return False
        self._squares += self._difference**2
        self._difference = 0.0
        if self._num_steps % self._window:
            return False
        self.ratio = self._observed / self._predicted if self._predicted > 0 else 1.0
        deviates = abs(self.ratio - 1) > self._tolerance
        is_luck = deviates and not self._is_beyond_luck()
        if not is_luck:
            self._num_steps, self._predicted, self._observed, self._squares = 0, 0.0, 0.0, 0.0
        return deviates and not is_luck

    def _is_beyond_luck(self) -> bool:
        """Whether the sums differ by more than so many standard errors."""
        count = self._num_steps // self._stretch
        squared = (self._observed - self._predicted) ** 2
        variance = max(0.0, self._squares - squared / count) * count / (count - 1)
        return squared > LUCK**2 * variance
