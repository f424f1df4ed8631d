"""A target whose next token is a hash of the seed and all tokens before it, and drafters for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dflash_wire.records import GenerationRequest

VOCAB = 211
_MASK = (1 << 61) - 1

Drafter = Callable[[int, int], list[int]]


def start_state(seed: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK


def advance(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 1)) * 0xBF58476D1CE4E5B9 + 0x94D049BB) & _MASK


def next_token(state: int) -> int:
    return (state >> 29) % VOCAB


def read(token_ids: Iterable[int], seed: int) -> int:
    state = start_state(seed)
    for token_id in token_ids:
        state = advance(state, token_id)
    return state


def plain_generation(request: GenerationRequest, max_context: int) -> tuple[list[int], str]:
    """What the target alone would answer, and why it would end."""
    state = read(request.prompt_token_ids, request.sampling.seed)
    output: list[int] = []
    while True:
        output.append(next_token(state))
        state = advance(state, output[-1])
        if output[-1] in request.stop_token_ids:
            return output, "stop"
        num_tokens = len(request.prompt_token_ids) + len(output)
        if len(output) == request.max_tokens or num_tokens == max_context:
            return output, "length"


# ----- drafters: (state after the anchor, number of drafts) -> draft tokens ---------------------


def always_right(state: int, num_drafts: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(num_drafts):
        drafts.append(next_token(state))
        state = advance(state, drafts[-1])
    return drafts


def always_wrong(state: int, num_drafts: int) -> list[int]:
    return [(token_id + 1) % VOCAB for token_id in always_right(state, num_drafts)]


def half_right(state: int, num_drafts: int) -> list[int]:
    right = always_right(state, num_drafts)
    keep = num_drafts // 2
    return right[:keep] + [(token_id + 1) % VOCAB for token_id in right[keep:]]


def random_drafts(state: int, num_drafts: int) -> list[int]:
    noise = [advance(state, 1000 + i) for i in range(num_drafts)]
    right = always_right(state, num_drafts)
    return [r if n % 4 else n % VOCAB for r, n in zip(right, noise, strict=True)]


DRAFTERS: dict[str, Drafter] = {
    "always_right": always_right,
    "always_wrong": always_wrong,
    "half_right": half_right,
    "random": random_drafts,
}
