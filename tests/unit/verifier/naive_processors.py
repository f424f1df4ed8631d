"""The processors, the noise and the choice once more, one token at a time and in plain Python.

Nothing of the code under test is used here but its records. Numbers are rounded to 32 bits where the engine
works in 32 bits, so equal inputs give equal results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from dflash_wire.processors import Processors
from dflash_wire.sampling import SamplingParams

MASK = 2**64 - 1


def naive_process(
    logits: Sequence[float],
    asked: Processors,
    prompt: Sequence[int],
    output: Sequence[int],
    legal: Collection[int] | None = None,
) -> list[float]:
    """Logits of one position after its processors; prompt and output are all tokens before it.

    ``legal`` is what a grammar leaves, None where there is none.
    """
    values = [np.float32(x) for x in logits]
    for token_id, bias in zip(asked.biased_token_ids, asked.biases, strict=True):
        values[token_id] = np.float32(values[token_id] + np.float32(bias))
    counts = Counter(output)
    seen = set(prompt) | set(output)
    for token_id in range(len(values)):
        x = values[token_id]
        if token_id in seen:
            r = np.float32(asked.repetition_penalty)
            x = np.float32(x / r) if x > 0 else np.float32(x * r)
        x = np.float32(
            x - np.float32(np.float32(asked.frequency_penalty) * np.float32(counts[token_id]))
        )
        x = np.float32(x - np.float32(asked.presence_penalty) * np.float32(counts[token_id] > 0))
        values[token_id] = x
    allowed = set(range(len(values)) if legal is None else legal)
    if asked.allowed_token_ids:
        allowed = allowed & set(asked.allowed_token_ids) or allowed
    if len(allowed) < len(values):
        for token_id in range(len(values)):
            if token_id not in allowed:
                values[token_id] = np.float32(-math.inf)
    removed = set()
    for word in asked.bad_words:
        *beginning, last = word
        if (
            len(output) >= len(beginning)
            and list(output[len(output) - len(beginning) :]) == beginning
        ):
            removed.add(last)
    if len(output) < asked.min_tokens:
        removed |= set(asked.end_token_ids)
    left = [-math.inf if i in removed else float(x) for i, x in enumerate(values)]
    return [float(x) for x in values] if max(left) == -math.inf else left


def candidates(scores: Sequence[float], params: SamplingParams) -> list[int]:
    """Tokens that temperature's scores, top-k, top-p and min-p leave."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
    kept, mass, total = [], 0.0, sum(weights)
    for token_id, weight in zip(order, weights, strict=True):
        if kept and params.top_p < 1.0 and mass / total >= params.top_p:
            break
        if scores[token_id] > -math.inf:
            kept.append(token_id)
        mass += weight
    least = params.min_p * math.exp(scores[order[0]] - scores[order[0]])
    return [i for i in kept if math.exp(scores[i] - scores[order[0]]) >= least]


def gumbel(seed: int, position: int, token_id: int) -> float:
    """The engine's noise, from its definition: SplitMix64's finalizer over seed, position and token."""
    weyl = 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    key = mix((mix((seed + weyl) & MASK) + position * weyl) & MASK)
    bits = mix((key + (token_id + 1) * weyl) & MASK)
    uniform = ((bits >> 12) + 0.5) * 2.0**-52
    return float(np.float32(-math.log(-math.log(uniform))))


def naive_choice(
    logits: Sequence[float], params: SamplingParams, position: int
) -> tuple[int, float]:
    """The chosen token, and by how much it is ahead of the next one."""
    scores = {i: x for i, x in enumerate(logits) if x > -math.inf}
    if params.temperature > 0:
        t = np.float32(params.temperature)
        heated = [float(np.float32(np.float32(x) / t)) for x in logits]
        scores = {
            i: heated[i] + gumbel(params.seed, position, i) for i in candidates(heated, params)
        }
    order = sorted(scores, key=lambda i: (-scores[i], i))
    lead = scores[order[0]] - scores[order[1]] if len(order) > 1 else math.inf
    return order[0], lead
