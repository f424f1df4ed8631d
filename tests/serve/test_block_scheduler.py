"""The block scheduler on the real application: measured costs, equal outputs, and its operators' routes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_app import SMALL, Output, ServedApp, changed, running

from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.chat_tokenizer import ChatTokenizer
from loadtest import prompt_sets
from services.config import AppArgs
from services.spec import make_spec

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

KEY = "a key for these tests"
NUM_PROMPTS = 48
UNPRICED = "no cost has been measured yet"
POLICIES = (None, None, "adaptive", "table", "static:8", "off")
"""None is the default, ``adaptive``."""


@pytest.fixture(scope="module")
def cost_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured-costs")


@pytest.fixture(scope="module")
def swept_args(app_args: AppArgs, cost_folder: Path) -> AppArgs:
    """The sweep as shipped, in a folder of its own."""
    shipped = type(app_args.block_scheduler)()
    return changed(
        app_args,
        engine={"policy": "adaptive"},
        block_scheduler={"sweep_s": 4 * shipped.sweep_s, "cost_folder": str(cost_folder)},
        gateway={"admin_key": KEY},
        verifier=SMALL,
        drafter=SMALL,
    )


@pytest.fixture(scope="module")
def swept(http_port: int, swept_args: AppArgs) -> Iterator[ServedApp]:
    yield from running(swept_args, "swept", http_port)


@pytest.fixture(scope="module")
def prompts(app_args: AppArgs) -> list[list[int]]:
    tokenizer = ChatTokenizer.load(make_spec(app_args).target_path)
    chosen = prompt_sets.load("mixed")[:NUM_PROMPTS]
    return [tokenizer._encode_chat(prompt.messages)[-600:] for prompt in chosen]


def requests_for(prompts: list[list[int]], policies: tuple[str | None, ...]) -> list[Any]:
    """Mixed lengths and temperatures; the same whatever the policies."""
    rng = random.Random(7)
    return [
        GenerationRequest(
            f"{policies[0]}-{i}",
            prompt,
            rng.randint(8, 48),
            SamplingParams(
                rng.choice((0.0, 0.8)), rng.choice((1.0, 0.95)), rng.choice((0, 20)), seed=i
            ),
            [2],
            policies[i % len(policies)],
        )
        for i, prompt in enumerate(prompts)
    ]


def ask(app: ServedApp, **options: Any) -> dict[str, Any]:
    """The ``dflash`` object of one answer."""
    body = {
        "model": app.args.model.id,
        "prompt": "How many pens has Sara?",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "dflash": {"stats": True, **options},
    }
    response = httpx.post(f"{app.base_url}/v1/completions", json=body, timeout=60)
    return dict(response.raise_for_status().json()["dflash"])


def admin(app: ServedApp, path: str, key: str = KEY, **body: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    method = "POST" if body else "GET"
    return httpx.request(
        method, f"{app.base_url}{path}", json=body or None, headers=headers, timeout=60
    )


def decisions(app: ServedApp, last: int = 512) -> list[str]:
    (log,) = admin(app, f"/debug/block_scheduler?last={last}").json().values()
    return list(log)


def test_adaptive_equals_off_token_for_token_among_requests_of_all_kinds(
    swept: ServedApp, prompts: list[list[int]]
) -> None:
    def answers(outputs: list[Output]) -> list[tuple[list[int], str]]:
        return [(output.token_ids, output.finish_reason) for output in outputs]

    plain = answers(swept.run(requests_for(prompts, ("off",)), concurrency=1))
    for policies in (("adaptive",), POLICIES):
        for concurrency in (1, 16):
            outputs = swept.run(requests_for(prompts, policies), concurrency)
            assert answers(outputs) == plain
    logged = decisions(swept)
    assert any(" speculate: " in line or " probe: " in line for line in logged)
    assert not any(UNPRICED in line for line in logged)


def test_steps_are_explained_in_words(swept: ServedApp) -> None:
    ask(swept)
    (line,) = decisions(swept, last=1)
    assert "1 rows: " in line and "width" in line
    assert len(decisions(swept, last=5)) == 5


def test_a_request_overrides_the_policy(swept: ServedApp) -> None:
    off, wide = ask(swept, policy="off"), ask(swept, policy="static:16")
    assert off["num_draft_tokens"] == 0
    assert wide["num_draft_tokens"] > 10 * (wide["num_cycles"] - 1)
    assert ask(swept, policy="table")["num_draft_tokens"] > 0
    for policy in ("off", "static:16", "table", "adaptive"):
        assert ask(swept, policy=policy)["policy"] == policy
    assert ask(swept)["policy"] == "adaptive"


def test_operators_switch_the_policy_at_run_time(swept: ServedApp) -> None:
    for key in ("no key", "another key than this"):
        assert admin(swept, "/admin/policy", key, policy="off").status_code == 401
        assert admin(swept, "/debug/block_scheduler", key).status_code == 401
    assert ask(swept)["policy"] == "adaptive"
    refused = admin(swept, "/admin/policy", policy="static:17")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dflash.policy")
    try:
        for policy in ("off", "static:4", "table"):
            changed_to = admin(swept, "/admin/policy", policy=policy)
            assert changed_to.json() == {"policy": policy, "engine_groups": 1}
            told = ask(swept)
            assert told["policy"] == policy
            assert told["drafter"] == ("none" if policy == "off" else "default")
            assert (told["num_draft_tokens"] == 0) == (policy == "off")
            assert ask(swept, policy="static:8")["policy"] == "static:8"
    finally:
        admin(swept, "/admin/policy", policy="adaptive")
    assert ask(swept)["policy"] == "adaptive"


def test_metrics_show_the_scheduler(swept: ServedApp) -> None:
    ask(swept)
    text = httpx.get(f"{swept.base_url}/metrics", timeout=60).text
    for name in (
        "dflash_block_width_bucket",
        "dflash_block_scheduler_state",
        "dflash_block_switches_total",
        "dflash_block_observed_over_predicted",
        "dflash_block_brier_score",
        "dflash_block_survival",
    ):
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        assert lines, name
        assert all('lane="0"' in line for line in lines)
    rows = [line for line in text.splitlines() if line.startswith("dflash_block_width_count{")]
    assert sum(float(line.split()[-1]) for line in rows) > 0


def test_without_a_key_operators_have_no_routes(served: ServedApp) -> None:
    assert admin(served, "/admin/policy", policy="off").status_code == 404
    assert admin(served, "/debug/block_scheduler").status_code == 404
    assert ask(served)["policy"] == served.args.engine.policy


def test_the_next_start_takes_the_kept_costs_and_another_engine_does_not(
    http_port: int, swept: ServedApp, cost_folder: Path
) -> None:
    """No sweep in these two, so only kept costs can price a step."""
    (kept,) = cost_folder.iterdir()
    content = kept.read_text()
    for name, draft_widths, is_priced in (("again", None, True), ("other", [4, 8], False)):
        scheduler: dict[str, Any] = {"sweep_s": 0}
        if draft_widths:
            scheduler["draft_widths"] = draft_widths
        args = changed(swept.args, block_scheduler=scheduler)
        for app in running(args, name, http_port):
            ask(app)
            logged = decisions(app)
            assert logged
            assert all((UNPRICED in line) != is_priced for line in logged), logged[-3:]
    assert [path.read_text() for path in cost_folder.iterdir()] == [content]
