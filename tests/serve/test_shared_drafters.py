"""One drafter for two verifiers, and two drafters for one target: on real actors, equal to ``off``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from second_drafter import save_second_drafter
from served_app import ROOT, Output, ServedApp, changed, running, snapshot

from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.chat_tokenizer import ChatTokenizer
from loadtest import prompt_sets
from services.config import AppArgs
from services.spec import make_spec

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

NUM_PROMPTS = 12
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(app_args: AppArgs) -> list[list[int]]:
    tokenizer = ChatTokenizer.load(make_spec(app_args).target_path)
    problems = prompt_sets.load("mixed")[:NUM_PROMPTS]
    return [tokenizer._encode_chat(problem.messages) for problem in problems]


@pytest.fixture(scope="module")
def two_lanes(http_port: int, app_args: AppArgs) -> Iterator[ServedApp]:
    yield from running(changed(app_args, drafter={"shared_by": 2}), "lanes", http_port)


@pytest.fixture(scope="module")
def two_drafters(
    http_port: int, app_args: AppArgs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedApp]:
    second = tmp_path_factory.mktemp("models") / "second"
    save_second_drafter(ROOT / "models/demo/drafter", second, noise=0.2)
    args = changed(
        app_args,
        model={"drafters": {"second": str(second)}, "non_thinking_drafter": "second"},
    )
    yield from running(args, "drafters", http_port)


def requests_for(
    prompts: list[list[int]], policy: str, temperature: float, drafters: list[str | None]
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{policy}-{i}",
            prompt,
            NUM_TOKENS,
            SamplingParams(temperature, seed=i),
            [2],
            policy,
            drafter=drafters[i % len(drafters)],
        )
        for i, prompt in enumerate(prompts)
    ]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_verifiers_share_a_drafter(
    two_lanes: ServedApp, prompts: list[list[int]], temperature: float
) -> None:
    plain = two_lanes.run(requests_for(prompts, "off", temperature, [None]), concurrency=1)
    before = snapshot(two_lanes)
    outputs = two_lanes.run(requests_for(prompts, "static:8", temperature, [None]), concurrency=8)
    assert tokens(outputs) == tokens(plain)
    now = snapshot(two_lanes)
    assert now["num_failed_steps"] == 0
    for lane, lane_before in zip(now["lanes"], before["lanes"], strict=True):
        assert lane["num_steps"] > lane_before["num_steps"], "eight at a time keep both busy"
        assert lane["num_free_pages"] == lane["num_pages"]
    cycles = sum(output.stats.num_cycles for output in outputs)
    assert sum(sum(output.stats.committed_per_cycle) for output in outputs) > 1.3 * cycles


def test_requests_find_the_lane_that_has_their_prefix(two_lanes: ServedApp) -> None:
    long = [[(31 * i + 7 * j) % 900 + 50 for j in range(70)] for i in range(4)]
    asked = requests_for(long, "static:4", 0.0, [None])
    assert [o.stats.num_cached_tokens for o in two_lanes.run(asked, concurrency=4)] == [0] * 4
    again = two_lanes.run(asked, concurrency=1)
    assert [output.stats.num_cached_tokens for output in again] == [64] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_drafters_give_one_output(
    two_drafters: ServedApp, prompts: list[list[int]], temperature: float
) -> None:
    plain = two_drafters.run(requests_for(prompts, "off", temperature, [None]), concurrency=1)
    for drafters in (["second"], ["default", "second", None]):
        asked = requests_for(prompts, "static:8", temperature, drafters)
        assert tokens(two_drafters.run(asked, concurrency=8)) == tokens(plain)
    now = snapshot(two_drafters)
    assert now["num_failed_steps"] == 0
    assert now["num_free_pages"] == now["num_pages"]


def test_each_drafter_has_statistics_of_its_own(
    two_drafters: ServedApp, prompts: list[list[int]]
) -> None:
    before = snapshot(two_drafters)["drafters"]
    outputs = two_drafters.run(
        requests_for(prompts, "static:8", 0.0, ["default", "second"]), concurrency=4
    )
    now = snapshot(two_drafters)["drafters"]
    counted = {name: {key: now[name][key] - before[name][key] for key in now[name]} for name in now}
    for i, name in enumerate(("default", "second")):
        mine = [output.stats for output in outputs[i::2]]
        assert counted[name]["num_cycles"] == sum(stats.num_cycles for stats in mine)
        assert counted[name]["num_draft_tokens"] == sum(stats.num_draft_tokens for stats in mine)
    # All prompts on each, since they differ: noise costs acceptance, but not all of it.
    first, second = (
        [o.stats for o in two_drafters.run(requests_for(prompts, "static:8", 0.0, [d]), 4)]
        for d in ("default", "second")
    )
    lengths = [
        sum(sum(s.committed_per_cycle) for s in stats) / sum(s.num_cycles for s in stats)
        for stats in (first, second)
    ]
    assert lengths[0] > lengths[1] > 1.2


def test_http_names_drafters_and_labels_their_metrics(two_drafters: ServedApp) -> None:
    def ask(**fields: object) -> httpx.Response:
        body = {
            "model": two_drafters.args.model.id,
            "messages": [{"role": "user", "content": "How many pens has Sara?"}],
            "max_tokens": 12,
            "temperature": 0,
            **fields,
        }
        url = f"{two_drafters.base_url}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=60)

    answers = {
        name: ask(**fields)
        for name, fields in {
            "default": {"dflash": {"stats": True}},
            "second": {"dflash": {"stats": True, "drafter": "second"}},
            "none": {"dflash": {"stats": True, "policy": "off"}},
        }.items()
    }
    for name, answer in answers.items():
        assert answer.status_code == 200, answer.text
        assert answer.json()["dflash"]["drafter"] == name
    contents = {a.json()["choices"][0]["message"]["content"] for a in answers.values()}
    assert len(contents) == 1
    by_mode = ask(chat_template_kwargs={"enable_thinking": False}, dflash={"stats": True})
    assert by_mode.json()["dflash"]["drafter"] == "second"
    assert ask(dflash={"drafter": "third"}).json()["error"]["param"] == "dflash.drafter"
    metrics = httpx.get(f"{two_drafters.base_url}/metrics").text
    for name in answers:
        assert f'dflash_cycles_total{{drafter="{name}"}}' in metrics


def test_the_second_drafter_is_another(tmp_path: Path) -> None:
    """A guard: two equal drafters would prove nothing."""
    save_second_drafter(ROOT / "models/demo/drafter", tmp_path / "second", noise=0.2)
    first, second = (
        (path / "model.safetensors").read_bytes()
        for path in (ROOT / "models/demo/drafter", tmp_path / "second")
    )
    assert first != second
