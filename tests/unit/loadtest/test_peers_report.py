"""What the cells of several servers become, and what is read from a peer."""

from __future__ import annotations

import json

import pytest
from loadtest_fakes import FakeServer

from loadtest.bench_rows import ApiClient
from loadtest.closed_loop import Answer, Cell, acceptance_length
from loadtest.peers.metrics import DraftCounters, parse_counters, read_counters
from loadtest.peers.report import PeerReport, PeerRow, evaluate, render_table, to_json
from loadtest.peers.same_tokens import check_tokens
from loadtest.peers.visits import CellResult
from loadtest.processes import BenchError
from loadtest.prompt_sets import Prompt

pytestmark = pytest.mark.unit

VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="pair"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="pair"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="pair"} 32.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
"""
LLAMA_METRICS = """\
llamacpp:spec_decode_num_accepted_tokens_total 8
llamacpp:spec_decode_num_drafts_total 4
llamacpp:requests_processing 0
"""


def test_counters_of_both_servers() -> None:
    assert parse_counters(VLLM_METRICS) == DraftCounters(10, 32)
    assert parse_counters(LLAMA_METRICS) == DraftCounters(4, 8)
    assert parse_counters("vllm:num_requests_running 3.0\n") is None


def test_acceptance_length_between_two_readings() -> None:
    assert DraftCounters(30, 62).acceptance_length_since(DraftCounters(10, 32)) == 2.5
    assert DraftCounters(10, 32).acceptance_length_since(DraftCounters(10, 32)) is None


def test_a_server_without_metrics() -> None:
    assert read_counters("http://127.0.0.1:9") is None


def test_prompts_are_compared_token_by_token(fake_server: FakeServer) -> None:
    prompt = Prompt("p7", "chat", [{"role": "user", "content": "hi"}])
    client = ApiClient(fake_server.base_url)
    fake_server.reply = [json.dumps({"prompt": "<s>hi", "tokens": [1, 5, 2]}).encode()]
    for peer in ("vllm", "llama"):
        check_tokens(client, peer, [prompt], {"p7": [1, 5, 2]})
        with pytest.raises(BenchError, match=r"p7 .*token 1 on: \[5, 2\] instead of \[6, 2\]"):
            check_tokens(client, peer, [prompt], {"p7": [1, 6, 2]})
        with pytest.raises(BenchError, match="token 3 on"):
            check_tokens(client, peer, [prompt], {"p7": [1, 5, 2, 9]})
    assert fake_server.paths[:3] == ["/tokenize", "/tokenize", "/tokenize"]
    assert fake_server.paths[3:5] == ["/apply-template", "/tokenize"]
    assert fake_server.bodies[4]["content"] == "<s>hi"


def answer(tokens: int, text: str = "same", prompt_id: str = "p", num_first: int = 1) -> Answer:
    return Answer(0.0, 0.1, 0.9, tokens, num_first, 5, tokens - 1, prompt_id, text)


def result(
    row: str, tokens: int, number: int = 0, level: int = 1, text: str = "same"
) -> CellResult:
    cell = Cell(row, level, 0.0, 1.0, (answer(tokens, text),))
    return CellResult(row, number, cell, 2.0 if "dflash" in row else None, 0.25)


def row_of(report: PeerReport, name: str, level: int = 1) -> PeerRow:
    return next(r for r in report.rows if (r.row, r.num_streams) == (name, level))


def test_bars_compare_best_with_best_within_a_round() -> None:
    report = evaluate(
        [
            *(result("ours/off", 10, 0), result("ours/static:4", 40, 0)),
            *(result("vllm/float32/dflash:16", 20, 0), result("vllm/bfloat16/plain", 99, 0)),
            *(result("ours/off", 10, 1), result("ours/static:4", 30, 1)),
            *(result("vllm/float32/dflash:16", 60, 1), result("vllm/bfloat16/plain", 99, 1)),
            *(result("ours/off", 10, 2), result("ours/static:4", 30, 2)),
            *(result("vllm/float32/dflash:16", 20, 2), result("vllm/bfloat16/plain", 99, 2)),
            result("dflash/float32", 10, 2),
        ],
        {"llama": "no compiler"},
    )
    bars = [(bar.name, bar.limit, round(bar.value or 0, 2)) for bar in report.bars]
    assert bars == [
        (
            "best of ours / vLLM's DFlash at 1 stream (ours/static:4 / vllm/float32/dflash:16)",
            1.0,
            1.5,
        ),
        ("best of ours / dflash package at 1 stream (ours/static:4 / dflash/float32)", 2.0, 3.0),
    ]
    assert [(c.theirs, round(c.ratio, 2)) for c in report.comparisons] == [
        ("vllm/bfloat16/plain", 0.3),
        ("dflash/float32", 3.0),
    ]
    assert row_of(report, "ours/static:4").tokens_per_s == pytest.approx(30)
    text = render_table(report)
    assert "not measured: llama: no compiler" in text
    line = json.loads(to_json(report, {"rounds": 3}))
    assert line["bars"][0]["met"] is True
    assert line["not_measured"] == {"llama": "no compiler"}


def test_without_a_peer_its_bar_is_not_measured() -> None:
    report = evaluate([result("ours/off", 10, level=4)], {"vllm": "not installed"})
    assert [(bar.name, bar.value) for bar in report.bars] == [
        ("best of ours / vLLM's DFlash at 4 streams", None)
    ]
    assert "not measured" in render_table(report)
    assert evaluate([], {"ours": "no port"}).rows == []


def test_texts_are_compared_with_our_plain_decoding() -> None:
    report = evaluate(
        [
            result("ours/off", 10),
            result("vllm/float32/plain", 10),
            result("llama/f32/plain", 10, number=0),
            result("llama/f32/plain", 10, number=1, text="other"),
        ],
        {},
    )
    assert row_of(report, "vllm/float32/plain").same_share == 1.0
    assert row_of(report, "llama/f32/plain").same_share == 0.5
    assert row_of(report, "llama/f32/plain").num_compared == 2
    alone = evaluate([result("vllm/float32/plain", 10)], {})
    assert row_of(alone, "vllm/float32/plain").same_share is None


def test_a_loop_without_a_stream_has_no_time_to_first_token() -> None:
    cell = Cell("dflash/float32", 1, 0.0, 1.0, (answer(8, num_first=0),))
    length = acceptance_length(cell.answers)
    row = row_of(evaluate([CellResult("dflash/float32", 0, cell, length, 0.0)], {}), cell.policy)
    assert row.ttft_p50_ms is None
    assert row.tpot_p50_ms == pytest.approx(100.0)
    assert row.acceptance_length == pytest.approx(7 / 5)
