"""Command line of the demo recipe: ``python -m drafter.training.demo {target,...}``."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafter.training.demo.corpus import load_conversations, standard_library_sources
from drafter.training.demo.target import (
    TargetRecipe,
    encode_conversation,
    encode_raw,
    train_target,
)
from drafter.training.demo.tokenizer import load_tokenizer, train_tokenizer


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


def main() -> None:
    """Parse the command line and run one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["target"])
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K train.jsonl")
    parser.add_argument("--work", type=Path, default=Path("build/demo-pair"))
    parser.add_argument("--steps", type=int, help="override the number of target steps")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    run_target(arguments.gsm8k, arguments.work, arguments.steps)


if __name__ == "__main__":
    main()
