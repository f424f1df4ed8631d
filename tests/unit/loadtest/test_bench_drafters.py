"""Rows of other drafters."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from loadtest_fakes import FakeServer

from loadtest import bench
from loadtest.bench_drafters import has_dflash, with_ngram
from loadtest.bench_rows import ApiClient, BenchPrompt, ServedRow
from loadtest.processes import BenchError
from loadtest.prompt_sets import Prompt
from services.config import AppArgs

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


def test_a_row_names_its_drafter(fake_server: FakeServer) -> None:
    fake_server.status = 400
    row = ServedRow(ApiClient(fake_server.base_url), "demo", "static:8", "ngram")
    assert row.name == "ngram static:8"
    with pytest.raises(BenchError):
        row.measure(BenchPrompt(Prompt("p", "chat", []), [1]), 8, 0)
    (body,) = fake_server.bodies
    assert body["dflash"] == {"policy": "static:8", "drafter": "ngram", "stats": True}


@pytest.mark.parametrize(
    "model", [{}, {"drafters": {"other": "x"}}, {"drafters": {"ngram": "mine"}}]
)
def test_a_started_server_gets_the_drafter(tmp_path: Path, model: dict[str, object]) -> None:
    config = tmp_path / "config.yaml"
    values = {
        "http_options": {"port": 1},
        "applications": [{"name": "a", "args": {"model": model}}],
    }
    config.write_text(yaml.safe_dump(values))
    with with_ngram(config) as copy:
        changed = yaml.safe_load(copy.read_text())
    assert not copy.exists() and changed["http_options"] == {"port": 1}
    expected = {"ngram": "ngram", **(model.get("drafters") or {})}  # type: ignore[dict-item]
    assert changed["applications"][0]["args"]["model"] == {**model, "drafters": expected}


def test_the_shipped_config_takes_it() -> None:
    with with_ngram(ROOT / "config.yaml") as copy:
        (application,) = yaml.safe_load(copy.read_text())["applications"]
    args = AppArgs.model_validate(application["args"])
    assert list(args.model.all_drafters) == ["default", "ngram"]


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [(None, True), ("z-lab/pair", True), ("ngram", False), ("none", False), ("eagle", False)],
)
def test_the_packages_loop_is_for_dflash_alone(
    drafter: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("eagle").mkdir()
    Path("eagle/config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    model = {} if drafter is None else {"drafter": drafter}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": {"model": model}}]}))
    assert has_dflash(config) == expected


def test_the_embedded_drafter_is_dflash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert has_dflash(ROOT / "config.yaml")
    assert not has_dflash(ROOT / "configs/gemma3-270m.yaml")


def test_which_rows_there_are() -> None:
    assert bench.parse_arguments([]).drafters == "ngram=static:8"
    assert bench.parse_arguments(["--base-url", "http://x"]).drafters == ""
    assert bench.parse_arguments(["--drafters", ""]).drafters == ""
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--drafters", "ngram"])
