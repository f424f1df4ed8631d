"""Figures of the finished pair on held-out word problems: a table and one last JSON line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from drafter.checkpoint import load_draft_model
from drafter.training.attention import ATTENTION_NAME
from drafter.training.capture import TargetTables, TransformersFeatureSource
from drafter.training.data import read_rows
from drafter.training.demo.corpus import Conversation
from drafter.training.demo.recipe import DrafterRecipe
from drafter.training.demo.responses import encode_prompt
from drafter.training.demo.speculation import speculate
from drafter.training.demo.target import encode_conversation, held_out_loss
from drafter.training.evaluation import evaluate_drafter

ALL_BLOCKS = 1 << 16


def evaluate_pair(
    target: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[Conversation],
    drafter_path: Path,
    responses_path: Path,
    num_prompts: int = 50,
    max_new_tokens: int = 160,
) -> dict[str, Any]:
    """Measure target loss, teacher-forced eal and the acceptance length of real speculation.

    Args:
        target: float32, ``sdpa``.
        tokenizer: the pair's.
        held_out: held-out conversations; only word problems are used.
        drafter_path: exported drafter.
        responses_path: JSONL of greedy responses to held-out prompts.
        num_prompts: prompts of the speculative loop.
        max_new_tokens: limit of the speculative loop.

    Returns:
        The figures by name.
    """
    math_rows = [row for row in held_out if row.kind == "math"]
    examples = [encode_conversation(tokenizer, row) for row in math_rows]
    with torch.no_grad():
        loss = held_out_loss(target, examples, limit=len(examples))
    target.eval()
    model = load_draft_model(drafter_path, torch.float32, ATTENTION_NAME)
    config = dataclasses.replace(DrafterRecipe().training, held_out_blocks=ALL_BLOCKS)
    rows = read_rows(responses_path, config.max_length)
    source = TransformersFeatureSource(target, model.target_layer_ids)
    teacher_forced = evaluate_drafter(model, source, TargetTables.of(target), rows, config)
    prompts = [encode_prompt(tokenizer, row) for row in math_rows[:num_prompts]]
    runs = [speculate(target, model, prompt, max_new_tokens) for prompt in prompts]
    plain = {
        tuple(values["prompt_ids"]): values["response_ids"]
        for values in map(json.loads, responses_path.read_text().splitlines())
    }
    compared = [
        run.token_ids == plain[tuple(prompt)][:max_new_tokens]
        for prompt, run in zip(prompts, runs, strict=True)
        if tuple(prompt) in plain
    ]
    num_committed = sum(len(run.token_ids) - 1 for run in runs)
    return {
        "target_held_out_loss": round(loss, 4),
        "drafter_held_out_loss": round(teacher_forced.loss, 4),
        "eal": round(teacher_forced.eal, 3),
        "accuracy": teacher_forced.accuracy,
        "acceptance_length": round(num_committed / sum(run.num_cycles for run in runs), 3),
        "num_prompts": len(prompts),
        "num_equal_to_plain": sum(compared),
        "num_compared": len(compared),
    }


def print_figures(figures: dict[str, Any]) -> None:
    """Print a table, then one JSON line."""
    names = {
        "target_held_out_loss": "target, held-out loss (nats per answer token)",
        "drafter_held_out_loss": "drafter, held-out loss (weighted)",
        "eal": "drafter, teacher-forced expected acceptance length",
        "acceptance_length": "speculative loop at temperature 0, acceptance length",
        "num_prompts": "prompts of the loop",
        "num_equal_to_plain": "outputs equal to plain decoding",
        "num_compared": "outputs compared",
    }
    for key, name in names.items():
        print(f"{name:<56} {figures[key]:>8}")
    for position, accuracy in enumerate(figures["accuracy"], start=1):
        print(f"{f'accuracy at draft position {position}':<56} {accuracy:>8.3f}")
    print(json.dumps(figures))
