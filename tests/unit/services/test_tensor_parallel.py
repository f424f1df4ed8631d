"""A target on two ranks, in two processes joined by gloo, answers as it does on one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_engines import Collector
from oracle_pair import LIMITS, VOCAB, OracleDrafter, OraclePair
from rank_process import CPU, SplitVerifier, split_verifier
from tiny_models import save_target
from toy_grammars import END, GRAMMARS, toy_pool

from dflash_wire.codec import encode_kept
from dflash_wire.errors import ConfigError, FatalError
from dflash_wire.processors import Processors
from dflash_wire.records import DraftResult, GenerationRequest, Row, SamplingParams, StepPlan
from services.config import AppArgs
from services.local import build_local_ring
from services.spec import make_spec
from verifier.engine import VerifierEngine
from verifier.rank_group import RankGroup
from verifier.ranks import RankEngine
from verifier.shard import load_shard
from verifier.shard_rules import check_shardable
from verifier.target import TargetModel

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    # Biases behind the last products must count once, not once per rank.
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3-tied": {"is_tied": True},
}
PROCESSORS = (
    None,
    Processors(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2),
    Processors(biased_token_ids=[3, 9], biases=[4.0, -9.0], bad_words=[[5], [7, 8]]),
    Processors(min_tokens=9, end_token_ids=[END, 4]),
    Processors(grammar=GRAMMARS["record"], end_token_ids=[END]),
    Processors(grammar=GRAMMARS["forced"], end_token_ids=[END]),
)


@pytest.fixture(scope="module", params=FAMILIES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OraclePair:
    family = request.param.removesuffix("-tied")
    path = tmp_path_factory.mktemp("target")
    return OraclePair(path, family=family, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def split(whole: OraclePair) -> Iterator[SplitVerifier]:
    features = torch.zeros_like(whole.verifier.feature_pool)
    sizes = (LIMITS.num_pages, LIMITS.page_size)
    with split_verifier(whole.path, features, *sizes, toy_pool()) as verifier:
        yield verifier


def requests() -> list[GenerationRequest]:
    """Prompts that begin alike, with every processor, at several temperatures."""
    rng = random.Random(5)
    beginning = [rng.randrange(VOCAB) for _ in range(9)]
    asked = []
    for i in range(18):
        processors = PROCESSORS[i % len(PROCESSORS)]
        top_p, top_k, min_p = rng.choice(((1.0, 0, 0.0), (0.9, 0, 0.1), (1.0, 5, 0.0)))
        asked.append(
            GenerationRequest(
                f"r{i}",
                beginning + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 7))],
                rng.choice((7, 20)),
                SamplingParams(rng.choice((0.0, 0.0, 0.8)), top_p, top_k, i, min_p),
                [] if processors is None else processors.end_token_ids,
                processors=processors,
                num_logprobs=rng.choice((None, 2)),
                num_prompt_logprobs=rng.choice((None, None, 1)),
            )
        )
    return asked


def assert_same(got: Collector, wanted: Collector) -> None:
    for name in wanted.chunks:
        assert got.answer(name) == wanted.answer(name)
        pairs = zip(said(got, name), said(wanted, name), strict=True)
        for one, other in pairs:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def said(sink: Collector, name: str) -> list[Any]:
    """All log-probabilities that a request was told."""
    chunks = sink.chunks[name]
    return [
        entry
        for chunk in chunks
        for entries in (chunk.prompt_logprobs, chunk.logprobs)
        for entry in entries or []
    ]


@pytest.mark.parametrize("policy", ["off", "static:8", "static-tree:16", "adaptive"])
def test_two_ranks_answer_as_one(whole: OraclePair, split: SplitVerifier, policy: str) -> None:
    asked = requests()
    plain, _ = whole.answer(asked, "off")
    answers = [plain.tokens(r.request_id) for r in asked]
    both = whole.over(split.engine)
    got, coordinator = both.answer(asked, policy, OracleDrafter(asked, answers, 0.8, 1), cohorts=2)
    assert_same(got, plain)
    now = coordinator.snapshot()
    assert sum(got.num_cached(r.request_id) for r in asked) > 20
    assert now.num_preemptions > 0
    assert policy == "off" or now.totals.num_accepted_drafts > 50
    assert split.engine.num_forced_tokens > 0


def test_a_rank_keeps_what_the_whole_target_keeps(whole: OraclePair, split: SplitVerifier) -> None:
    """Rank 0's heads are the first half, and features are whole."""
    row = Row(0, [3, 1, 4, 1, 5, 9, 2, 6], 0, [4, 2, 7], is_prefill=True)
    tree = DraftResult(2, [[7, 7, 8, 9]], parents=[[0, 1, 1, 0]])
    for engine in (whole.verifier, split.engine):
        engine.run(StepPlan(1, [row]), DraftResult(1, [[]]))
        anchor = Row(0, [5], 8, [4, 2, 7], width=5, is_tree=True, draft_width=4)
        engine.run(StepPlan(2, [anchor], feature_base=8), tree)
    slots = split.engine.pool.slots([4, 2, 7], 0, 9)
    mine, all_heads = split.engine.pool.data[:, slots], whole.verifier.pool.data[:, slots]
    assert mine.shape[3] == 1 and all_heads.shape[3] == 2
    torch.testing.assert_close(mine, all_heads[:, :, :, :1], atol=2e-5, rtol=1e-4)
    features = whole.verifier.feature_pool[:9]
    torch.testing.assert_close(split.engine.feature_pool[:9], features, atol=2e-5, rtol=1e-4)


