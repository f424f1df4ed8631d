"""The demo recipe's own parts: generation, responses, reference speculation, size of the pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from training_models import END_ID, tiny_drafter, tiny_target
from transformers import Qwen3ForCausalLM

from dflash_wire.errors import ConfigError
from drafter.checkpoint import load_draft_model
from drafter.training.attention import ATTENTION_NAME
from drafter.training.demo.generation import GENERATION_ATTENTION, generate
from drafter.training.demo.pair import DRAFTER_FILES, TARGET_FILES, export_pair
from drafter.training.demo.recipe import (
    STUB_RESPONSES,
    DrafterRecipe,
    average_drafters,
    averaged_drafter_recipes,
    final_drafter_recipe,
)
from drafter.training.demo.responses import (
    ResponseRecipe,
    ResponseTask,
    is_degenerate,
    write_responses,
)
from drafter.training.demo.speculation import speculate
from drafter.training.export import export_drafter

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15]]


def _generator_target() -> Qwen3ForCausalLM:
    target = tiny_target()
    target.config._attn_implementation = GENERATION_ATTENTION
    return target


def _plain(prompt: list[int], limit: int) -> list[int]:
    target, ids = tiny_target(), list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == END_ID:
            break
    return ids[len(prompt) :]


def test_batched_greedy_generation_equals_one_by_one() -> None:
    together = generate(_generator_target(), PROMPTS, [0.0] * 4, 12, seed=0)
    assert together == [_plain(prompt, 12) for prompt in PROMPTS]


def test_rows_end_at_the_end_token_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end token is redefined as a token that some rows emit early."""
    free = [_plain(prompt, 12) for prompt in PROMPTS]
    target = _generator_target()
    stop = free[0][2]
    target.config.eos_token_id = stop
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len({len(row) for row in expected}) > 1
    assert generate(target, PROMPTS, [0.0] * 4, 12, seed=0) == expected


def test_sampling_is_seeded_and_leaves_greedy_rows_alone() -> None:
    temperatures = [0.0, 1.0, 0.0, 1.0]
    first = generate(_generator_target(), PROMPTS, temperatures, 8, seed=1)
    assert first == generate(_generator_target(), PROMPTS, temperatures, 8, seed=1)
    other = generate(_generator_target(), PROMPTS, temperatures, 8, seed=2)
    assert first[0] == other[0] == _plain(PROMPTS[0], 8)
    assert first[1] != other[1]


def test_only_unfinished_repetition_is_degenerate() -> None:
    assert is_degenerate([9, 4, 5, 4, 5, 4, 5], END_ID)
    assert not is_degenerate([9, 4, 5, 4, 5, 4, 5, END_ID], END_ID)
    assert not is_degenerate([4, 5, 6, 7, 8, 9, 10], END_ID)


def test_responses_resume_where_they_stopped(tmp_path: Path) -> None:
    recipe = ResponseRecipe(max_new_tokens=6)
    groups = [
        [ResponseTask("math", prompt, 1.0 if i % 2 else 0.0)] for i, prompt in enumerate(PROMPTS)
    ]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    target = _generator_target()
    assert write_responses(target, groups, recipe, whole) == 4
    write_responses(target, groups[:2], recipe, parts)
    with parts.open("a") as file:
        file.write('{"prompt_ids": [1')  # a group that was cut off
    assert write_responses(target, groups, recipe, parts) == 4
    assert parts.read_text() == whole.read_text()
    keys = {"prompt_ids", "response_ids", "temperature", "kind"}
    assert all(set(json.loads(line)) == keys for line in whole.read_text().splitlines())


def test_a_budget_of_no_time_answers_nothing(tmp_path: Path) -> None:
    groups = [[ResponseTask("math", [5, 6], 0.0)]]
    path = tmp_path / "r.jsonl"
    assert write_responses(_generator_target(), groups, ResponseRecipe(), path, minutes=-1.0) == 0


def test_reference_speculation_equals_plain_decoding() -> None:
    target = tiny_target()
    model = tiny_drafter(target).eval()
    for prompt in PROMPTS:
        run = speculate(target, model, prompt, 20)
        assert run.token_ids == _plain(prompt, 20)
        assert 1.0 <= run.acceptance_length <= 4.0


def test_the_shipped_shape_fits() -> None:
    recipe = DrafterRecipe()
    assert (recipe.num_layers, recipe.num_taps, recipe.training.draft_block_size) == (2, 5, 16)


def _fake_pair(work: Path, width: int, dtype: torch.dtype) -> None:
    for folder, names in (("target", TARGET_FILES), ("drafter", DRAFTER_FILES)):
        (work / folder).mkdir(parents=True)
        for name in names:
            (work / folder / name).write_text("{}")
        save_file({"w": torch.zeros(width, dtype=dtype)}, work / folder / "model.safetensors")


def test_the_mean_of_drafters_is_exported_with_both_recipes(tmp_path: Path) -> None:
    target, models = tiny_target(), []
    for index in range(2):
        model = tiny_drafter(target)
        with torch.no_grad():
            for value in model.parameters():
                value.fill_(0.5 + index)  # exact in bf16, and so is the mean
        export_drafter(model, tmp_path / str(index))
        (tmp_path / str(index) / "recipe.json").write_text(json.dumps({"step": index}))
        models.append(tmp_path / str(index))
    average_drafters(models, tmp_path / "mean")
    mean = load_draft_model(tmp_path / "mean", torch.float32, ATTENTION_NAME)
    assert all(bool((value == 1.0).all()) for value in mean.parameters())
    recipe = json.loads((tmp_path / "mean" / "recipe.json").read_text())
    assert recipe == {"average_of": [{"step": 0}, {"step": 1}], "shares": [0.5, 0.5]}
    average_drafters(models, tmp_path / "shares", (0.25, 0.75))
    shares = load_draft_model(tmp_path / "shares", torch.float32, ATTENTION_NAME)
    assert all(bool((value == 1.25).all()) for value in shares.parameters())


def test_the_final_runs_go_on_from_each_other() -> None:
    first, second = averaged_drafter_recipes(Path("work"))
    assert first.initial == "work/base/drafter"
    assert second.initial == "work/drafter-first"
    assert first.training.seed != second.training.seed
    final = final_drafter_recipe(Path("work"))
    assert final.initial == "work/drafter-mean"
    assert STUB_RESPONSES in final.responses


def test_pair_export_copies_and_counts(tmp_path: Path) -> None:
    _fake_pair(tmp_path / "work", 100, torch.bfloat16)
    sizes = export_pair(tmp_path / "work", tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sizes["total"] == sum(path.stat().st_size for path in files)
    assert len(files) == len(TARGET_FILES) + len(DRAFTER_FILES)


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [(4_500_000, torch.bfloat16, "more than"), (10, torch.float32, "not bf16")],
)
def test_pair_export_refuses(tmp_path: Path, width: int, dtype: torch.dtype, message: str) -> None:
    _fake_pair(tmp_path / "work", width, dtype)
    with pytest.raises(ConfigError, match=message):
        export_pair(tmp_path / "work", tmp_path / "out")


def test_pair_export_names_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        export_pair(tmp_path, tmp_path / "out")
