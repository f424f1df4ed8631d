"""The closed loop against a scripted server, and what its cells become."""

from __future__ import annotations

import asyncio
import json

import pytest
from loadtest_fakes import FakeServer, frame

from loadtest import bench_serving
from loadtest.closed_loop import Answer, Cell, ClosedLoop
from loadtest.processes import BenchError
from loadtest.prompt_sets import Prompt
from loadtest.serving_report import ServingReport, ServingRow, evaluate, render_table, to_json

pytestmark = pytest.mark.unit

PROMPTS = [Prompt(f"p{i}", "chat", [{"role": "user", "content": f"q{i}"}]) for i in range(3)]


STREAM = [
    frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
    frame({"choices": [{"delta": {"content": "4"}, "finish_reason": None}]}),
    frame({"choices": [{"delta": {"content": "2 apples"}, "finish_reason": "stop"}]}),
    frame(
        {
            "choices": [],
            "usage": {"completion_tokens": 6},
            "dflash": {"committed_per_cycle": [5], "num_cycles": 1},
        }
    ),
    b"data: [DONE]\n\n",
]


def run_cell(server: FakeServer, num_streams: int = 2) -> Cell:
    loop = ClosedLoop(server.base_url, "demo", PROMPTS, 7)
    return asyncio.run(loop.run("static:8", num_streams, 0.02, 0.4))


def test_streams_follow_each_other(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    cell = run_cell(fake_server)
    assert len(cell.answers) == len(fake_server.bodies) > 4
    assert {body["messages"][0]["content"] for body in fake_server.bodies} == {"q0", "q1", "q2"}
    salts = [body["cache_salt"] for body in fake_server.bodies]
    assert len(set(salts)) == len(salts), "no prompt may be found cached"
    body = fake_server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("demo", 7, 0)
    assert body["dflash"] == {"policy": "static:8", "stats": True}
    answer = cell.answers[0]
    assert (answer.num_tokens, answer.num_first) == (6, 1)
    assert (answer.num_cycles, answer.num_committed) == (1, 5)
    assert answer.start_s < answer.first_s <= answer.last_s
    assert cell.tokens_per_s > 0
    assert answer.text == "42 apples"
    assert answer.prompt_id in {"p0", "p1", "p2"}


def test_cells_to_compare_get_the_same_prompts(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    loop = ClosedLoop(fake_server.base_url, "demo", PROMPTS, 7)
    for _ in range(2):
        fake_server.bodies.clear()
        asyncio.run(loop.run("off", 1, 0.0, 0.05, first_prompt=4))
        assert [body["messages"][0]["content"] for body in fake_server.bodies[:3]] == [
            "q1",
            "q2",
            "q0",
        ][: len(fake_server.bodies)]


def test_other_servers_get_no_fields_of_ours(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    loop = ClosedLoop(fake_server.base_url, "pair", PROMPTS, 7, is_ours=False, keep_alive=False)
    asyncio.run(loop.run("vllm", 1, 0.0, 0.05))
    ours = {"cache_salt", "dflash"}
    assert fake_server.bodies
    assert not any(ours & body.keys() for body in fake_server.bodies)
    assert fake_server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (429, [b'{"error": {"message": "queue is full"}}'], "429.*queue is full"),
        (200, STREAM[:-1], "without"),
        (200, [frame({"error": {"code": "engine_failed", "message": "gone"}})], "gone"),
    ],
)
def test_a_failed_request_ends_the_run(
    fake_server: FakeServer, status: int, reply: list[bytes], message: str
) -> None:
    fake_server.status, fake_server.reply = status, reply
    with pytest.raises(BenchError, match=message):
        run_cell(fake_server)


def test_a_dead_server_ends_the_run(fake_server: FakeServer) -> None:
    fake_server.base_url = "http://127.0.0.1:9"
    with pytest.raises(BenchError, match="static:8"):
        run_cell(fake_server)


def answer(start: float, first: float, last: float, tokens: int = 11) -> Answer:
    return Answer(start, first, last, tokens, 1, 5, tokens - 1)


def test_tokens_are_counted_where_they_fall() -> None:
    inside = answer(0.0, 1.0, 3.0)
    assert inside.tokens_between(0.0, 4.0) == 11
    assert inside.tokens_between(0.0, 2.0) == 1 + 5
    assert inside.tokens_between(2.0, 4.0) == 5
    assert inside.tokens_between(1.5, 2.0) == 2.5
    assert inside.tokens_between(3.5, 4.0) == 0
    at_once = answer(0.0, 1.0, 1.0, tokens=1)
    assert at_once.tokens_between(0.0, 4.0) == 1
    assert at_once.tpot_s is None
    assert inside.ttft_s == 1.0
    assert inside.tpot_s == 0.2


def cell(policy: str, level: int, tokens: int) -> Cell:
    return Cell(policy, level, 0.0, 1.0, (answer(0.0, 0.1, 0.9, tokens),))


def test_report_compares_within_a_repeat() -> None:
    cells = [
        *(cell("off", 1, 10), cell("static:4", 1, 30), cell("static:4", 1, 60)),
        *(cell("off", 1, 30), cell("off", 8, 40), cell("static:4", 8, 20)),
        *(cell("off", 8, 40), cell("static:4", 8, 44)),
    ]
    report = evaluate(cells)
    assert [(row.num_streams, row.policy) for row in report.rows] == [
        *((1, "off"), (1, "static:4")),
        *((8, "off"), (8, "static:4")),
    ]
    row = report.rows[1]
    assert (row.tokens_per_s, row.ratio_to_off) == (45, 2.5)
    assert row.ttft_p50_ms == 100
    assert row.acceptance_length == (29 + 59) / 10
    text = render_table(report)
    assert "best width / off at 1 streams: 2.50 with static:4 (bar 2.00) met" in text
    assert "best width / off at 8 streams: 0.80 with static:4 (bar 1.30) MISSED" in text
    assert "plain decoding wins from 8 streams on" in text
    line = json.loads(to_json(report, {"model": "demo"}))
    assert line["plain_wins_from"] == 8
    assert line["rows"][1]["tokens_per_s"] == 45


@pytest.mark.parametrize(
    ("ratios", "crossing"),
    [({1: 2.0, 8: 1.1}, None), ({1: 2.0, 8: 0.9, 16: 1.2}, None), ({1: 0.9, 8: 0.8}, 1)],
)
def test_where_plain_decoding_wins(ratios: dict[int, float], crossing: int | None) -> None:
    rows = [
        ServingRow(level, policy, 1.0, ratio, 1.0, 1.0, 1.0, 1.0, 1.0, 1)
        for level, best in ratios.items()
        for policy, ratio in (("off", 1.0), ("static:4", best))
    ]
    assert ServingReport(rows).plain_wins_from == crossing


@pytest.mark.parametrize(
    "arguments",
    [["--levels", "1,x"], ["--levels", "0"], ["--policies", "static:4"], ["--seconds", "0"]],
)
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.parse_arguments(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_whole_run(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.reply = STREAM
    options = ["--levels", "1,2", "--policies", "off,static:8", "--repeats", "1"]
    options += ["--seconds", "0.05", "--warm-up", "0", "--prompts", "chat,code_stubs"]
    arguments = bench_serving.parse_arguments([*options, "--base-url", fake_server.base_url])
    bench_serving.run(arguments)
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["num_streams"] for row in line["rows"]] == [1, 1, 2, 2]
    assert line["prompts"] == "chat,code_stubs"