def test_a_step_that_fails_behind_its_pass_leaves_the_ranks_together(
    whole: OraclePair, split: SplitVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("sampling")

    row = Row(0, [3, 1, 4], 0, [9], is_prefill=True)
    with monkeypatch.context() as patch:
        patch.setattr(VerifierEngine, "_accept", broken)
        with pytest.raises(ZeroDivisionError):
            split.engine.run(StepPlan(1, [row]), DraftResult(1, [[]]))
    asked = requests()[:6]
    plain, _ = whole.answer(asked, "off")
    got, _ = whole.over(split.engine).answer(asked, "off")
    assert_same(got, plain)


def test_a_rank_refuses_to_keep_what_it_did_not_run(tmp_path: Path) -> None:
    save_target(tmp_path, vocab_size=VOCAB)
    target = TargetModel(str(tmp_path), torch.float32, CPU)
    rank = RankEngine(target, OraclePair.pool_for(target))
    with pytest.raises(FatalError, match="step 3"):
        rank.handle([b"K", encode_kept(3, [[0]])])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shares_add_up_to_the_checkpoint(tmp_path: Path, num_ranks: int) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 4}
    model = save_target(tmp_path, "llama", attention_bias=True, **sizes)
    groups = [RankGroup(rank, num_ranks, CPU, 1.0) for rank in range(num_ranks)]
    path, config = str(tmp_path), model.config
    shares = [load_shard(path, config, torch.float32, group) for group in groups]
    for name, value in model.named_parameters():
        parts = [dict(share.named_parameters())[name] for share in shares]
        if name.endswith(("q_proj.weight", "v_proj.bias", "up_proj.weight")):
            together = torch.cat(parts)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            together = torch.cat(parts, dim=1)
        elif name.endswith("o_proj.bias"):
            together = sum(parts)
        elif "norm" in name or "embed" in name:
            assert all(torch.equal(part, value) for part in parts)
            continue
        elif name == "lm_head.weight":
            assert [part.shape[0] for part in parts] == [64] + [0] * (num_ranks - 1)
            together = torch.cat(parts)
        else:
            continue
        assert torch.equal(together, value), name


QWEN3_8B = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
}


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({}, 3, "does not divide the target's num_attention_heads 32"),
        ({}, 16, "does not divide the target's num_key_value_heads 8"),
        ({"intermediate_size": 9}, 2, "does not divide the target's intermediate_size 9"),
        ({"model_type": "qwen3_moe"}, 2, "family 'qwen3_moe' cannot be split"),
        ({"model_type": "gpt_oss"}, 2, "family 'gpt_oss' cannot be split"),
        ({"model_type": "gemma3_text"}, 2, "family 'gemma3_text' cannot be split"),
        ({"quantization_config": {"bits": 4}}, 2, "quantised weights"),
    ],
)
def test_what_cannot_be_split_is_refused(
    changes: dict[str, Any], num_ranks: int, message: str
) -> None:
    check_shardable(QWEN3_8B, 4)
    check_shardable({**QWEN3_8B, **changes}, 1)
    with pytest.raises(ConfigError, match=message):
        check_shardable({**QWEN3_8B, **changes}, num_ranks)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("engine", {"deterministic": True}, "engine.deterministic needs"),
        ("model", {"device": "cuda"}, "needs whole GPUs, but verifier.num_gpus is 0.5"),
    ],
)
def test_settings_that_ranks_do_not_have_are_refused(
    tmp_path: Path, section: str, values: dict[str, Any], message: str
) -> None:
    save_target(tmp_path)
    fields: dict[str, dict[str, Any]] = {
        "model": {"target": str(tmp_path), "drafter": "none"},
        "verifier": {"tensor_parallel": 2, "num_gpus": 0.5},
        "engine": {},
    }
    make_spec(AppArgs.model_validate(fields))
    fields[section].update(values)
    with pytest.raises(ConfigError, match=message):
        make_spec(AppArgs.model_validate(fields))


def test_one_process_holds_no_ranks(tmp_path: Path) -> None:
    save_target(tmp_path)
    model = {"target": str(tmp_path), "drafter": "none"}
    args = AppArgs.model_validate({"model": model})
    spec = replace(make_spec(args), num_ranks=2)
    with pytest.raises(ConfigError, match="needs Ray's actors"):
        build_local_ring(spec)
