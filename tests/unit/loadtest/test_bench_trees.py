"""Chains and trees: what is sent, in which order, and what the report makes of it."""

from __future__ import annotations

import asyncio
import json

import pytest
from loadtest_fakes import FakeServer, frame

from loadtest import bench_trees
from loadtest.closed_loop import Answer, Cell, ClosedLoop
from loadtest.interleaved import measure_interleaved, orders
from loadtest.prompt_sets import Prompt
from loadtest.tree_report import (
    OBSERVED,
    PREDICTED,
    TreeReport,
    evaluate,
    positions,
    render_table,
    to_json,
)

pytestmark = pytest.mark.unit

STREAM = [
    frame({"choices": [{"delta": {"content": "42"}, "finish_reason": "stop"}]}),
    frame(
        {
            "choices": [],
            "usage": {"completion_tokens": 6},
            "dflash": {"committed_per_cycle": [5], "num_cycles": 1},
        }
    ),
    b"data: [DONE]\n\n",
]
PROMPTS = [Prompt(f"p{i}", "chat", [{"role": "user", "content": f"q{i}"}]) for i in range(3)]


def answer(number: int, num_cycles: int, text: str = "same") -> Answer:
    """Of 120 committed tokens, outside every window."""
    return Answer(9.0, 9.0, 9.0, 121, 1, num_cycles, 120, text=text, number=number)


def cell(
    policy: str, level: int, rate: float, *answers: Answer, counted: dict[str, float] | None = None
) -> Cell:
    """A window of a second in which an answer nobody else has brought ``rate`` tokens."""
    own = Answer(0.0, 0.5, 0.5, int(rate), int(rate), 0, 0, number=hash(policy))
    return Cell(policy, level, 0.0, 1.0, (own, *answers), counted or {})


RATES = {"off": 100, "static:8": 200, "static:16": 180, "static-tree:16": 220, "adaptive": 215}
CYCLES = {"off": 120, "static:8": 30, "static:16": 24, "static-tree:16": 20, "adaptive": 20}


def cells(levels: tuple[int, ...] = (1, 8), **rates: float) -> list[Cell]:
    """Three repeats, each a tenth faster than the one before."""
    mine = {**RATES, **{name.replace("_", ":"): rate for name, rate in rates.items()}}
    return [
        cell(policy, level, rate * (10 + repeat) / 10, answer(repeat, CYCLES[policy]))
        for repeat in range(3)
        for level in levels
        for policy, rate in mine.items()
    ]


def met(report: TreeReport) -> list[bool | None]:
    return [bar.is_met for bar in report.bars]


def test_positions_of_policies() -> None:
    names = ("off", "static:4", "static-tree:64", "adaptive", "table", "static:x")
    assert [positions(name) for name in names] == [1, 4, 64, None, None, None]


def test_rows_and_met_bars() -> None:
    report = evaluate({0.0: cells(), 0.7: cells(), 1.0: cells()})
    assert [(row.temperature, row.policy) for row in report.rows[:6]] == [
        *((0.0, policy) for policy in RATES),
        (0.7, "off"),
    ]
    tree = report.rows[3]
    assert (tree.num_positions, tree.chain) == (16, "static:16")
    assert tree.acceptance_length == 6
    assert tree.ratio_to_chain == pytest.approx(1.2)
    assert [level.num_streams for level in tree.levels] == [1, 8]
    assert tree.levels[0].tokens_per_s == 242
    assert tree.levels[0].ratio_to_off == pytest.approx(2.2)
    assert (tree.num_compared, tree.num_different) == (6, 0)
    # Three of tau, two of speed (none is asked for at 0.7), and the judged policy's; nothing was predicted.
    assert [round(bar.value or 0, 2) for bar in report.bars] == [1.2, 1.2, 1.2, 1.1, 1.1, 0.98, 0.0]
    assert met(report) == [*[True] * 6, None]
    assert "MISSED" not in render_table(report)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"adaptive": 210.0}, [True, True, False]),
        ({"static_8": 206.0}, [True, False, True]),
        # Plain decoding is a fixed policy too, but no chain.
        ({"off": 230.0}, [True, True, False]),
    ],
)
def test_missed_bars(rates: dict[str, float], expected: list[bool]) -> None:
    report = evaluate({0.0: cells(**rates)})
    assert met(report) == [*expected, None]
    assert render_table(report).count("MISSED") == 1


def test_the_worst_cell_counts() -> None:
    report = evaluate({0.5: [*cells((1,)), *cells((8,), adaptive=100)]})
    assert [round(cell.of_best.value, 2) for cell in report.judged] == [0.98, 0.45]
    assert report.judged[1].best == "static-tree:16"
    assert f"8 streams: {report.judged[1].of_best} of the best" in render_table(report)
    assert report.bars[-2].value == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(
    ("predicted", "worst"), [((100, 100), 1.0), ((100, 104), 0.96), ((100, 88), 0.88)]
)
def test_predictions_too_high_or_too_low_count(predicted: tuple[int, int], worst: float) -> None:
    mine = [
        cell(policy, level, 10, counted={PREDICTED: tokens, OBSERVED: 100})
        for level, tokens in zip((1, 8), predicted, strict=True)
        for policy in ("off", "adaptive")
    ]
    report = evaluate({0.0: mine})
    assert report.bars[-1].value == pytest.approx(worst, abs=0.005)
    assert report.bars[-1].is_met == (worst >= 0.95)
    assert "1.00 of the predicted tokens" in render_table(report)


