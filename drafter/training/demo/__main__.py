"""Command line of the demo recipe: ``python -m drafter.training.demo STAGE --gsm8k FILE``.

Stages, each resumable, each reading what the one before left in ``--work``:
    base-target     tokenizer and first target, in ``WORK/base`` as the next two
    base-responses  that target's responses to training prompts, and greedy ones to held-out prompts
    base-drafter    a drafter trained on them, whole draft blocks
    sharpen         the shipped target: the first one trained on its own greedy responses
    responses       the shipped target's responses
    stub-responses  its responses to generated Python function heads
    drafter         the shipped drafter: two runs that train the first one on, also in narrower draft
                    blocks, their mean, a last run that goes on from that with function heads too, and
                    the mean of those
    evaluate        held-out figures of the pair
    export          copies of both models in ``--out``
    all             all of them in order
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from drafter.training.demo.corpus import load_conversations, standard_library_sources
from drafter.training.demo.evaluate import evaluate_pair, print_figures
from drafter.training.demo.generation import GENERATION_ATTENTION
from drafter.training.demo.pair import export_pair
from drafter.training.demo.recipe import (
    AVERAGE,
    AVERAGED_RUNS,
    LAST_RUN,
    LAST_SHARE,
    RESPONSES,
    STUB_RESPONSES,
    DrafterRecipe,
    average_drafters,
    averaged_drafter_recipes,
    base_drafter_recipe,
    final_drafter_recipe,
    train_drafter,
)
from drafter.training.demo.responses import (
    ResponseRecipe,
    held_out_tasks,
    plan_tasks,
    write_responses,
)
from drafter.training.demo.sharpen import SharpenRecipe, greedy_examples, sharpen_target
from drafter.training.demo.stubs import code_stubs
from drafter.training.demo.target import (
    TargetRecipe,
    encode_conversation,
    encode_raw,
    train_target,
)
from drafter.training.demo.tokenizer import load_tokenizer, train_tokenizer

STUB_SEED = 20261206
NUM_STUBS = 16000
"""Function heads to answer; the shipped drafter saw the responses to the first two thirds of the groups."""

STAGES = (
    "base-target",
    "base-responses",
    "base-drafter",
    "sharpen",
    "responses",
    "stub-responses",
    "drafter",
    "evaluate",
    "export",
)


def load_demo_target(work: Path, attention: str) -> Qwen3ForCausalLM:
    """Load the finished target: bf16-rounded weights in float32."""
    target: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(
        work / "target", dtype=torch.float32, attn_implementation="sdpa"
    )
    target.config._attn_implementation = attention
    target.eval().requires_grad_(False)
    return target


def run_target(gsm8k: Path, work: Path, steps: int | None) -> None:
    """Train tokenizer and target into ``work/target``."""
    recipe = TargetRecipe() if steps is None else TargetRecipe(steps=steps)
    train_rows, held_out_rows = load_conversations(gsm8k, recipe.seed)
    sources = standard_library_sources()
    tokenizer_path = work / "tokenizer"
    if not tokenizer_path.exists():
        texts = [f"{r.user}\n{r.assistant}" for r in train_rows]
        texts += [s[:6000] for s in sources[::3]]
        train_tokenizer(texts, recipe.vocab_size).save_pretrained(tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path)
    examples = [encode_conversation(tokenizer, r) for r in train_rows]
    examples = [e for e in examples if len(e.token_ids) <= recipe.max_length]
    held_out = [encode_conversation(tokenizer, r) for r in held_out_rows if r.kind == "math"]
    raw = encode_raw(tokenizer, sources, recipe.raw_length)
    for name, rows in (("conversations", examples), ("raw", raw), ("held out", held_out)):
        print(f"{name}: {len(rows)} rows, {sum(len(e.token_ids) for e in rows) / 1e6:.2f}M tokens")
    train_target(tokenizer, examples, raw, held_out, recipe, work)


def run_sharpen(work: Path) -> None:
    """Train the first target on its own greedy responses; writes ``work/target``."""
    base = work / "base"
    target = load_demo_target(base, "sdpa")
    sharpen_target(
        target,
        load_tokenizer(base / "target"),
        greedy_examples(base / RESPONSES),
        greedy_examples(base / "held_out_responses.jsonl"),
        SharpenRecipe(),
        work,
    )


def run_responses(gsm8k: Path, work: Path, passes: int, minutes: float | None) -> None:
    """Write ``work/held_out_responses.jsonl``, then ``work/responses.jsonl``."""
    recipe = ResponseRecipe(passes=passes)
    target = load_demo_target(work, GENERATION_ATTENTION)
    tokenizer = load_tokenizer(work / "target")
    train_rows, held_out_rows = load_conversations(gsm8k, TargetRecipe().seed)
    held_out = held_out_tasks(tokenizer, held_out_rows, recipe)
    write_responses(target, held_out, recipe, work / "held_out_responses.jsonl")
    groups = plan_tasks(tokenizer, train_rows, recipe)
    done = write_responses(target, groups, recipe, work / RESPONSES, minutes)
    print(f"responses: {done} of {len(groups)} groups")


def run_stub_responses(gsm8k: Path, work: Path, minutes: float | None) -> None:
    """Write ``work/stub_responses.jsonl``."""
    recipe = ResponseRecipe(max_new_tokens=128, seed=STUB_SEED)
    target = load_demo_target(work, GENERATION_ATTENTION)
    train_rows, _ = load_conversations(gsm8k, TargetRecipe().seed)
    stubs = code_stubs(train_rows, NUM_STUBS, STUB_SEED)
    groups = plan_tasks(load_tokenizer(work / "target"), stubs, recipe)
    done = write_responses(target, groups, recipe, work / STUB_RESPONSES, minutes)
    print(f"responses to function heads: {done} of {len(groups)} groups")


def run_drafter(
    work: Path,
    recipe: DrafterRecipe,
    steps: int | None,
    minutes: float | None,
    name: str = "drafter",
) -> None:
    """Train a drafter into ``work/<name>``."""
    if steps is not None:
        training = dataclasses.replace(recipe.training, max_steps=steps)
        recipe = dataclasses.replace(recipe, training=training)
    target = load_demo_target(work, "sdpa")
    result = train_drafter(target, load_tokenizer(work / "target"), recipe, work, minutes, name)
    print(json.dumps(result))


def run_final_drafter(work: Path, steps: int | None, minutes: float | None) -> None:
    """Train two runs, average them, train the average on, and average again into ``work/drafter``."""
    for name, recipe in zip(AVERAGED_RUNS, averaged_drafter_recipes(work), strict=True):
        run_drafter(work, recipe, steps, minutes, name)
    average_drafters([work / name for name in AVERAGED_RUNS], work / AVERAGE)
    run_drafter(work, final_drafter_recipe(work), steps, minutes, LAST_RUN)
    shares = (1 - LAST_SHARE, LAST_SHARE)
    average_drafters([work / AVERAGE, work / LAST_RUN], work / "drafter", shares)


def run_evaluate(gsm8k: Path, work: Path) -> None:
    """Print the figures and keep them in ``work/figures.json``."""
    _, held_out_rows = load_conversations(gsm8k, TargetRecipe().seed)
    figures = evaluate_pair(
        load_demo_target(work, "sdpa"),
        load_tokenizer(work / "target"),
        held_out_rows,
        work / "drafter",
        work / "held_out_responses.jsonl",
    )
    (work / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print_figures(figures)


def run_stage(stage: str, arguments: argparse.Namespace) -> None:
    """Run one stage."""
    gsm8k, work, minutes = arguments.gsm8k, arguments.work, arguments.minutes
    base = work / "base"
    if stage == "base-target":
        run_target(gsm8k, base, arguments.steps)
    elif stage == "sharpen":
        run_sharpen(work)
    elif stage == "stub-responses":
        run_stub_responses(gsm8k, work, minutes)
    elif stage.endswith("responses"):
        folder = base if stage.startswith("base") else work
        run_responses(gsm8k, folder, arguments.passes, minutes)
    elif stage == "base-drafter":
        run_drafter(base, base_drafter_recipe(), arguments.steps, minutes)
    elif stage == "drafter":
        run_final_drafter(work, arguments.steps, minutes)
    elif stage == "evaluate":
        run_evaluate(gsm8k, work)
    else:
        print(json.dumps(export_pair(work, arguments.out)))


def main() -> None:
    """Parse the command line and run the stages asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m drafter.training.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--gsm8k", type=Path, help="GSM8K train.jsonl; every stage that reads text")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/demo-pair"),
        help="folder of all intermediate files",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models/demo"), help="where export puts the pair"
    )
    parser.add_argument(
        "--steps", type=int, help="steps of the base-target stage, or of each drafter run"
    )
    parser.add_argument(
        "--minutes", type=float, help="time of the responses stage, or of each drafter run"
    )
    parser.add_argument("--passes", type=int, default=1, help="responses per training prompt")
    arguments = parser.parse_args()
    if arguments.stage == "all" and arguments.steps is not None:
        parser.error("--steps belongs to one stage; run the stages one by one")
    if arguments.gsm8k is None and arguments.stage not in ("drafter", "export"):
        parser.error(f"the stage {arguments.stage} needs --gsm8k")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    (arguments.work / "base").mkdir(parents=True, exist_ok=True)
    for stage in STAGES if arguments.stage == "all" else (arguments.stage,):
        run_stage(stage, arguments)


if __name__ == "__main__":
    main()
