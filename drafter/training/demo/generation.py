"""Batched greedy and sampled generation on a CPU, for producing training data.

Rows of like prompt length decode together over preallocated key/value buffers; finished rows leave
the batch. It knows nothing about drafts: this is plain decoding.

Shape letters: R rows, T query tokens, C buffer length, L layers, Q query heads, G key/value heads,
D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Qwen3ForCausalLM

GENERATION_ATTENTION = "demo_generation"
COMPACT_BELOW = 0.75  # drop finished rows once fewer than this share is alive


@dataclass
class DecodingBuffers:
    """Keys and values of a batch. Owner: ``generate``; the attention function writes new tokens.

    Attributes:
        keys: ``[L, R, G, C, D]``; ``values`` alike.
        num_filled: columns that hold tokens.
        visible: ``[R, 1, T, num_filled + T]`` bool of the pass under way.
    """

    keys: Tensor
    values: Tensor
    num_filled: int
    visible: Tensor

    def keep(self, rows: Tensor) -> None:
        """Keep only ``rows``. Mutates."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def buffered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    buffers: DecodingBuffers,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Append ``key``/``value`` ``[R, G, T, D]`` to the buffers and attend with ``[R, Q, T, D]``."""
    num_new, num_kv_heads = key.shape[2], key.shape[1]
    end = buffers.num_filled + num_new
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    buffers.keys[layer_idx, :, :, buffers.num_filled : end] = key
    buffers.values[layer_idx, :, :, buffers.num_filled : end] = value
    queries = query.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [R, G, Q/G*T, D]
    share = query.shape[1] // num_kv_heads
    mixed = functional.scaled_dot_product_attention(
        queries,
        buffers.keys[layer_idx, :, :, :end],
        buffers.values[layer_idx, :, :, :end],
        attn_mask=buffers.visible.repeat(1, 1, share, 1),
        scale=scaling,
    )
    return mixed.unflatten(2, (share, num_new)).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(GENERATION_ATTENTION, buffered_attention)


def generate(
    target: Qwen3ForCausalLM,
    prompts: list[list[int]],
    temperatures: list[float],
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Decode all prompts together.

    Args:
        target: loaded with the attention function ``demo_generation``.
        prompts: token ids, none empty; like lengths waste least.
        temperatures: one per prompt; 0 is greedy.
        max_new_tokens: limit per row.
        seed: of the sampled rows. A row's tokens depend on the batch it is in.

    Returns:
        New token ids per prompt, the end token included if it came.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)  # [R, T] left-padded
    is_real = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        is_real[row, longest - len(prompt) :] = True
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    # A padding query sees itself, or its softmax would have no terms.
    visible = (causal & is_real[:, None, :]) | torch.eye(longest, dtype=torch.bool)
    config = target.config
    depth, num_kv_heads, head_dim = (
        config.num_hidden_layers,
        int(config.num_key_value_heads or config.num_attention_heads),
        int(config.head_dim),
    )
    shape = (depth, len(prompts), num_kv_heads, longest + max_new_tokens, head_dim)
    buffers = DecodingBuffers(torch.zeros(shape), torch.zeros(shape), 0, visible[:, None])
    positions = (is_real.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        logits = _forward(target, ids, positions, buffers)
        return _decode(
            target, buffers, is_real, logits, torch.tensor(temperatures), max_new_tokens, seed
        )


def _decode(
    target: Qwen3ForCausalLM,
    buffers: DecodingBuffers,
    is_real: Tensor,
    logits: Tensor,
    temperatures: Tensor,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Extend prefilled rows token by token."""
    generator = torch.Generator().manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in range(len(is_real))]
    rows = torch.arange(len(is_real))  # original index of every live row
    is_done = torch.zeros(len(is_real), dtype=torch.bool)
    next_position = is_real.sum(1)
    for _ in range(max_new_tokens):
        tokens = _choose(logits, temperatures, generator)  # [R]
        for row, token, done in zip(rows.tolist(), tokens.tolist(), is_done.tolist(), strict=True):
            if not done:
                outputs[row].append(token)
        is_done |= tokens == target.config.eos_token_id
        if bool(is_done.all()) or buffers.num_filled == buffers.keys.shape[3]:
            break
        if float((~is_done).float().mean()) < COMPACT_BELOW:
            alive = (~is_done).nonzero().flatten()
            buffers.keep(alive)
            rows, tokens, temperatures = rows[alive], tokens[alive], temperatures[alive]
            is_real, next_position = is_real[alive], next_position[alive]
            is_done = is_done[alive]
        is_real = functional.pad(is_real, (0, 1), value=True)
        buffers.visible = is_real[:, None, None, :]
        logits = _forward(target, tokens[:, None], next_position[:, None], buffers)
        next_position = next_position + 1
    return outputs


def _forward(
    target: Qwen3ForCausalLM, ids: Tensor, positions: Tensor, buffers: DecodingBuffers
) -> Tensor:
    """Run the target over new tokens; returns ``[R, V]`` logits of the last one. Fills buffers."""
    decoder = target.model
    hidden = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(hidden, positions)
    for layer in decoder.layers:
        hidden = layer(hidden, position_embeddings=rotary, attention_mask=None, buffers=buffers)
    buffers.num_filled += ids.shape[1]
    logits: Tensor = target.lm_head(decoder.norm(hidden[:, -1]))
    return logits


def _choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Pick one token per row: the best one at temperature 0, a sample otherwise."""
    tokens = logits.argmax(-1)
    sampled = (temperatures > 0).nonzero().flatten()
    if len(sampled):
        scaled = logits[sampled] / temperatures[sampled, None]
        drawn = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
        tokens[sampled] = drawn.squeeze(1)
    return tokens
