"""Command lines, choices and places of the peers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from loadtest.closed_loop import Cell
from loadtest.peers import __main__ as peers
from loadtest.peers.gguf_convert import pre_tokenizer_name
from loadtest.peers.places import GGUF_TYPES, ROOT, Places
from loadtest.peers.setups import Settings, Setup, all_setups, choose, llama_setup, vllm_setup
from loadtest.peers.visits import CellResult, Plan
from loadtest.processes import BenchError

pytestmark = pytest.mark.unit

PAIR = {"target": Path("/pair/target"), "drafter": Path("/pair/drafter")}


def settings(tmp_path: Path) -> Settings:
    return Settings(Places(tmp_path), PAIR, 9999, vllm_threads=2, llama_threads=1)


def value_of(setup: Setup, option: str) -> str:
    return setup.command[setup.command.index(option) + 1]


def test_vllm_drafts_one_token_less_than_the_draft_block_has(tmp_path: Path) -> None:
    setup = vllm_setup(settings(tmp_path), "float32", "dflash:16")
    assert setup.name == "vllm/float32/dflash:16"
    assert setup.command[0] == str(tmp_path / "vllm/venv/bin/python")
    assert json.loads(value_of(setup, "--speculative-config")) == {
        "method": "dflash",
        "model": "/pair/drafter",
        "num_speculative_tokens": 15,
    }
    assert value_of(setup, "--dtype") == "float32"
    assert value_of(setup, "--port") == "9999"
    assert "--no-enable-prefix-caching" in setup.command
    assert setup.environment["LD_PRELOAD"].endswith("libiomp5.so")
    assert setup.environment["KMP_BLOCKTIME"] == "1"
    assert setup.environment["OMP_NUM_THREADS"] == "2"
    assert setup.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_vllm_without_a_drafter(tmp_path: Path) -> None:
    plain = vllm_setup(settings(tmp_path), "bfloat16", "plain")
    assert "--speculative-config" not in plain.command
    ngram = vllm_setup(settings(tmp_path), "bfloat16", "ngram")
    assert json.loads(value_of(ngram, "--speculative-config"))["method"] == "ngram"


def test_llama_in_f32_keeps_its_cache_in_f32(tmp_path: Path) -> None:
    exact = llama_setup(settings(tmp_path), "f32", "dflash:8")
    assert value_of(exact, "--spec-draft-n-max") == "7"
    assert value_of(exact, "--spec-type") == "draft-dflash"
    assert value_of(exact, "-md") == str(tmp_path / "llama/drafter-f32.gguf")
    assert value_of(exact, "--cache-type-k") == value_of(exact, "--spec-draft-type-k") == "f32"
    assert value_of(exact, "--threads") == "1"
    assert not exact.keep_alive
    plain = llama_setup(settings(tmp_path), "bf16", "plain")
    assert "--cache-type-k" not in plain.command
    assert "-md" not in plain.command
    assert "--no-cache-prompt" in plain.command


def test_choose_takes_patterns_and_refuses_unknown_ones(tmp_path: Path) -> None:
    setups = all_setups(settings(tmp_path))
    names = [setup.name for setup in setups]
    assert len(set(names)) == len(names)
    chosen = [setup.name for setup in choose(setups, ["ours", "vllm/*/dflash:8"])]
    assert chosen == ["ours", "vllm/bfloat16/dflash:8", "vllm/float32/dflash:8"]
    with pytest.raises(ValueError, match="no setup is called 'sglang'"):
        choose(setups, ["ours", "sglang"])


def test_a_peer_is_missing_until_all_its_files_are_there(tmp_path: Path) -> None:
    places = Places(tmp_path)
    assert "llama-server" in (places.missing("llama") or "")
    files = [places.llama_server]
    files += [places.gguf(role, kind) for role in ("target", "drafter") for kind in GGUF_TYPES]
    for path in files:
        assert places.missing("llama") is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert places.missing("llama") is None
    places.reason_file("llama").write_text("no compiler\n")
    assert places.missing("llama") == "no compiler"


def test_peers_that_are_not_here_are_named_not_visited(tmp_path: Path) -> None:
    options = peers.parse_arguments(["run", "--peers", "ours,vllm"])
    setups, missing = peers.chosen_setups(options, settings(tmp_path))
    assert [setup.name for setup in setups] == ["ours"]
    assert list(missing) == ["vllm"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--levels", "1,x"],
        ["--levels", "0"],
        ["--policies", "static:4"],
        ["--seconds", "0"],
        ["--peers", "sglang"],
        ["--vllm-threads", "0"],
    ],
)
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse_arguments(["run", *arguments])
    assert arguments[0].removeprefix("--").split("-")[-1] in capsys.readouterr().err


def test_our_tokenizer_splits_as_qwen2_does() -> None:
    path = ROOT / "models/demo/target/tokenizer.json"
    ours = json.loads(path.read_text(encoding="utf-8"))
    assert pre_tokenizer_name(ours) == "qwen2"
    byte_level = {"type": "ByteLevel", "use_regex": True}
    assert pre_tokenizer_name({"pre_tokenizer": byte_level}) == "gpt-2"
    ours["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x"
    with pytest.raises(ValueError, match="no known name"):
        pre_tokenizer_name(ours)


def test_a_failure_is_one_line_with_the_end_of_the_log() -> None:
    error = BenchError("llama-server: ended with status 1\nloading\nunknown model architecture\n\n")
    expected = "llama-server: ended with status 1 (unknown model architecture)"
    assert peers.in_one_line(error) == expected
    assert peers.in_one_line(BenchError("no log")) == "no log"


def test_a_failed_visit_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def visit(setup: Setup, _plan: object, number: int) -> Iterator[CellResult]:
        order.append((number, setup.name))
        yield CellResult(setup.name, number, Cell(setup.name, 1, 0.0, 1.0, ()), None, 0.0)
        if setup.name == "vllm/x":
            raise BenchError("gone")

    monkeypatch.setattr(peers, "visit", visit)
    failures: dict[str, str] = {}
    setups = [Setup("ours", "ours"), Setup("vllm/x", "vllm"), Setup("llama/x", "llama")]
    plan = cast(Plan, None)  # the visit above needs none
    results = peers.measure_all(setups, plan, rounds=2, failures=failures)
    assert [name for _, name in order] == [
        *("ours", "vllm/x", "llama/x"),
        *("vllm/x", "llama/x", "ours"),
    ]
    assert len(results) == 6
    assert failures == {"vllm/x": "gone"}
    assert "vllm/x" in capsys.readouterr().err
