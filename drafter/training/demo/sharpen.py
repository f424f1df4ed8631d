"""Second stage of the demo target: train it on its own greedy responses.

A small model that has seen few tokens is torn between many continuations almost everywhere, which no
model of a useful size is. Trained on its own greedy text it keeps what it would say and becomes sure of
it, so its distributions are about as peaked as a large model's. Nothing but its own text is involved.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from drafter.training.demo.target import (
    Example,
    TargetRecipe,
    endless,
    held_out_loss,
    make_optimizers,
    restore,
    save_target,
    store,
    update,
)


@dataclass(frozen=True)
class SharpenRecipe:
    """Schedule of the stage; defaults are the shipped pair's."""

    steps: int = 200
    peak_lr: float = 1e-3
    warmup: int = 10
    checkpoint_every: int = 50
    seed: int = 20261202


def greedy_examples(responses: Path) -> list[Example]:
    """Read the greedy rows of a responses file; prompts carry no loss."""
    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    return [
        Example(row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"]))
        for row in rows
        if row["temperature"] == 0
    ]


def own_rate(step: int, recipe: SharpenRecipe) -> float:
    """Linear warm-up, then linear to zero."""
    if step < recipe.warmup:
        return recipe.peak_lr * (step + 1) / recipe.warmup
    return recipe.peak_lr * (recipe.steps - step) / (recipe.steps - recipe.warmup)


def sharpen_target(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    held_out: list[Example],
    recipe: SharpenRecipe,
    work: Path,
) -> None:
    """Run or resume the stage; writes ``work/target``.

    Args:
        model: the first stage's model, float32; mutated.
        examples: its own greedy responses.
        held_out: its greedy responses to held-out prompts, for the logged loss.
        recipe: schedule.
        work: folder of checkpoints and result.
    """
    base = replace(TargetRecipe(), peak_lr=recipe.peak_lr, weight_decay=0.0)
    model.train().requires_grad_(True)
    torch.manual_seed(recipe.seed)
    optimizers = make_optimizers(model, base)
    state_path = work / "sharpen_state.pt"
    step = restore(state_path, model, optimizers)
    groups = endless(examples, base, recipe.seed, step)
    while step < recipe.steps:
        # Only the answer is learned: a prompt weight of zero keeps the model from copying questions.
        loss = update(model, optimizers, next(groups), own_rate(step, recipe), prompt_weight=0.0)
        step += 1
        if step % 10 == 0:
            print(f"sharpen {step}/{recipe.steps} loss {loss:.3f}", flush=True)
        if step % recipe.checkpoint_every == 0 or step == recipe.steps:
            print(f"sharpen {step} held-out loss {held_out_loss(model, held_out):.4f}", flush=True)
            store(state_path, model, optimizers, step)
    settings = {**asdict(TargetRecipe()), "sharpening": asdict(recipe)}
    save_target(model, tokenizer, work / "target", settings)
