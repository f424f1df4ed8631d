"""From cells of chains, trees and ``adaptive`` to one table: what a tree brings for the positions it costs.

A chain of ``static:<w>`` and a tree of ``static-tree:<n>`` are compared at equal verified positions. Requests
of one number are the same under every policy, so acceptance is compared on those that both answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loadtest.bench_report import (
    PLAIN,
    Bar,
    aligned_table,
    bar_line,
    bar_records,
    identity,
    rounded,
)
from loadtest.closed_loop import Answer, Cell, acceptance_length
from loadtest.scheduler_report import JUDGED, Share, best_elsewhere, share

CHAIN, TREE = "static", "static-tree"
JUDGED_POSITIONS, LEAST_OF_CHAIN_TAU = 16, 1.15
"""Bar: acceptance length of a tree over that of the chain with as many positions."""
LEAST_OF_CHAIN_SPEED = {0.0: 1.08, 1.0: 1.1}
"""Bar: tokens per second of the best tree over the best chain at one stream, by temperature."""
LEAST_OF_BEST = 0.97
"""Bar: what the judged policy keeps of the best fixed one's throughput, in every cell."""
PREDICTED, OBSERVED = "dflash_block_predicted_tokens_total", "dflash_block_observed_tokens_total"
LEAST_OF_PREDICTION = 0.95
"""Bar: committed over predicted tokens of the judged policy, or the inverse, in every cell."""

Windows = dict[tuple[str, int], list[Cell]]
"""Policy and number of streams -> cells in the order of repeats. Those of one temperature."""


@dataclass(frozen=True)
class LevelResult:
    """One policy at one number of streams."""

    num_streams: int
    tokens_per_s: float
    """Median over the repeats."""
    ratio_to_off: float
    """Median over the repeats of the ratio within a repeat."""
    acceptance_length: float | None


@dataclass(frozen=True)
class TreeRow:
    """One policy at one temperature."""

    temperature: float
    policy: str
    num_positions: int | None
    """Verified per row and cycle, anchor included; None where the server chooses."""
    acceptance_length: float | None
    """Over all levels: of a fixed policy it does not depend on load."""
    chain: str | None
    """The widest measured chain of no more positions, for trees."""
    ratio_to_chain: float | None
    """Of acceptance lengths, over the requests that both answered."""
    levels: list[LevelResult]
    num_compared: int
    """Answers to requests that ``off`` answered as well."""
    num_different: int


@dataclass(frozen=True)
class JudgedCell:
    """The judged policy beside the best fixed one, chain, tree or ``off``, of the same cell."""

    temperature: float
    num_streams: int
    best: str
    """Median over all windows."""
    of_best: Share
    """Of what was best in the other half of the repeats, as in the scheduler's matrix."""
    of_predicted: float | None
    """Committed tokens over those that the block scheduler predicted; None if it predicted none."""


@dataclass(frozen=True)
class TreeReport:
    """Rows by temperature in the order of measurement, and what is asked of them."""

    rows: list[TreeRow]
    judged: list[JudgedCell]
    bars: list[Bar]


def positions(policy: str) -> int | None:
    """Return how many positions a fixed policy verifies per row and cycle; None for others."""
    if policy == PLAIN:
        return 1
    match = re.fullmatch(rf"(?:{CHAIN}|{TREE}):([0-9]+)", policy)
    return int(match[1]) if match else None


def is_chain(policy: str) -> bool:
    """Whether ``policy`` verifies one fixed chain of drafts."""
    return policy.startswith(f"{CHAIN}:")


def is_tree(policy: str) -> bool:
    """Whether ``policy`` verifies trees of one fixed size."""
    return policy.startswith(f"{TREE}:")


def evaluate(cells: Mapping[float, Sequence[Cell]]) -> TreeReport:
    """Summarize cells by temperature; every policy has as many at a level, in the order of repeats."""
    rows: list[TreeRow] = []
    judged: list[JudgedCell] = []
    bars: dict[str, list[Bar]] = {"tau": [], "speed": []}
    for temperature, mine in cells.items():
        windows: Windows = {}
        for cell in mine:
            windows.setdefault((cell.policy, cell.num_streams), []).append(cell)
        policies = list(dict.fromkeys(policy for policy, _ in windows))
        own_rows = [_row(temperature, policy, policies, windows) for policy in policies]
        rows += own_rows
        judged += _judged(temperature, policies, windows)
        bars["tau"].append(_tau_bar(temperature, own_rows))
        if temperature in LEAST_OF_CHAIN_SPEED:
            bars["speed"].append(_speed_bar(temperature, policies, windows))
    worst = min((cell.of_best.value for cell in judged), default=None)
    last = Bar(f"{JUDGED} / best fixed policy, worst cell", LEAST_OF_BEST, worst)
    return TreeReport(rows, judged, [*bars["tau"], *bars["speed"], last, _prediction_bar(judged)])


def _levels(windows: Windows) -> list[int]:
    return sorted({level for _, level in windows})


def _rate(cells: Sequence[Cell]) -> float:
    return median(cell.tokens_per_s for cell in cells)


def _best_elsewhere(policies: Iterable[str], level: int, windows: Windows) -> list[float]:
    return best_elsewhere(
        {policy: [cell.tokens_per_s for cell in windows[policy, level]] for policy in policies}
    )


def _common(mine: Sequence[Cell], of: Sequence[Cell]) -> list[tuple[Answer, Answer]]:
    """Pair answers to the same request, cell by cell."""
    pairs = []
    for cell, other in zip(mine, of, strict=True):
        theirs = {answer.number: answer for answer in other.answers}
        pairs += [(a, theirs[a.number]) for a in cell.answers if a.number in theirs]
    return pairs


