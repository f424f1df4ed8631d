"""EAGLE-3, prompt lookup and no drafter on real actors, chosen by one key of the config, equal to ``off``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from eagle_checkpoint import save_random_eagle_for
from served_app import ROOT, ServedApp, changed, running, snapshot

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

NUM_PROMPTS = 8
TARGET = ROOT / "models/demo/target"


@pytest.fixture(scope="module")
def prompts(app_args: AppArgs) -> list[list[int]]:
    tokenizer = ChatTokenizer.load(make_spec(app_args).target_path)
    found = [*prompt_sets.load("code_stubs")[:4], *prompt_sets.load("word_problems")[:4]]
    return [tokenizer._encode_chat(prompt.messages) for prompt in found]


@pytest.fixture(scope="module", params=["ngram", "eagle3", "none"])
def app(
    request: pytest.FixtureRequest,
    http_port: int,
    app_args: AppArgs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServedApp]:
    drafter: str = request.param
    if drafter == "eagle3":
        path: Path = tmp_path_factory.mktemp("models") / "eagle3"
        save_random_eagle_for(TARGET, path)
        drafter = str(path)
    model = {"drafter": drafter}
    # The sweep runs too: it must work with every kind.
    args = changed(app_args, model=model, block_scheduler={"sweep_s": 2.0, "cost_folder": None})
    yield from running(args, f"kind-{request.param}", http_port)


def requests_for(
    prompts: list[list[int]], policy: str, temperature: float
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{policy}-{temperature}-{i}",
            prompt,
            40,
            SamplingParams(temperature, seed=i),
            [2],
            policy,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_equals_plain_decoding(
    app: ServedApp, prompts: list[list[int]], temperature: float
) -> None:
    expected = app.run(requests_for(prompts, "off", temperature), concurrency=4)
    policies = ["adaptive"]
    if app.args.model.drafter != "none":
        policies += ["static:4", "static:16", "static-tree:8"]
    for policy in policies:
        found = app.run(requests_for(prompts, policy, temperature), concurrency=4)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    totals = snapshot(app)["drafters"]["default"]
    if app.args.model.drafter == "ngram":
        assert totals["num_accepted_drafts"] > 20
    elif app.args.model.drafter == "none":
        assert totals["num_draft_tokens"] == 0
    else:
        assert totals["num_draft_tokens"] > 100
