"""The master test: served output equals plain decoding, token for token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from served_app import Output, ServedApp
from transformers import AutoModelForCausalLM

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

NUM_PROMPTS = 100
DRAFT_BLOCK_SIZES = (2, 4, 8, 16)
TEMPERATURES = (0.0, 0.8)
NUM_TREE_PROMPTS = 32
TREES = (4, 8, 16, 32, 64)
TREE_TEMPERATURES = (0.0, 0.7, 1.0)


def _messages() -> list[list[dict[str, str]]]:
    """Ours, half of them replaced by public rows where those are at hand."""
    own = [p.messages for p in prompt_sets.load("mixed")][:NUM_PROMPTS]
    sets = [s for s in prompt_sets.PUBLIC_SETS if s in prompt_sets.available_sets()]
    public = [p.messages for s in sets for p in prompt_sets.load(s, 25)]
    return (public + own)[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def prompts(app_args: AppArgs) -> list[list[int]]:
    tokenizer = ChatTokenizer.load(make_spec(app_args).target_path)
    encoded = [tokenizer._encode_chat(messages) for messages in _messages()]
    assert len(encoded) == NUM_PROMPTS
    return [ids[-800:] for ids in encoded]


def requests_for(
    prompts: list[list[int]], temperature: float, policy: str, eos: int
) -> list[GenerationRequest]:
    """Mixed lengths, a seed of its own for each prompt; the same for every policy."""
    rng = random.Random(5)
    return [
        GenerationRequest(
            f"{policy}-{temperature}-{i}",
            prompt,
            rng.randint(8, 24),
            SamplingParams(
                temperature, rng.choice([1.0, 0.95]), rng.choice([0, 20]), seed=1000 + i
            ),
            [eos],
            policy,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def plain(served: ServedApp, prompts: list[list[int]]) -> dict[float, list[Output]]:
    """Policy ``off``, one request at a time: what everything else must equal."""
    return {
        temperature: served.run(requests_for(prompts, temperature, "off", 2), concurrency=1)
        for temperature in TEMPERATURES
    }


def test_off_equals_transformers_generate(
    plain: dict[float, list[Output]], prompts: list[list[int]], app_args: AppArgs
) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        Path(make_spec(app_args).target_path), dtype=torch.float32
    ).eval()
    for prompt, output, request in zip(
        prompts, plain[0.0], requests_for(prompts, 0.0, "off", 2), strict=True
    ):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_tokens,
                do_sample=False,
                eos_token_id=2,
                temperature=None,
                top_p=None,
                top_k=None,
            )[0, len(prompt) :].tolist()
        assert output.token_ids == expected


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", DRAFT_BLOCK_SIZES)
def test_static_equals_off(
    served: ServedApp,
    prompts: list[list[int]],
    plain: dict[float, list[Output]],
    size: int,
    temperature: float,
    concurrency: int,
) -> None:
    outputs = served.run(
        requests_for(prompts, temperature, f"static:{size}", 2), concurrency=concurrency
    )
    for output, expected in zip(outputs, plain[temperature], strict=True):
        assert output.token_ids == expected.token_ids
        assert output.finish_reason == expected.finish_reason
    cycles = sum(o.stats.num_cycles for o in outputs)
    committed = sum(sum(o.stats.committed_per_cycle) for o in outputs)
    # Speculation really ran: more than one token a cycle, far more when greedy.
    assert committed / cycles > (1.3 if temperature == 0 else 1.1)


@pytest.fixture(scope="module")
def plain_for_trees(served: ServedApp, prompts: list[list[int]]) -> dict[float, list[Output]]:
    few = prompts[::3][:NUM_TREE_PROMPTS]
    return {
        temperature: served.run(requests_for(few, temperature, "off", 2), concurrency=1)
        for temperature in TREE_TEMPERATURES
    }


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("temperature", TREE_TEMPERATURES)
@pytest.mark.parametrize("size", TREES)
def test_trees_equal_off(
    served: ServedApp,
    prompts: list[list[int]],
    plain_for_trees: dict[float, list[Output]],
    size: int,
    temperature: float,
    concurrency: int,
) -> None:
    few = prompts[::3][:NUM_TREE_PROMPTS]
    asked = requests_for(few, temperature, f"static-tree:{size}", 2)
    outputs = served.run(asked, concurrency=concurrency)
    for output, expected in zip(outputs, plain_for_trees[temperature], strict=True):
        assert output.token_ids == expected.token_ids
        assert output.finish_reason == expected.finish_reason
    # Trees really ran, and none was larger than asked for.
    most = (size - 1) * sum(o.stats.num_cycles for o in outputs)
    assert 0.5 * most < sum(o.stats.num_draft_tokens for o in outputs) <= most


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_off_is_the_same_in_a_batch(
    served: ServedApp,
    prompts: list[list[int]],
    plain: dict[float, list[Output]],
    temperature: float,
) -> None:
    outputs = served.run(requests_for(prompts, temperature, "off", 2), concurrency=8)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain[temperature]]
