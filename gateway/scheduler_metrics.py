"""Block schedulers in Prometheus' terms: one sample per engine group and lane.

Useful queries (``[5m]`` as wanted):
    width served           rate(dflash_block_width_sum) / rate(dflash_block_width_count)
    flapping               rate(dflash_block_switches_total) > 1
    predictions are off    abs(dflash_block_observed_over_predicted - 1) > 0.2
    the table decides      dflash_block_scheduler_state{state=~"safe|table"} == 1
        ``safe``: predictions are off by more than luck explains, which with few streams is much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from dflash_wire.gauges import GroupGauges, SchedulerGauges

LABELS = ["group", "lane"]


def scheduler_metrics(groups: Sequence[GroupGauges]) -> Iterable[Metric]:
    """Yield one family per kind of number."""
    state = GaugeMetricFamily(
        "dflash_block_scheduler_state", "1 for the state it is in.", labels=[*LABELS, "state"]
    )
    switches = CounterMetricFamily(
        "dflash_block_switches", "Changes of the draft width, probes not counted.", labels=LABELS
    )
    ratios = GaugeMetricFamily(
        "dflash_block_observed_over_predicted",
        "Committed tokens and step time, observed / predicted over 256 steps, or more where they scatter.",
        labels=[*LABELS, "of"],
    )
    predicted = CounterMetricFamily(
        "dflash_block_predicted_tokens",
        "Committed tokens that were predicted of steps that speculated as decided.",
        labels=LABELS,
    )
    observed = CounterMetricFamily(
        "dflash_block_observed_tokens", "Those that came of the same steps.", labels=LABELS
    )
    brier = GaugeMetricFamily(
        "dflash_block_brier_score", "Mean squared error of predicted acceptance.", labels=LABELS
    )
    survival = GaugeMetricFamily(
        "dflash_block_survival",
        "Probability that all draft tokens up to this one are accepted.",
        labels=[*LABELS, "position"],
    )
    widths = HistogramMetricFamily(
        "dflash_block_width", "Verified positions per row, anchor included.", labels=LABELS
    )
    for labels, now in _lanes(groups):
        state.add_metric([*labels, now.state], 1)
        switches.add_metric(labels, now.num_switches)
        ratios.add_metric([*labels, "tokens"], now.token_ratio)
        ratios.add_metric([*labels, "time"], now.time_ratio)
        predicted.add_metric(labels, now.predicted_tokens)
        observed.add_metric(labels, now.observed_tokens)
        brier.add_metric(labels, now.brier_score)
        for position, probability in enumerate(now.survival, start=1):
            survival.add_metric([*labels, str(position)], probability)
        widths.add_metric(labels, *_buckets(now.rows_by_width))
    return [state, switches, ratios, predicted, observed, brier, survival, widths]


def _lanes(groups: Sequence[GroupGauges]) -> Iterable[tuple[list[str], SchedulerGauges]]:
    for group in groups:
        for lane, now in enumerate(group.schedulers):
            yield [group.group, str(lane)], now


def _buckets(rows_by_width: list[int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper bound, and the sum of all widths."""
    totals = list(accumulate(rows_by_width))
    buckets = [(f"{float(width)}", float(total)) for width, total in enumerate(totals) if width]
    total = float(sum(width * rows for width, rows in enumerate(rows_by_width)))
    return [*buckets, ("+Inf", float(totals[-1]) if totals else 0.0)], total