def _tau_ratio(mine: Sequence[Cell], of: Sequence[Cell]) -> float | None:
    pairs = _common(mine, of)
    tau = acceptance_length([one for one, _ in pairs])
    base = acceptance_length([other for _, other in pairs])
    return tau / base if tau and base else None


def _row(temperature: float, policy: str, policies: Sequence[str], windows: Windows) -> TreeRow:
    levels = _levels(windows)

    def cells_of(name: str) -> list[Cell]:
        return [cell for level in levels for cell in windows[name, level]]

    mine, chain = cells_of(policy), _chain_of(policy, policies)
    verdicts = [one.text == other.text for one, other in _common(mine, cells_of(PLAIN))]
    return TreeRow(
        temperature=temperature,
        policy=policy,
        num_positions=positions(policy),
        acceptance_length=acceptance_length([a for cell in mine for a in cell.answers]),
        chain=chain,
        ratio_to_chain=None if chain is None else _tau_ratio(mine, cells_of(chain)),
        levels=[_level(windows[policy, level], windows[PLAIN, level]) for level in levels],
        num_compared=len(verdicts),
        num_different=verdicts.count(False),
    )


def _level(cells: Sequence[Cell], plain: Sequence[Cell]) -> LevelResult:
    return LevelResult(
        num_streams=cells[0].num_streams,
        tokens_per_s=_rate(cells),
        ratio_to_off=median(
            cell.tokens_per_s / other.tokens_per_s for cell, other in zip(cells, plain, strict=True)
        ),
        acceptance_length=acceptance_length([a for cell in cells for a in cell.answers]),
    )


def _chain_of(policy: str, policies: Sequence[str]) -> str | None:
    """Return the widest chain of no more positions than a tree has."""
    size = positions(policy)
    if size is None or not is_tree(policy):
        return None
    widths = {p: width for p in policies if is_chain(p) and (width := positions(p)) is not None}
    narrower = [p for p, width in widths.items() if width <= size]
    return max(narrower, key=widths.__getitem__, default=None)


def _judged(temperature: float, policies: Sequence[str], windows: Windows) -> list[JudgedCell]:
    if JUDGED not in policies:
        return []
    fixed = [policy for policy in policies if positions(policy) is not None]
    cells = []
    for level in _levels(windows):
        rates = [cell.tokens_per_s for cell in windows[JUDGED, level]]
        of_best = share(rates, _best_elsewhere(fixed, level, windows))
        best = max(fixed, key=lambda policy: _rate(windows[policy, level]))
        predicted = _of_predicted(windows[JUDGED, level])
        cells.append(JudgedCell(temperature, level, best, of_best, predicted))
    return cells


def _of_predicted(cells: Sequence[Cell]) -> float | None:
    predicted, observed = (
        sum(cell.counted.get(name, 0.0) for cell in cells) for name in (PREDICTED, OBSERVED)
    )
    return observed / predicted if predicted else None


def _prediction_bar(judged: Sequence[JudgedCell]) -> Bar:
    ratios = [cell.of_predicted for cell in judged if cell.of_predicted]
    worst = min((min(ratio, 1 / ratio) for ratio in ratios), default=None)
    name = "committed / predicted tokens, or the inverse, worst cell"
    return Bar(name, LEAST_OF_PREDICTION, worst)


def _tau_bar(temperature: float, rows: Sequence[TreeRow]) -> Bar:
    tree, chain = f"{TREE}:{JUDGED_POSITIONS}", f"{CHAIN}:{JUDGED_POSITIONS}"
    ratios = [row.ratio_to_chain for row in rows if row.policy == tree and row.chain == chain]
    name = f"tau of {tree} / {chain} at temperature {temperature:g}"
    return Bar(name, LEAST_OF_CHAIN_TAU, ratios[0] if ratios else None)


def _speed_bar(temperature: float, policies: Sequence[str], windows: Windows) -> Bar:
    trees = [policy for policy in policies if is_tree(policy)]
    chains = [policy for policy in policies if is_chain(policy)]
    value = None
    if trees and chains and 1 in _levels(windows):
        tree, chain = (_best_elsewhere(mine, 1, windows) for mine in (trees, chains))
        value = share(tree, chain).value
    name = f"tokens/s of the best tree / best chain, 1 stream, temperature {temperature:g}"
    return Bar(name, LEAST_OF_CHAIN_SPEED[temperature], value)


def render_table(report: TreeReport) -> str:
    """Return the table, the judged policy's shares and the bars as text."""
    levels = [level.num_streams for level in report.rows[0].levels]
    header = ["T", "policy", "tau", "x chain", "= off"]
    for level in levels:
        header += [f"tau at {level}", "tokens/s"]
    lines = [header]
    for row in report.rows:
        line = [f"{row.temperature:g}", row.policy, _number(row.acceptance_length)]
        line += [_number(row.ratio_to_chain), identity(row.num_compared, row.num_different)]
        for result in row.levels:
            line += [_number(result.acceptance_length), f"{result.tokens_per_s:.0f}"]
        lines.append(line)
    shares = [
        f"{JUDGED} at temperature {cell.temperature:g}, {cell.num_streams} streams: "
        f"{cell.of_best} of the best ({cell.best}), {_number(cell.of_predicted)} of the predicted tokens"
        for cell in report.judged
    ]
    return "\n".join([aligned_table(lines), "", *shares, *map(bar_line, report.bars)])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def to_json(report: TreeReport, settings: dict[str, object]) -> str:
    """Return the report as one line of JSON, with the run's settings."""
    return json.dumps(
        {
            "benchmark": "trees",
            **settings,
            "rows": rounded([asdict(row) for row in report.rows]),
            "judged": rounded([asdict(cell) for cell in report.judged]),
            "bars": bar_records(report.bars),
        }
    )
