"""Train the demo target: a small, deep and narrow Qwen3 on conversations and raw source.

The run is a pure function of the seed and the step count. It writes a resumable checkpoint every
``checkpoint_every`` steps and the finished model in bf16.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from drafter.training.demo.corpus import Conversation
from drafter.training.demo.tokenizer import END_OF_TEXT, MASK, TURN_END, token_id

PROMPT_WEIGHT = 0.25


@dataclass(frozen=True)
class TargetRecipe:
    """Shape and schedule of the target; defaults are the shipped pair's."""

    vocab_size: int = 3072
    hidden_size: int = 192
    num_layers: int = 12
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 48
    intermediate_size: int = 512
    max_positions: int = 2048
    steps: int = 1200
    tokens_per_step: int = 3072
    raw_share: float = 0.10
    raw_length: int = 768
    max_length: int = 448
    peak_lr: float = 3e-3
    warmup: int = 100
    decay_from: float = 0.625
    weight_decay: float = 0.1
    seed: int = 20261129
    checkpoint_every: int = 250

    def config(self, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
        """Return the transformers config of this recipe."""
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=token_id(tokenizer, TURN_END),
            pad_token_id=token_id(tokenizer, END_OF_TEXT),
        )


@dataclass(frozen=True)
class Example:
    """Token ids of one document and from where on its tokens count in the loss."""

    token_ids: list[int]
    loss_start: int


def encode_conversation(tokenizer: PreTrainedTokenizerFast, row: Conversation) -> Example:
    """Encode in the served chat template; the loss covers the whole text, the answer at full weight."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": row.user}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    answer = tokenizer.encode(row.assistant + TURN_END, add_special_tokens=False)
    return Example(list(prompt) + answer, len(prompt))


def encode_raw(
    tokenizer: PreTrainedTokenizerFast, sources: list[str], length: int
) -> list[Example]:
    """Cut raw source into examples of ``length`` tokens."""
    examples = []
    for source in sources:
        ids = tokenizer.encode(source, add_special_tokens=False)
        for start in range(0, len(ids) - 64, length):
            examples.append(Example(ids[start : start + length], 0))
    return examples


def batches(examples: list[Example], tokens: int, rng: random.Random) -> list[list[Example]]:
    """Group examples of like length so that a padded batch holds about ``tokens`` tokens."""
    order = sorted(examples, key=lambda e: len(e.token_ids) + rng.random() * 24)
    groups: list[list[Example]] = []
    group: list[Example] = []
    for example in order:
        longest = max([len(e.token_ids) for e in group] + [len(example.token_ids)])
        if group and longest * (len(group) + 1) > tokens:
            groups.append(group)
            group = []
        group.append(example)
    if group:
        groups.append(group)
    rng.shuffle(groups)
    return groups


def collate(
    group: list[Example], prompt_weight: float = PROMPT_WEIGHT
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad a group; returns ids ``[R, T]``, labels ``[R, T-1]`` and weights ``[R, T-1]``."""
    longest = max(len(e.token_ids) for e in group)
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    weights = torch.zeros(len(group), longest - 1)
    for row, example in enumerate(group):
        length = len(example.token_ids)
        ids[row, :length] = torch.tensor(example.token_ids)
        weights[row, : length - 1] = 1.0
        if example.loss_start > 0:
            weights[row, : example.loss_start - 1] = prompt_weight
    return ids, ids[:, 1:], weights


