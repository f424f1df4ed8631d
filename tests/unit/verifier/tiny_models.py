"""Random targets small enough for unit tests, saved as real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
HIDDEN = 32
HEAD_DIM = 8


def save_target(
    path: Path,
    family: str = "qwen3",
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 64,
    is_tied: bool = False,
    silent_token_id: int | None = None,
    seed: int = 0,
    **config_values: Any,
) -> Any:
    """Save a random float32 target.

    Args:
        path: folder to create.
        family: ``qwen3`` or ``llama``.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        vocab_size: token ids.
        is_tied: whether the head is the embedding table.
        silent_token_id: an id that greedy decoding never yields, as a mask token must be.
        seed: of the weights.
        config_values: more keys of the config.

    Returns:
        transformers' own model with the same weights.
    """
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **config_values,
    )
    config._attn_implementation = "sdpa"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                value.normal_(0.0, 0.3)
        if silent_token_id is not None:
            # One of two opposite logits is positive, so a logit of zero is never the largest.
            head = model.lm_head.weight
            head[1] = -head[0]
            head[silent_token_id] = 0.0
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def generate_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The reference: transformers' own greedy ``generate``; returns the new tokens."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_pass(model: Any, token_ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One dense pass of transformers.

    Returns:
        ``hidden_states`` (embedding first), each ``[T, H]``, and the cache's keys and values
        ``[L, T, 2, G, D]``.
    """
    output = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=True)
    layers = [
        torch.stack([layer.keys[0], layer.values[0]]).permute(2, 0, 1, 3)
        for layer in output.past_key_values.layers
    ]
    return [hidden[0] for hidden in output.hidden_states], torch.stack(layers)
