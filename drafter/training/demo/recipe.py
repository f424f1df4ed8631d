"""The shipped drafter's recipe: sizes and training settings scaled to two CPU cores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafter.checkpoint import load_draft_model
from drafter.model import DraftModel
from drafter.training.attention import ATTENTION_NAME
from drafter.training.build import build_draft_model, find_mask_token_id
from drafter.training.capture import (
    CachedFeatureSource,
    TargetTables,
    TransformersFeatureSource,
)
from drafter.training.config import TrainingConfig
from drafter.training.data import read_rows
from drafter.training.export import export_drafter
from drafter.training.trainer import Trainer

AVERAGED_RUNS = ("drafter-first", "drafter-second")
"""Folders of the two runs whose average the last one goes on from."""
AVERAGE = "drafter-mean"
LAST_RUN = "drafter-last"
LAST_SHARE = 0.7
"""Of the last run's weights in the shipped drafter; the rest is the average that it went on from."""
RESPONSES = "responses.jsonl"
STUB_RESPONSES = "stub_responses.jsonl"
"""Responses to generated function heads (see ``stubs``)."""


def demo_training_config() -> TrainingConfig:
    """Return the settings that differ from the paper's because the model is tiny."""
    return TrainingConfig(
        optimizer="muon",
        peak_lr=3e-3,
        beta2=0.98,
        max_steps=2300,
        max_length=640,
        tokens_per_step=4096,
        max_blocks_per_step=256,
        feature_cache_gb=6.0,
        checkpoint_every=200,
        evaluate_every=500,
        held_out_blocks=64,
        seed=20261201,
    )


@dataclass(frozen=True)
class DrafterRecipe:
    """Shape of the drafter beside its training settings.

    Attributes:
        initial: folder of a drafter to train on from; None starts with fresh weights.
        responses: files of the work folder to learn from.
    """

    num_layers: int = 2
    num_taps: int = 5
    initial: str | None = None
    responses: tuple[str, ...] = (RESPONSES,)
    training: TrainingConfig = field(default_factory=demo_training_config)


def base_drafter_recipe() -> DrafterRecipe:
    """Return the first drafter's recipe: whole draft blocks, the first target's responses."""
    return DrafterRecipe()


def averaged_drafter_recipes(work: Path) -> list[DrafterRecipe]:
    """Return the recipes of ``AVERAGED_RUNS``: each trains on from the one before, the first from the first
    drafter, and some of their draft blocks are narrower."""
    settings = demo_training_config()
    first = replace(
        settings, peak_lr=2.5e-3, max_steps=5900, epochs=50, narrow_share=0.4, seed=20261204
    )
    second = replace(
        settings, peak_lr=2e-3, max_steps=2700, epochs=50, narrow_share=0.3, seed=20261205
    )
    return [
        DrafterRecipe(initial=str(work / "base" / "drafter"), training=first),
        DrafterRecipe(initial=str(work / AVERAGED_RUNS[0]), training=second),
    ]


def final_drafter_recipe(work: Path) -> DrafterRecipe:
    """Return the recipe of ``LAST_RUN``: the average trained on, with responses to function heads too."""
    training = replace(
        demo_training_config(),
        peak_lr=2e-3,
        max_steps=3600,
        epochs=50,
        narrow_share=0.3,
        feature_cache_gb=9.0,
        seed=20261206,
    )
    responses = (RESPONSES, STUB_RESPONSES)
    return DrafterRecipe(initial=str(work / AVERAGE), responses=responses, training=training)


def new_drafter(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: DrafterRecipe
) -> DraftModel:
    """Build the untrained drafter."""
    return build_draft_model(
        target,
        num_layers=recipe.num_layers,
        num_taps=recipe.num_taps,
        mask_token_id=find_mask_token_id(tokenizer),
        draft_block_size=recipe.training.draft_block_size,
        seed=recipe.training.seed,
    )


def train_drafter(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: DrafterRecipe,
    work: Path,
    minutes: float | None,
    name: str = "drafter",
) -> dict[str, Any]:
    """Train or resume in ``work/<name>-training``; exports to ``work/<name>``.

    Features are computed under bf16 autocast and kept in memory, so only the first epoch pays for
    the target.

    Returns:
        The last held-out figures.
    """
    model = new_drafter(target, tokenizer, recipe)
    if recipe.initial is not None:
        start = load_draft_model(Path(recipe.initial), torch.float32, ATTENTION_NAME)
        model.load_state_dict(start.state_dict())
    config = recipe.training
    source = CachedFeatureSource(
        TransformersFeatureSource(target, model.target_layer_ids, use_bf16=True),
        int(config.feature_cache_gb * 2**30),
    )
    rows = [row for name in recipe.responses for row in read_rows(work / name, config.max_length)]
    held_out = read_rows(work / "held_out_responses.jsonl", config.max_length)
    trainer = Trainer(
        model,
        source,
        TargetTables.of(target),
        rows,
        held_out,
        config,
        work / f"{name}-training",
        minutes,
    )
    trainer.run()
    result = trainer.held_out_figures or trainer.evaluate()
    out = work / name
    num_parameters = export_drafter(model, out)
    summary = {
        **asdict(recipe),
        "initial": None if recipe.initial is None else _recipe_of(Path(recipe.initial)),
        **result,
        "num_rows": len(rows),
        "num_parameters": num_parameters,
    }
    (out / "recipe.json").write_text(json.dumps(summary, indent=2) + "\n")
    return result


def average_drafters(
    drafters: list[Path], out: Path, shares: Sequence[float] | None = None
) -> None:
    """Export the mean of several drafters' weights, by ``shares`` that sum to one or all alike.

    Two ends of one training that go on from each other lie around the same minimum; their mean is nearer to
    it than either, and generalizes better.
    """
    models = [load_draft_model(path, torch.float32, ATTENTION_NAME) for path in drafters]
    states = [model.state_dict() for model in models]
    shares = shares or [1 / len(states)] * len(states)
    mean = {
        name: sum(
            (share * s[name] for share, s in zip(shares, states, strict=True)),
            torch.zeros_like(value),
        )
        for name, value in states[0].items()
    }
    models[0].load_state_dict(mean)
    export_drafter(models[0], out)
    summary = {"average_of": [_recipe_of(path) for path in drafters], "shares": list(shares)}
    (out / "recipe.json").write_text(json.dumps(summary, indent=2) + "\n")


def _recipe_of(drafter: Path) -> dict[str, Any]:
    """The recipe of an exported drafter, so that a chain of trainings is told whole."""
    recipe: dict[str, Any] = json.loads((drafter / "recipe.json").read_text())
    return recipe
