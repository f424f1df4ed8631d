"""The target's own responses to the training prompts: what the drafter learns from.

Prompts come in the chat template that is served. About 55 % of the responses are greedy, the rest
are sampled at temperatures 0.7 and 1.0. Held-out prompts never enter the training file.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from drafter.training.demo.corpus import Conversation
from drafter.training.demo.generation import generate
from drafter.training.demo.target import encode_conversation

LONGEST_REPEATED_UNIT = 24  # tokens


@dataclass(frozen=True)
class ResponseRecipe:
    """How responses are produced; defaults are the shipped pair's."""

    max_new_tokens: int = 200
    max_prompt_tokens: int = 320
    rows_per_group: int = 96
    greedy_share: float = 0.55
    sampled_temperatures: tuple[float, ...] = (0.7, 1.0)
    passes: int = 1
    num_held_out: int = 120
    seed: int = 20261130


@dataclass(frozen=True)
class ResponseTask:
    """One response to produce."""

    kind: str
    prompt_ids: list[int]
    temperature: float


def encode_prompt(tokenizer: PreTrainedTokenizerFast, row: Conversation) -> list[int]:
    """Return the prompt's token ids in the served chat template, generation prompt included."""
    example = encode_conversation(tokenizer, row)
    return example.token_ids[: example.loss_start]


def plan_tasks(
    tokenizer: PreTrainedTokenizerFast, rows: list[Conversation], recipe: ResponseRecipe
) -> list[list[ResponseTask]]:
    """Group all tasks by prompt length; the order is random, so any beginning is a fair sample.

    A second pass answers prompts again: sampled where the first pass was greedy, and vice versa.
    """
    rng = random.Random(recipe.seed)
    prompts = [(row.kind, encode_prompt(tokenizer, row)) for row in rows]
    prompts = [(kind, ids) for kind, ids in prompts if len(ids) <= recipe.max_prompt_tokens]
    groups: list[list[ResponseTask]] = []
    was_greedy = [rng.random() < recipe.greedy_share for _ in prompts]
    for index in range(recipe.passes):
        is_greedy = [greedy == (index == 0) for greedy in was_greedy]
        if index > 1:
            is_greedy = [False] * len(prompts)
        tasks = [
            ResponseTask(kind, ids, 0.0 if greedy else rng.choice(recipe.sampled_temperatures))
            for (kind, ids), greedy in zip(prompts, is_greedy, strict=True)
        ]
        rng.shuffle(tasks)
        tasks.sort(key=lambda task: len(task.prompt_ids))
        size = recipe.rows_per_group
        batch = [tasks[i : i + size] for i in range(0, len(tasks), size)]
        rng.shuffle(batch)
        groups += batch
    return groups


def is_degenerate(response_ids: list[int], end_token_id: int) -> bool:
    """Whether a response ran into the limit because it repeats itself.

    True when it lacks the end token and its tail is one unit of at most 24 tokens, three times.
    """
    if response_ids and response_ids[-1] == end_token_id:
        return False
    for unit in range(1, LONGEST_REPEATED_UNIT + 1):
        tail = response_ids[-3 * unit :]
        if len(tail) == 3 * unit and tail[:unit] * 3 == tail:
            return True
    return False


def answer(target: Qwen3ForCausalLM, tasks: list[ResponseTask], limit: int, seed: int) -> list[str]:
    """Produce the JSON lines of one group, degenerate responses and mask tokens left out."""
    responses = generate(
        target, [t.prompt_ids for t in tasks], [t.temperature for t in tasks], limit, seed
    )
    end_token_id = target.config.eos_token_id
    assert isinstance(end_token_id, int)
    lines = []
    for task, response in zip(tasks, responses, strict=True):
        if len(response) < 2 or is_degenerate(response, end_token_id):
            continue
        record = {
            "prompt_ids": task.prompt_ids,
            "response_ids": response,
            "temperature": task.temperature,
            "kind": task.kind,
        }
        lines.append(json.dumps(record) + "\n")
    return lines


def write_responses(
    target: Qwen3ForCausalLM,
    groups: list[list[ResponseTask]],
    recipe: ResponseRecipe,
    path: Path,
    minutes: float | None = None,
) -> int:
    """Answer groups in order into a JSONL file; resumes where an earlier call stopped.

    Args:
        target: loaded with the attention function ``demo_generation``.
        groups: from ``plan_tasks``.
        recipe: limits and seed.
        path: the JSONL file; ``path`` + ``.progress`` says how far it is complete.
        minutes: stop after this time, between groups.

    Returns:
        The number of groups in the file.
    """
    progress_path = path.with_name(path.name + ".progress")
    done, num_bytes = 0, 0
    if progress_path.exists():
        progress = json.loads(progress_path.read_text())
        done, num_bytes = progress["groups"], progress["bytes"]
    deadline = None if minutes is None else time.monotonic() + minutes * 60
    with path.open("ab") as out:
        out.truncate(num_bytes)  # a group that was cut off is written again
        for index in tqdm(range(done, len(groups)), desc="responses", mininterval=5.0):
            if deadline is not None and time.monotonic() > deadline:
                break
            lines = answer(target, groups[index], recipe.max_new_tokens, recipe.seed + index)
            out.write("".join(lines).encode())
            out.flush()
            done = index + 1
            record = {"groups": done, "bytes": out.tell()}
            temporary = progress_path.with_suffix(".tmp")
            temporary.write_text(json.dumps(record))
            temporary.replace(progress_path)
    return done


def held_out_tasks(
    tokenizer: PreTrainedTokenizerFast, rows: list[Conversation], recipe: ResponseRecipe
) -> list[list[ResponseTask]]:
    """Greedy tasks for the first held-out word problems, in corpus order."""
    tasks = [
        ResponseTask(row.kind, encode_prompt(tokenizer, row), 0.0)
        for row in rows
        if row.kind == "math"
    ][: recipe.num_held_out]
    size = recipe.rows_per_group
    return [tasks[i : i + size] for i in range(0, len(tasks), size)]
