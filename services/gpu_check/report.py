"""Results as they come: each part's is on disk before the next one begins."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DONE, SKIPPED, FAILED, CUT = "done", "skipped", "failed", "cut off"
MARKS = {True: "met", False: "MISSED", None: "not judged"}


@dataclass(slots=True)
class Check:
    """A figure beside the bound that it must not exceed.

    Attributes:
        name: what it is.
        figure: what was found.
        bound: what it should be at most.
        is_met: None where the run says nothing about it.
        is_design: a target of the design; False: something that must hold.
    """

    name: str
    figure: float
    bound: float
    is_met: bool | None
    is_design: bool


@dataclass(slots=True)
class PartResult:
    """What one part found.

    Attributes:
        name: of the part.
        status: how it ended.
        reason: why it did not end as ``done``.
        seconds: that it took.
        rows: of its table, one after the other.
        checks: of its figures.
    """

    name: str
    status: str = DONE
    reason: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Append a row of the part's table."""
        self.rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})

    def must(self, name: str, figure: float, bound: float) -> None:
        """Note a figure that must not exceed its bound, on any device."""
        self.checks.append(Check(name, round(figure, 6), bound, figure <= bound, is_design=False))

    def aim(self, name: str, figure: float, bound: float, *, is_judged: bool) -> None:
        """Note a figure beside the design's target."""
        is_met = figure <= bound if is_judged else None
        self.checks.append(Check(name, round(figure, 4), bound, is_met, is_design=True))


class Report:
    """All parts' results. Owner: the run.

    Args:
        path: gets one line of JSON for the run's facts and for every part, as soon as it has ended.
        facts: of the run.

    Raises:
        OSError: ``path`` cannot be written.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self.facts = facts
        self.parts: list[PartResult] = []
        self.is_cut_off = False
        """The run was told to end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self._append(facts)

    def add(self, part: PartResult) -> None:
        """Keep a part's result, on disk too."""
        self.parts.append(part)
        self._append(asdict(part))

    def _append(self, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def is_sound(self) -> bool:
        """Whether the run came to its end, no part failed and everything that must hold does.

        Design targets may be missed.
        """
        broken = [c for part in self.parts for c in part.checks if not c.is_design and not c.is_met]
        has_failed = any(part.status == FAILED for part in self.parts)
        return not (self.is_cut_off or broken or has_failed)

    def summary(self) -> dict[str, Any]:
        """Everything, for the last line."""
        parts = [asdict(part) for part in self.parts]
        found = {"is_sound": self.is_sound, "is_cut_off": self.is_cut_off, "parts": parts}
        return self.facts | found


def render(part: PartResult) -> str:
    """A part as text: its table, then its checks."""
    reason = f": {part.reason}" if part.reason else ""
    lines = [f"\n{part.name} ({part.status}{reason}; {part.seconds:.1f} s)"]
    lines += _table(part.rows)
    for check in part.checks:
        kind = "target" if check.is_design else "bound"
        found = f"{check.figure:g} ({kind} {check.bound:g})"
        lines.append(f"  {MARKS[check.is_met]:<10} {check.name}: {found}")
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows under their keys; rows with other keys begin another table."""
    lines: list[str] = []
    start = 0
    while start < len(rows):
        keys = list(rows[start])
        end = start
        while end < len(rows) and list(rows[end]) == keys:
            end += 1
        cells = [keys] + [[_cell(row[key]) for key in keys] for row in rows[start:end]]
        widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
        for line in cells:
            pairs = zip(line, widths, strict=True)
            lines.append("  " + "  ".join(cell.rjust(width) for cell, width in pairs))
        start = end
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