def test_acceptance_is_compared_on_common_requests() -> None:
    # The tree was asked one more, of which hardly anything was accepted: that says nothing of trees.
    mine = [
        cell("off", 1, 100, answer(0, 120)),
        cell("static:16", 1, 100, answer(0, 24)),
        cell("static-tree:16", 1, 100, answer(0, 20), answer(1, 120)),
    ]
    report = evaluate({1.0: mine})
    assert report.rows[2].ratio_to_chain == pytest.approx(1.2)
    assert report.rows[2].acceptance_length == pytest.approx(240 / 140)
    # No policy was judged, so its bar is not measured.
    assert met(report) == [True, False, None, None]
    assert "not measured" in render_table(report)


def test_trees_are_compared_with_the_widest_chain_of_no_more_positions() -> None:
    policies = ("off", "static:4", "static:16", "static-tree:8", "static-tree:64", "static-tree:2")
    rows = evaluate({0.0: [cell(policy, 4, 10, answer(0, 9)) for policy in policies]}).rows
    assert [row.chain for row in rows[3:]] == ["static:4", "static:16", None]
    # Neither a tree of 16 nor one stream was measured.
    assert met(evaluate({0.0: [cell(p, 4, 10, answer(0, 9)) for p in policies]})) == [None] * 4


def test_answers_that_differ_are_told() -> None:
    mine = [cell("off", 1, 10, answer(0, 9)), cell("static-tree:4", 1, 10, answer(0, 9, "other"))]
    report = evaluate({0.7: mine})
    assert report.rows[1].num_different == 1
    assert "1/1 differ" in render_table(report)


def test_the_last_line_is_json() -> None:
    record = json.loads(to_json(evaluate({0.0: cells()}), {"model": "m"}))
    assert (record["benchmark"], record["model"]) == ("trees", "m")
    assert record["rows"][3]["policy"] == "static-tree:16"
    assert record["rows"][3]["levels"][0]["tokens_per_s"] == 242
    assert record["judged"][0]["best"] == "static-tree:16"
    assert [set(bar) for bar in record["bars"]] == [{"name", "limit", "value", "met"}] * 4


def test_every_second_order_is_the_reverse() -> None:
    assert orders(["a", "b", "c"], 4) == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["b", "c", "a"],
        ["a", "c", "b"],
    ]


def test_policies_get_the_same_requests_and_seeds(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    sampling = {"temperature": 0.7, "top_k": 0}
    loop = ClosedLoop(fake_server.base_url, "demo", PROMPTS, 7, sampling=sampling)
    warm_up_s = {"static:4": 0.0, "static-tree:4": 0.02}
    found = asyncio.run(measure_interleaved({"hot": loop}, [1], warm_up_s, 2, 0.05))
    assert [cell.policy for cell in found["hot"]] == [
        *("static:4", "static-tree:4", "static-tree:4", "static:4")
    ]
    assert fake_server.bodies[0]["top_k"] == 0
    asked: dict[str, set[tuple[int, str]]] = {}
    for body in fake_server.bodies:
        assert body["temperature"] == 0.7
        request = (body["seed"], body["messages"][0]["content"])
        asked.setdefault(body["dflash"]["policy"], set()).add(request)
    assert {(0, "q0"), (37, "q1")} <= asked["static:4"] & asked["static-tree:4"]
    assert found["hot"][-1].answers[0].number == 37


def test_greedy_requests_have_no_seed(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    loop = ClosedLoop(fake_server.base_url, "demo", PROMPTS, 7)
    asyncio.run(loop.run("off", 1, 0.0, 0.02))
    assert "seed" not in fake_server.bodies[0]


def test_loops_share_no_cached_prefix(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    for _ in range(2):
        loop = ClosedLoop(fake_server.base_url, "demo", PROMPTS, 7)
        asyncio.run(loop.run("off", 1, 0.0, 0.02))
    salts = [body["cache_salt"] for body in fake_server.bodies]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--temperatures", "0,hot"], ["--temperatures", "0,-1"], ["--policies", "adaptive"]),
        *(["--adaptive-warm-up", "-1"], ["--repeats", "0"]),
    ],
)
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_trees.parse_arguments(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_whole_run(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.reply = STREAM
    fake_server.metrics = f"# TYPE {PREDICTED} counter\n{PREDICTED} 7.0\n"
    options = ["--levels", "2", "--policies", "off,static:16,static-tree:16,adaptive"]
    options += ["--temperatures", "0,1", "--top-p", "1", "--repeats", "1", "--seconds", "0.25"]
    options += ["--warm-up", "0", "--adaptive-warm-up", "0.02", "--prompts", "chat"]
    arguments = bench_trees.parse_arguments([*options, "--base-url", fake_server.base_url])
    bench_trees.run(arguments)
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(row["temperature"], row["policy"]) for row in line["rows"][3:5]] == [
        *((0, "adaptive"), (1, "off"))
    ]
    assert line["rows"][0]["num_different"] == 0
    assert (line["top_p"], line["top_k"], line["prompts"]) == (1, None, "chat")
    assert {body["top_p"] for body in fake_server.bodies} == {1}
    assert len(line["bars"]) == 6
