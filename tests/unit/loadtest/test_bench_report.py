from __future__ import annotations

import json

import pytest

from loadtest.bench_report import (
    DFLASH_LOOP,
    PLAIN,
    TRANSFORMERS,
    CycleTotals,
    Measurement,
    evaluate,
    is_same_answer,
    render_table,
    rotated,
    to_json,
)

pytestmark = pytest.mark.unit

ROWS = [PLAIN, "static:4", "static:8", TRANSFORMERS, DFLASH_LOOP]


def answer(
    row: str, seconds: float, repeat: int = 0, prompt_id: str = "p0", text: str | None = "42"
) -> Measurement:
    cycles = CycleTotals(4, 10, draft_ms=2.0, verify_ms=8.0, overhead_ms=1.0)
    return Measurement(row, prompt_id, repeat, seconds, num_tokens=12, text=text, cycles=cycles)


def one_repeat(repeat: int, slowness: float = 1.0, **seconds: float) -> list[Measurement]:
    default = {"off": 12.0, "static_4": 6.0, "static_8": 4.0, "hf": 15.0, "dflash": 5.6}
    values = {**default, **seconds}.values()
    return [answer(row, value * slowness, repeat) for row, value in zip(ROWS, values, strict=True)]


def test_rotation_gives_every_row_every_place() -> None:
    orders = [rotated(["a", "b", "c"], shift) for shift in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert orders[1] == ["b", "c", "a"]


def test_speeds_ratios_and_cycle_times() -> None:
    report = evaluate(ROWS, one_repeat(0))
    by_row = {row.row: row for row in report.rows}
    assert list(by_row) == ROWS
    assert by_row["off"].tokens_per_s == pytest.approx(1.0)
    static = by_row["static:8"]
    assert static.tokens_per_s == pytest.approx(3.0)
    assert static.ratio_to_off == pytest.approx(3.0)
    assert static.acceptance_length == pytest.approx(2.5)
    assert (static.draft_ms, static.verify_ms, static.overhead_ms) == (0.5, 2.0, 0.25)
    values = {bar.name: bar.value for bar in report.bars}
    assert values == pytest.approx(
        {
            "best static / off": 3.0,
            "off / transformers generate": 1.25,
            "best static / dflash package loop": 1.4,
        }
    )
    assert [bar.is_met for bar in report.bars] == [True, True, True]
    assert not report.has_failed


def test_ratios_are_taken_within_a_repeat() -> None:
    # The machine is ten times slower in repeat 1; off is also slow once for a reason of its own.
    runs = one_repeat(0) + one_repeat(1, slowness=10.0) + one_repeat(2, off=120.0)
    report = evaluate(ROWS, runs)
    assert report.rows[2].ratio_to_off == pytest.approx(3.0)
    assert report.rows[0].tokens_per_s == pytest.approx(0.1)


def test_a_rate_is_all_tokens_over_all_seconds() -> None:
    runs = [answer("off", 1.0, prompt_id="a"), answer("off", 5.0, prompt_id="b")]
    assert evaluate(["off"], runs).rows[0].tokens_per_s == pytest.approx(24 / 6)


def test_missed_bars_and_different_outputs_fail_the_report() -> None:
    slow = evaluate(ROWS, one_repeat(0, static_4=7.0, static_8=6.5))
    assert [bar.is_met for bar in slow.bars] == [False, True, False]
    assert slow.has_failed

    runs = one_repeat(0)
    runs[1] = answer("static:4", 6.0, text="43")
    different = evaluate(ROWS, runs)
    assert different.rows[1].is_identical is False
    assert different.has_failed
    assert "1/1 differ" in render_table(different)


def test_without_references_their_bars_are_not_measured() -> None:
    report = evaluate(ROWS[:3], one_repeat(0)[:3])
    assert [bar.is_met for bar in report.bars] == [True, None, None]
    assert not report.has_failed
    assert "not measured" in render_table(report)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"token_ids": (1, 2), "text": "a"}, {"token_ids": (1, 2), "text": "b"}, True),
        ({"token_ids": (1, 2), "text": "a"}, {"token_ids": (1, 3), "text": "a"}, False),
        ({"text": "a"}, {"token_ids": (1,), "text": "a"}, True),
        ({"text": "a"}, {"text": "b"}, False),
        ({"text": "a"}, {"token_ids": (1,)}, None),
    ],
)
def test_answers_are_compared_by_what_both_have(
    first: dict[str, object], second: dict[str, object], expected: bool | None
) -> None:
    def measured(**parts: object) -> Measurement:
        return Measurement("r", "p", 0, 1.0, 1, **parts)  # type: ignore[arg-type]

    assert is_same_answer(measured(**first), measured(**second)) is expected


def test_table_and_json_say_the_same() -> None:
    report = evaluate(ROWS, one_repeat(0))
    lines = render_table(report).splitlines()
    assert len({len(line) for line in lines[: len(ROWS) + 2]}) == 1
    static = next(line for line in lines if line.startswith("static:8"))
    assert static.split() == ["static:8", "3.00", "3.00", "2.50", "0.50", "2.00", "0.25", "yes"]

    line = to_json(report, {"num_prompts": 1})
    assert "\n" not in line
    document = json.loads(line)
    assert document["num_prompts"] == 1
    assert document["rows"]["static:8"]["ratio_to_off"] == 3.0
    assert document["rows"]["off"]["identical_to_off"] is True
    assert [bar["met"] for bar in document["bars"]] == [True, True, True]
