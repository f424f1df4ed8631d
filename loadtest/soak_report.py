"""Judges a soak: its bars, one table, one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from statistics import median

from loadtest.metrics_reader import BUSY
from loadtest.soak_clients import FAILED, LEFT, OUTCOMES, Tally

MAX_GROWTH = 0.05
MIN_ROLE_MIB = 50.0
"""Smaller roles are shown but not judged alone: 5 % of them is noise."""
MIN_QUARTER = 2
"""Samples in a quarter below which there is nothing to say about growth."""


@dataclass(frozen=True)
class SoakReport:
    """Everything a soak found."""

    minutes: float
    tally: Tally
    metrics: dict[str, float]
    """Sums of ``/metrics`` after the soak, once idle."""
    before_mib: dict[str, float]
    """Memory by role after the warm-up, idle; empty when it was not watched."""
    after_mib: dict[str, float]
    samples_mib: list[dict[str, float]] = field(default_factory=list)
    """Memory by role, once a minute, under load: shows whether growth goes on."""

    def growth(self, role: str | None = None) -> float:
        """How much memory grew as a share; of all roles, or of one."""
        roles = set(self.before_mib) | set(self.after_mib) if role is None else {role}
        before = sum(self.before_mib.get(r, 0.0) for r in roles)
        after = sum(self.after_mib.get(r, 0.0) for r in roles)
        return after / before - 1 if before else 0.0

    def late_growth(self) -> dict[str, float]:
        """Growth of each large role from the second quarter to the last, by medians of the minutes.

        A process whose heap settles has done so by then; one that leaks has not. Empty for short soaks.
        """
        quarter = len(self.samples_mib) // 4
        if quarter < MIN_QUARTER:
            return {}
        second, last = self.samples_mib[quarter : 2 * quarter], self.samples_mib[-quarter:]
        growth = {}
        for role, mib in sorted(self.before_mib.items()):
            if mib >= MIN_ROLE_MIB:
                early, late = (median(s.get(role, 0.0) for s in part) for part in (second, last))
                growth[role] = late / early - 1 if early else 0.0
        return growth

    def bars(self) -> dict[str, bool]:
        """What had to hold, and whether it did."""
        bars = {f"{name} is 0 when idle": self.metrics[name] == 0 for name in BUSY}
        bars["every answer was right"] = self.tally.num(FAILED) == 0
        bars["clients left in between"] = self.tally.num(LEFT) > 0
        bars["no step failed"] = self.metrics["dflash_failed_steps_total"] == 0
        bars["preemptions happened"] = self.metrics["dflash_preemptions_total"] > 0
        bars["prefixes were reused"] = self.metrics["dflash_cached_prompt_tokens_total"] > 0
        if self.before_mib:
            bars["memory within 5 % of the start"] = self.growth() <= MAX_GROWTH
            for role, growth in self.late_growth().items():
                bars[f"{role} grew by 5 % at most in the second half"] = growth <= MAX_GROWTH
        return bars

    def to_json(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "minutes": round(self.minutes, 2),
            "requests": {o: self.tally.num(o) for o in OUTCOMES},
            "canary_answers": self.tally.num_canary_answers,
            "canary_mismatches": self.tally.num_canary_mismatches,
            "idle": {name: self.metrics[name] for name in BUSY},
            "cached_pages": self.metrics["dflash_pages_cached"],
            "preemptions": self.metrics["dflash_preemptions_total"],
            "steps": self.metrics["dflash_steps_total"],
            "completion_tokens": self.metrics["dflash_completion_tokens_total"],
            "cached_prompt_tokens": self.metrics["dflash_cached_prompt_tokens_total"],
            "before_mib": {role: round(mib, 1) for role, mib in self.before_mib.items()},
            "after_mib": {role: round(mib, 1) for role, mib in self.after_mib.items()},
            "growth": round(self.growth(), 4),
            "samples_mib": [
                {role: round(mib, 1) for role, mib in sample.items() if mib >= MIN_ROLE_MIB}
                for sample in self.samples_mib
            ],
            "failures": self.tally.failures,
            "bars": self.bars(),
            "bars_met": all(self.bars().values()),
        }


def render(report: SoakReport) -> str:
    """Return tables and the JSON line."""
    lines = [f"{'requests':<16}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES)]
    for kind in sorted({kind for kind, _ in report.tally.outcomes}):
        counts = (report.tally.outcomes[kind, outcome] for outcome in OUTCOMES)
        lines.append(f"{kind:<16}" + "".join(f"{count:>12}" for count in counts))
    if report.before_mib:
        lines += ["", f"{'memory, MiB':<40}{'start':>10}{'end':>10}{'change':>10}"]
        roles = sorted(set(report.before_mib) | set(report.after_mib))
        for role in roles:
            before, after = report.before_mib.get(role, 0.0), report.after_mib.get(role, 0.0)
            lines.append(
                f"{role[:39]:<40}{before:>10.1f}{after:>10.1f}{100 * report.growth(role):>9.1f}%"
            )
        before, after = sum(report.before_mib.values()), sum(report.after_mib.values())
        lines.append(f"{'all':<40}{before:>10.1f}{after:>10.1f}{100 * report.growth():>9.1f}%")
    lines.append("")
    lines += [f"{'met   ' if is_met else 'MISSED'}  {bar}" for bar, is_met in report.bars().items()]
    lines += [f"failure: {failure}" for failure in report.tally.failures]
    return "\n".join([*lines, json.dumps(report.to_json())])