def make_optimizers(model: nn.Module, recipe: TargetRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.peak_lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(rest, lr=recipe.peak_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def learning_rate(step: int, recipe: TargetRecipe) -> float:
    """Linear warm-up, constant to ``decay_from`` of the run, then linear to 2 % of the peak."""
    if step < recipe.warmup:
        return recipe.peak_lr * (step + 1) / recipe.warmup
    first = recipe.decay_from * recipe.steps
    progress = max(0.0, (step - first) / (recipe.steps - first))
    return recipe.peak_lr * (1.0 - 0.98 * progress)


def batch_loss(
    model: Qwen3ForCausalLM, group: list[Example], prompt_weight: float = PROMPT_WEIGHT
) -> Tensor:
    """Weighted cross-entropy of one padded group (bf16 autocast)."""
    ids, labels, weights = collate(group, prompt_weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none"
    )
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum()


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, examples: list[Example], limit: int = 160) -> float:
    """Mean loss per answer token on held-out conversations, in nats."""
    total = count = 0.0
    model.eval()
    for start in range(0, min(limit, len(examples)), 16):
        ids, labels, weights = collate(examples[start : start + 16], prompt_weight=0.0)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        total += float((losses * weights.flatten()).sum())
        count += float(weights.sum())
    model.train()
    return total / max(1.0, count)


def endless(
    examples: list[Example], recipe: TargetRecipe, seed: int, skip: int
) -> Iterator[list[Example]]:
    """Yield batches epoch after epoch, the first ``skip`` left out."""
    for epoch in itertools.count():
        groups = batches(examples, recipe.tokens_per_step, random.Random(seed + epoch))
        yield from groups[skip:]
        skip = max(0, skip - len(groups))


def is_raw(step: int, share: float) -> bool:
    """Whether a step draws raw source; a function of the step alone, so resuming repeats it."""
    return math.floor((step + 1) * share) > math.floor(step * share)


def restore(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load a checkpoint if there is one; returns the steps done. Mutates model and optimizers."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def store(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Write a checkpoint in place of the old one."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def update(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    group: list[Example],
    rate: float,
    prompt_weight: float = PROMPT_WEIGHT,
) -> float:
    """Take one optimizer step; returns the loss."""
    for optimizer in optimizers:
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
    loss = batch_loss(model, group, prompt_weight)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def train_target(
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[Example],
    raw: list[Example],
    held_out: list[Example],
    recipe: TargetRecipe,
    work: Path,
) -> Qwen3ForCausalLM:
    """Run or resume the training; returns the model in float32 and writes ``work/target``."""
    torch.manual_seed(recipe.seed)
    config = recipe.config(tokenizer)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizers = make_optimizers(model, recipe)
    state_path = work / "target_state.pt"
    step = restore(state_path, model, optimizers)
    print(f"target: {num_parameters / 1e6:.2f}M parameters, step {step}/{recipe.steps}", flush=True)
    num_raw = sum(is_raw(done, recipe.raw_share) for done in range(step))
    chats = endless(conversations, recipe, recipe.seed, step - num_raw)
    raws = endless(raw, recipe, recipe.seed + 1000, num_raw)
    began, num_seen = time.time(), 0
    while step < recipe.steps:
        group = next(raws) if is_raw(step, recipe.raw_share) else next(chats)
        loss = update(model, optimizers, group, learning_rate(step, recipe))
        num_seen += sum(len(e.token_ids) for e in group)
        step += 1
        if step % 20 == 0:
            rate = num_seen / (time.time() - began)
            print(f"step {step}/{recipe.steps} loss {loss:.3f} {rate:.0f} tok/s", flush=True)
        if step % recipe.checkpoint_every == 0 or step == recipe.steps:
            print(f"step {step} held-out loss {held_out_loss(model, held_out):.4f}", flush=True)
            store(state_path, model, optimizers, step)
    save_target(model, tokenizer, work / "target", asdict(recipe))
    return model


def save_target(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    settings: dict[str, Any],
) -> None:
    """Write model (bf16), tokenizer, generation defaults and the settings it was trained with."""
    path.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    copy = Qwen3ForCausalLM(model.config)
    copy.bfloat16()
    copy.load_state_dict(weights)
    copy.generation_config = model.generation_config
    copy.save_pretrained(path)
    tokenizer.save_pretrained(path)
    assert token_id(tokenizer, MASK) == 3
    (path / "recipe.json").write_text(json.dumps(settings, indent=2) + "\n")
